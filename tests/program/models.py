"""Models with what they are called with and an objective,
in double precision: what a program has to say of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jvp, vmap
from torch.nn import functional as F

import surefoot as sf

Case = tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]


class Calls(nn.Module):
    """A function of submodules and inputs as a module."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


def square(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(-1, 1, out.numel()).to(out).reshape(out.shape)).square().mean() + out.sin().sum()


def entropy(classes: int) -> Callable[[Tensor], Tensor]:
    return lambda out: F.cross_entropy(out.flatten(0, -2), torch.arange(out[..., 0].numel()) % classes)


def of(model: nn.Module, *args: Tensor, loss: Callable[[Any], Tensor] = square) -> Case:
    return model, args, loss


ACTIVATIONS = [
    nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.ReLU(inplace=True), nn.Softplus(), nn.Softplus(beta=2), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.ELU(0.7), nn.SELU(), nn.CELU(0.6),
        nn.LeakyReLU(),
    nn.Hardtanh(-0.3, 0.4), nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), nn.Softsign(), nn.LogSigmoid(),
        nn.PReLU(),
    nn.PReLU(7), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink(), nn.Threshold(0.1, 0.1), nn.Softmin(1),
    nn.LogSoftmax(1), nn.GLU(), nn.RReLU().eval(), nn.Identity(), nn.Dropout(0.0), nn.Dropout(0.5).eval(),
]  # fmt: skip


def perceptron(activation: nn.Module) -> Case:
    width = 8 if isinstance(activation, nn.GLU) else 7
    model = nn.Sequential(nn.Linear(5, width), activation, nn.Linear(4 if width == 8 else 7, 3))
    return model, (torch.randn(6, 5),), entropy(3)


def images(*layers: nn.Module, channels: int = 2, size: int = 8) -> Case:
    return nn.Sequential(*layers, nn.Flatten()), (torch.randn(3, channels, size, size),), square


class Block(nn.Module):
    """A residual block with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.n, self.m = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.n(self.a(x)), inplace=True)
        h = self.m(self.b(h))
        h += x
        return F.relu(h)


def attention(model: Any, x: Tensor) -> Tensor:
    return model.m(x, x, x, need_weights=False)[0]


def causal(model: Any, x: Tensor) -> Tensor:
    q, k, v = model.qkv(x).chunk(3, -1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(
        model.mask[: x.shape[1], : x.shape[1]] == 0, -math.inf
    )
    return F.softmax(scores, dim=-1) @ v


def residual_of(model: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    u = model.net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return bend + u * slope


def hessian_of(model: Any, x: Tensor) -> Tensor:
    return vmap(hessian(lambda t: model.net(t[None])[0, 0]))(x).flatten(1)


def tangent_of(model: Any, x: Tensor) -> Tensor:
    return jvp(model.net, (x,), (torch.ones_like(x),))[1]


def written(model: Any, x: Tensor) -> Tensor:
    """Writes into views of tensors, some of which were fixed."""
    out = torch.zeros(x.shape[0], 4).to(x)
    h = model.net(x)
    out[:, 1] = h[:, 0]
    out[:, 2:] += h[:, 1:] * 2
    column = out[:, 1]
    column *= 3
    h[0, 0] = 5.0
    x = x.clone()
    x[:, 0].mul_(h[:, 2])
    return out + h[:, :1] + x.sum(1, keepdim=True)


def moves(model: Any, x: Tensor) -> Tensor:
    h = model.net(x)
    parts = [
        h.roll(1, 1), h.flip(0), h.tril(), h.repeat(1, 2)[:, 1:4], h[[1, 0, 2, 3]],
            h.diagonal()[None].expand(4, 3),
        h.unfold(0, 3, 1).transpose(1, 2).reshape(2, 9)[:1, :3].expand(4, 3), h.gather(1, model.index),
        torch.cat([h[:2], h[2:] * 2]), torch.stack([h[:, 0], h[:, 1], h[:, 2]], 1), h.t().reshape(4, 3),
        F.pad(h, (1, -1), value=0.5), h.cumsum(1), h[model.mask].reshape(1, -1)[:, :3].expand(4, 3),
        torch.where(model.where, h, h * 2), h.masked_fill(model.where, 0.3), h.index_select(1, model.index[0]),
        torch.zeros_like(h).scatter(1, model.index, h), torch.zeros_like(h).index_add(0, model.index[:, 0], h),
        h.select_scatter(h[:, 0] * 3, 1, 2), h.prod(1, keepdim=True).expand(4, 3), h.clone().fill_diagonal_(1.0),
        h.masked_scatter(model.where, h * 2), h.masked_select(model.where)[:3].expand(4, 3),
    ]  # fmt: skip
    return torch.stack(parts)


def chosen(model: Any, x: Tensor) -> Tensor:
    h = model.net(x)
    parts = [
        h.amax(1), h.amin(1), h.max(1).values, h.min(0).values.sum().expand(4), h.sort(1).values[:, 1],
        h.topk(2, 1).values.sum(1), h.median(1).values, h.clamp(-0.2, 0.3).sum(1), h.clamp(min=0.1).sum(1),
        torch.maximum(h, h.flip(1))[:, 0], torch.minimum(h, h.flip(1))[:, 0], torch.where(h > 0, h, h / 2).sum(1),
        (h * (h > 0.1)).sum(1), h.abs().sum(1), h.max().expand(4), h.norm(dim=1), h.norm(p=1, dim=1), h.std(1),
        h.var(1), h.var(1, correction=0), F.normalize(h, dim=1)[:, 0], F.cosine_similarity(h, h.flip(0), dim=1),
        h.logsumexp((0, 1)).expand(4), (h * h + 1).sqrt().sum(1), (h.square() + 1).pow(-1.5).sum(1), 2 ** h[:, 0],
        h.exp().log1p().sum(1), (1 / (h.square() + 1)).sum(1), h.tan().sum(1) * 0.01, torch.lerp(h, h.flip(0),
            0.3)[:, 0],
        torch.linalg.solve(h[:3] @ h[:3].mT + 3 * torch.eye(3).to(h), h[:3])[:, 0].sum().expand(4),
        torch.linalg.inv(h[:3] @ h[:3].mT + 3 * torch.eye(3).to(h)).sum().expand(4), torch.cdist(h, h + 1).sum(1),
    ]  # fmt: skip
    return torch.stack(parts)


def einsums(model: Any, x: Tensor) -> Tensor:
    h = torch.einsum("bi,ijk,bk->bj", x, model.w, x) + torch.einsum("bi,oi->bo", x, model.v)
    return h + torch.tensordot(x, model.v.mT, 1) + torch.baddbmm(h[None], x[None], model.v.mT[None], alpha=0.5)[0]


def resized(model: Any, x: Tensor) -> Tensor:
    h = model.net(x)
    modes = ("nearest", "bilinear", "bicubic", "nearest-exact")
    parts = [F.interpolate(h, size=(5, 11), mode=m).flatten() for m in modes]
    parts += [F.interpolate(h, scale_factor=1.7, mode=m, align_corners=True).flatten() for m in modes[1:3]]
    parts += [F.interpolate(h, scale_factor=0.6, mode="bilinear").flatten(), F.pixel_shuffle(h, 2).flatten()]
    return torch.cat([p.square() for p in parts])


def pooled(model: Any, x: Tensor) -> Tensor:
    h = model.net(x)
    parts = [
        F.avg_pool2d(h, 3), F.avg_pool2d(h, 3, 2, 1), F.avg_pool2d(h, 3, 2, 1, ceil_mode=True,
            count_include_pad=False),
        F.avg_pool2d(h, 2, divisor_override=3), F.max_pool2d(h, 2), F.max_pool2d(h, 3, 2, 1), F.lp_pool2d(h, 2, 2),
        F.max_pool2d(h, 2, 3, 1, dilation=2, ceil_mode=True), F.adaptive_avg_pool2d(h, (3, 5)),
            F.adaptive_avg_pool2d(h, 1),
        F.adaptive_max_pool2d(h, (3, 2)), F.max_pool1d(h.flatten(2), 3, 2), F.avg_pool1d(h.flatten(2), 3, 2, 1),
        F.unfold(h, 3, 2, 1, 2), F.fold(F.unfold(h, 2), (8, 8), 2, stride=1), F.pad(h, (1, 2, 0, 1),
            mode="reflect"),
        F.pad(h, (1, 2, 0, 1), mode="replicate"), F.pad(h, (1, 2, 0, 1), mode="circular"),
    ]  # fmt: skip
    return torch.cat([p.flatten() for p in parts])


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Case:
    model = kind(5, 4, batch_first=True, **options)
    return Calls(lambda m, x: m.layer(x)[0], layer=model), (torch.randn(3, 6, 5),), square


def losses() -> dict[str, Callable[[Tensor], Tensor]]:
    y, ids = torch.rand(6, 3).double(), torch.arange(6) % 3
    sign = torch.where(y > 0.5, 1.0, -1.0).double()
    return {
        "square": sf.Square(y), "cross entropy": sf.CrossEntropy(ids), "mse": lambda o: F.mse_loss(o, y),
        "l1": lambda o: F.l1_loss(o, y), "huber": lambda o: F.huber_loss(o, y, delta=0.3),
        "smooth l1": lambda o: F.smooth_l1_loss(o, y, beta=0.3), "kl": lambda o: F.kl_div(o.log_softmax(1), y,
            reduction="batchmean"),
        "nll": lambda o: F.nll_loss(o.log_softmax(1), ids, weight=y[0]),
            "bce": lambda o: F.binary_cross_entropy(o.sigmoid(), y),
        "logistic": lambda o: F.binary_cross_entropy_with_logits(o, y, pos_weight=y[0] + 1),
        "smoothed": lambda o: F.cross_entropy(o, ids, label_smoothing=0.1),
            "soft": lambda o: F.cross_entropy(o, y),
        "ignored": lambda o: F.cross_entropy(o, torch.where(ids == 1, -100, ids)),
        "soft margin": lambda o: F.soft_margin_loss(o, sign), "poisson": lambda o: F.poisson_nll_loss(o, y),
        "hinge": lambda o: F.hinge_embedding_loss(o, sign),
        "module": nn.CrossEntropyLoss(reduction="sum"),
    }  # fmt: skip


def gpt2() -> Case | None:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    ids = torch.arange(12).reshape(2, 6) % 17
    return GPT2LMHeadModel(config), (ids,), lambda out: entropy(17)(out.logits)


def table() -> dict[str, Case]:
    """All cases by name, the same at every call."""
    torch.manual_seed(0)
    image, tokens, ids = torch.randn(3, 2, 8, 8), torch.randn(3, 5, 8), torch.arange(10).reshape(2, 5) % 7
    mlp = lambda a, b, act=nn.Tanh: nn.Sequential(nn.Linear(a, 6), act(), nn.Linear(6, b))  # noqa: E731
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    index = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
    where = torch.arange(12).reshape(4, 3) % 3 == 0
    tied = nn.Linear(8, 7, bias=False)
    cases: dict[str, Case] = {f"mlp {a}": perceptron(a) for a in ACTIVATIONS}
    cases |= {
        "cnn": images(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2, stride=2, dilation=2)),
        "grouped": images(nn.Conv2d(2, 4, 3, groups=2, padding="same", padding_mode="circular"), nn.Softplus()),
        "transposed": images(nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            nn.Tanh()),
        "transposed, dilated": of(
            nn.ConvTranspose1d(2, 3, 2, dilation=2, output_padding=1), torch.randn(2, 2, 5)
        ),
        "conv1d": of(nn.Conv1d(2, 3, 3, padding=1), torch.randn(2, 2, 6)),
        "conv3d": of(nn.Sequential(nn.Conv3d(2, 3, 2), nn.AvgPool3d(2), nn.MaxPool3d(2)), torch.randn(2, 2, 6,
            6, 6)),
        "vgg": images(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
                      nn.Linear(36, 5), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(5, 3)),
        "resnet block": images(nn.Conv2d(2, 4, 3), Block(), Block(), nn.AdaptiveAvgPool2d(1)),
        "resnet block in eval": images(nn.Conv2d(2, 4, 3), Block(), nn.AdaptiveAvgPool2d(1)),
        "batch norm 1d": of(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)), torch.randn(6, 5)),
        "group norm": images(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)),
        "instance norm": images(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)),
        "layer norm": of(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm((5, 8))), tokens),
        "rms norm": of(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), tokens),
        "local response": images(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2)),
        "weight norm": of(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), torch.randn(4, 5)),
        "rnn": recurrent(nn.RNN), "gru": recurrent(nn.GRU, num_layers=2), "lstm": recurrent(nn.LSTM,
            bidirectional=True),
        "rnn relu": recurrent(nn.RNN, nonlinearity="relu"), "cell": of(nn.LSTMCell(5, 4), torch.randn(3, 5)),
        "attention": of(Calls(attention, m=nn.MultiheadAttention(8, 2, batch_first=True)), tokens),
        "causal attention": of(Calls(causal, qkv=nn.Linear(8, 24), mask=torch.ones(6, 6).tril()), tokens),
        "sdpa": of(Calls(lambda m, x: F.scaled_dot_product_attention(m.q(x), x, x, is_causal=True),
            q=nn.Linear(8, 8)), tokens),
        "encoder": of(encoder, tokens),
        "encoder in eval": of(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True,
            activation="gelu").eval(), tokens),
        "decoder": of(Calls(lambda m, x: m.d(x, x.flip(1)), d=nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0,
            batch_first=True)), tokens),
        "embedding": of(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), ids, loss=entropy(7)),
        "tied": of(Calls(lambda m, x: m.head(F.embedding(x, m.table)), head=tied, table=tied.weight), ids,
            loss=entropy(7)),
        "bags": of(nn.Sequential(nn.EmbeddingBag(7, 4, mode="mean"), nn.Linear(4, 3)), ids, loss=entropy(3)),
        "bilinear": of(Calls(lambda m, x: m.b(x, x), b=nn.Bilinear(5, 5, 3)), torch.randn(4, 5)),
        "pinn": of(Calls(residual_of, net=mlp(1, 1)), torch.randn(5, 1)),
        "hessian": of(Calls(hessian_of, net=mlp(2, 1, nn.SiLU)), torch.randn(4, 2)),
        "tangent": of(Calls(tangent_of, net=mlp(2, 3, nn.GELU)), torch.randn(4, 2)),
        "written": of(Calls(written, net=mlp(5, 3)), torch.randn(4, 5)),
        "moves": of(Calls(moves, net=mlp(5, 3), index=index, where=where, mask=where), torch.randn(4, 5)),
        "chosen": of(Calls(chosen, net=mlp(5, 3)), torch.randn(4, 5)),
        "einsum": of(Calls(einsums, w=weight(5, 3, 5), v=weight(3, 5)), torch.randn(4, 5)),
        "resized": of(Calls(resized, net=nn.Conv2d(2, 4, 3)), image),
        "pooled": of(Calls(pooled, net=nn.Conv2d(2, 2, 3, padding=1)), image),
        "two inputs": of(Calls(lambda m, x, y: m.a(x) * m.b(y), a=mlp(5, 3), b=mlp(2, 3)), torch.randn(4, 5),
            torch.randn(4, 2)),
        "functional": of(Calls(lambda m, x: functional_call(m.net, {"0.weight": m.net[0].weight * 2}, (x,)),
            net=mlp(5, 3)), torch.randn(4, 5)),
    }  # fmt: skip
    cases["resnet block in eval"][0].eval()
    gpt = gpt2()
    if gpt is not None:
        cases["gpt-2"] = gpt
    x6 = torch.randn(6, 5)
    for name, loss in losses().items():
        objective = (lambda o, f=loss: f(o, torch.arange(6) % 3)) if name == "module" else loss
        cases[f"loss {name}"] = (mlp(5, 3), (x6,), objective)
    return {name: (model.double(), tuple(map(_double, args)), loss) for name, (model, args, loss) in cases.items()}


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
