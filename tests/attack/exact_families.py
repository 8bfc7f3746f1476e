"""The families of networks that the exact judge attacks: each is drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from attack.exact_subject import Material, Subject
from attack.exact_trees import CANCELLING, LARGE, LEAVES, Expression, shifted, tree
from surefoot.objectives import BinaryCrossEntropy, Huber

SATURATED = (25.0, -25.0, 40.0, -40.0, 19.0, -37.0, 700.0, -700.0)
FAMILIES: dict[str, Callable[[int], Subject]] = {}
_ACTIVATIONS = ("tanh", "sigmoid", "gelu", "silu", "elu", "mish", "erf", "identity")


def family(build: Callable[[Material], Subject]) -> Callable[[Material], Subject]:
    """Register under the name of the function."""
    FAMILIES[build.__name__] = lambda seed: build(Material(seed))
    return build


def _loss(m: Material, rows: int, columns: int, scale: float = 1.0) -> tuple[Any, Any]:
    """A loss and its targets."""
    kind = m.whole(0, 3)
    if kind == 0 and columns > 1:
        return sf.CrossEntropy(), m.classes(rows, columns)
    if kind == 1:
        return BinaryCrossEntropy(), m.normal(rows, columns).sigmoid().round()
    if kind == 2:
        return Huber(delta=round(m.power(-1, 1), 3)), m.normal(rows, columns, scale=scale)
    return sf.Square(), m.normal(rows, columns, scale=scale)


def _network(m: Material, *, bias: bool | None = None) -> tuple[nn.Module, int, int]:
    """One or two small layers with an activation; inputs and outputs."""
    sizes = m.whole(1, 3), m.whole(1, 3), m.whole(1, 2)
    with_bias = m.chance(0.5) if bias is None else bias
    act = LEAVES[m.one_of(*_ACTIVATIONS)]
    if m.chance(0.5):
        layers = [nn.Linear(sizes[0], sizes[2], bias=with_bias), Expression(act)]
    else:
        first, last = nn.Linear(*sizes[:2], bias=with_bias), nn.Linear(*sizes[1:], bias=with_bias)
        layers = [first, Expression(act), last]
    return nn.Sequential(*layers), sizes[0], sizes[2]


@family
def expressions(m: Material) -> Subject:
    """Trees of scalar functions behind a linear layer, or on the input itself."""
    text, function = tree(m, m.whole(1, 3))
    rows, columns = m.whole(1, 2), m.whole(1, 2)
    x = m.normal(rows, 2, scale=m.one_of(1.0, 1.0, 5.0))
    if m.chance(0.4):
        return Subject(
            text, Expression(function), x, sf.Square(), m.normal(rows, 2), "input", (0.0, m.power(-6, 0))
        )
    model = m.weights(nn.Sequential(nn.Linear(2, columns, bias=m.chance(0.5)), Expression(function)))
    return Subject(text, model, x, *_loss(m, rows, columns), radii=(0.0, m.power(-6, 0)))


@family
def cancellation(m: Material) -> Subject:
    """Functions in which digits cancel, near where they do, with targets near the values."""
    name = m.one_of(*CANCELLING, "shifted")
    by = m.one_of(*LARGE)
    function = shifted(LEAVES[m.one_of("tanh", "sin", "sigmoid")], by) if name == "shifted" else CANCELLING[name]
    model = m.weights(nn.Sequential(nn.Linear(1, 1, bias=m.chance(0.3)), Expression(function)))
    x = m.normal(m.whole(1, 2), 1, scale=m.one_of(1.0, 1e-3, 1e-6, 1e4))
    with torch.no_grad():
        near = model(x)
    y = near + near.abs() * m.normal(*near.shape) * m.power(-17, -1)
    return Subject(f"{name} {by:g}", model, x, sf.Square(), y, radii=(0.0, m.power(-9, -1)))


@family
def saturation(m: Material) -> Subject:
    """Activations far out, where derivatives are the difference of nearly equal numbers."""
    name = m.one_of(*LEAVES, *CANCELLING)
    function = {**LEAVES, **CANCELLING}[name]
    at = m.one_of(*SATURATED)
    radii = (0.0, m.power(-6, -1))
    if m.chance(0.5):
        x = torch.tensor([[at]], dtype=torch.float64) + m.normal(1, 1, scale=m.one_of(0.0, 1.0))
        return Subject(f"{name} at {at:g}", Expression(function), x, sf.Square(), m.normal(1, 1), "input", radii)
    model = m.weights(nn.Sequential(nn.Linear(1, 1, bias=False), Expression(function)))
    with torch.no_grad():
        model[0].weight.fill_(at)
    rows = m.whole(1, 2)
    x = 1 + m.normal(rows, 1, scale=0.1)
    return Subject(f"{name} at {at:g}", model, x, sf.Square(), m.normal(rows, 1), radii=radii)


@family
def saturated_losses(m: Material) -> Subject:
    """Confident classifiers: margins of 10 to 60, right and wrong."""
    rows, columns = m.whole(1, 2), m.whole(1, 3)
    margin = m.one_of(10.0, 20.0, 36.0, 40.0, 60.0, 400.0)
    model = m.weights(nn.Linear(1, columns, bias=m.chance(0.3)), scale=margin)
    x = 1 + m.normal(rows, 1, scale=0.2)
    with torch.no_grad():
        outputs = model(x)
    if columns > 1:
        y: Tensor = outputs.argmax(-1) if m.chance(0.8) else m.classes(rows, columns)
        loss: Any = sf.CrossEntropy()
    else:
        y, loss = (outputs > 0).double(), BinaryCrossEntropy()
    return Subject(f"margin {margin:g}", model, x, loss, y, radii=(0.0, m.power(-6, -1)))


@family
def scales(m: Material) -> Subject:
    """Weights and inputs at the ends of the range: 1e±200, 1e±30, 1e±155, denormals."""
    exponents = (-310, -200, -160, -30, -8, 8, 30, 155, 200)
    model, inputs, columns = _network(m)
    model = m.weights(model, scale=10.0 ** m.one_of(*exponents))
    if m.chance(0.5):
        with torch.no_grad():  # layers of opposite scales
            for parameter in model[0].parameters():
                parameter.copy_(m.normal(*parameter.shape, scale=10.0 ** m.one_of(*exponents)))
    rows = m.whole(1, 2)
    size = 10.0 ** m.one_of(0, 0, *exponents)
    x = m.normal(rows, inputs, scale=size)
    radius = float(next(model.parameters()).detach().abs().max()) * m.power(-6, -1) if m.chance(0.7) else 1e-3
    loss = _loss(m, rows, columns, scale=m.one_of(1.0, size))
    return Subject(f"x of size {size:g}", model, x, *loss, radii=(0.0, radius))


@family
def normalisations(m: Material) -> Subject:
    """Layer, group, batch, instance and root-mean-square: mean/σ up to 1e7, ε from 1e-300 to 1, sizes to 1e156."""
    eps = 10.0 ** m.one_of(-300, -100, -20, -12, -8, -5, -5, -3, 0)
    mean = m.one_of(0.0, 1.0, 1e3, 1e5, 1e7)
    spread = 10.0 ** m.one_of(0, 0, 0, -6, 6, 100, 156, -160)
    affine = m.chance(0.3)
    rows = m.whole(1, 2)
    kinds: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "layer": (lambda: nn.LayerNorm(4, eps=eps, elementwise_affine=affine), (rows, 4)),
        "group": (lambda: nn.GroupNorm(2, 4, eps=eps, affine=affine), (rows, 4)),
        "root": (lambda: nn.RMSNorm(4, eps=eps, elementwise_affine=affine), (rows, 4)),
        "batch": (lambda: nn.BatchNorm1d(2, eps=eps, affine=affine), (rows + 2, 2)),
        "batch_eval": (lambda: nn.BatchNorm1d(2, eps=eps, affine=affine).eval(), (rows + 2, 2)),
        "instance": (lambda: nn.InstanceNorm1d(2, eps=eps, affine=affine), (rows, 2, 3)),
    }
    name = m.one_of(*kinds)
    build, shape = kinds[name]
    norm = m.weights(build())
    name = f"{name}, eps {eps:g}, mean {mean:g}, spread {spread:g}"
    x = (m.normal(*shape) + mean) * spread
    y = m.normal(*shape)
    if m.chance(0.5):
        return Subject(name, norm, x, sf.Square(), y, "input", (0.0, spread * m.power(-6, -1)))
    if len(shape) == 2 and m.chance(0.7):
        lift = m.weights(nn.Linear(1, shape[1]), scale=spread)
        with torch.no_grad():
            lift.bias.add_(mean * spread)
        model = nn.Sequential(lift, norm)
        return Subject(name, model, m.normal(shape[0], 1), sf.Square(), y, radii=(0.0, spread * m.power(-6, -1)))
    last = m.weights(nn.Linear(shape[-1], 1))
    model = nn.Sequential(norm, last)
    return Subject(name, model, x, sf.Square(), m.normal(*shape[:-1], 1), radii=(0.0, m.power(-6, -1)))


@family
def channels_last(m: Material) -> Subject:
    """Images whose channels are stored last, with a large mean, through convolutions and group normalisation."""
    mean = m.one_of(0.0, 1e3, 1e5, 1e7)
    rows, channels = m.whole(1, 2), m.one_of(2, 4)
    x = m.normal(rows, channels, 2, 2, mean=mean).contiguous(memory_format=torch.channels_last)
    norm = nn.GroupNorm(m.one_of(1, 2), channels, affine=m.chance(0.3), eps=m.one_of(1e-5, 1e-12))
    if m.chance(0.5):
        model = m.weights(norm)
        return Subject(
            f"mean {mean:g}", model, x, sf.Square(), m.normal(*x.shape), "input", (0.0, m.power(-6, -1))
        )
    conv = nn.Conv2d(channels, channels, m.one_of(1, 2), padding=1, bias=m.chance(0.5))
    model = m.weights(nn.Sequential(conv, norm, nn.Tanh())).to(memory_format=torch.channels_last)
    with torch.no_grad():
        shape = model(x).shape
    return Subject(f"conv, mean {mean:g}", model, x, sf.Square(), m.normal(*shape), radii=(0.0, m.power(-6, -2)))


def _narrow(m: Material, dtype: torch.dtype) -> Subject:
    model, inputs, columns = _network(m)
    rows = m.whole(1, 2)
    model = m.weights(model, scale=m.one_of(1.0, 1.0, 1e-3)).to(dtype)
    x = m.normal(rows, inputs, scale=m.one_of(1.0, 1.0, 1e-3)).to(dtype)
    loss, y = _loss(m, rows, columns)
    y = y.to(dtype) if y.is_floating_point() else y
    return Subject(str(dtype), model, x, loss, y, radii=(0.0, m.power(-4, -1)))


@family
def float32(m: Material) -> Subject:
    """Weights in single precision."""
    return _narrow(m, torch.float32)


@family
def bfloat16(m: Material) -> Subject:
    """Weights of eight bits."""
    return _narrow(m, torch.bfloat16)


@family
def float16(m: Material) -> Subject:
    """Weights of eleven bits with a short range."""
    return _narrow(m, torch.float16)


class Moody(nn.Module):
    """A function of its mode and of plain attributes."""

    def __init__(self, m: Material) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale, self.options = 1.0, {"shift": 0.0}
        self.act = m.one_of("tanh", "sigmoid", "silu")

    def forward(self, x: Tensor) -> Tensor:
        z = self.scale * self.first(x) + self.options["shift"]
        z = self.last(LEAVES[self.act](z))
        return z if self.training else -z


@family
def changes(m: Material) -> Subject:
    """Modes, attributes, frozen parameters and weights that change between the steps of an optimizer."""
    rows = m.whole(1, 3)
    model = m.weights(Moody(m))
    numbers = [(m.whole(0, 5), m.between(-2, 2)) for _ in range(8)]

    def change(k: int) -> None:
        kind, number = numbers[k]
        if k == 0:
            return
        if kind == 0:
            model.train(not model.training)
        elif kind == 1:
            model.scale = round(5 * number, 2)
        elif kind == 2:
            model.options["shift"] = round(number, 2)
        elif kind == 3:
            model.first.requires_grad_(not model.first.weight.requires_grad)
        elif kind == 4:
            model.act = "erf"
        else:
            with torch.no_grad():
                model.last.weight.mul_(number)

    text = " ".join(f"{kind}:{number:.2f}" for kind, number in numbers[1:3])
    return Subject(text, model, m.normal(rows, 2), *_loss(m, rows, 2), change=change, radii=(0.0, m.power(-4, -1)))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return -5 * g


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 40 * g


class _Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * torch.cos(ctx.saved_tensors[0])


@family
def custom_backward(m: Material) -> Subject:
    """Functions with a backward of their own: the derivative, its negative, another."""
    kind = m.one_of(_Reversed, _Halved, _Right)
    rows = m.whole(1, 3)
    layers = nn.Linear(2, 2), Expression(kind.apply), nn.Linear(2, 2)
    model = m.weights(nn.Sequential(*layers))
    radii = (0.0, m.power(-3, 0))
    return Subject(
        kind.__name__, model, m.normal(rows, 2), *_loss(m, rows, 2), radii=radii, backward=kind is _Right
    )


@family
def edges(m: Material) -> Subject:
    """One sample, one output, no bias, sizes of zero, outputs picked from several results."""
    kinds: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
        "one output": lambda: (nn.Linear(3, 1, bias=False), m.normal(1, 3)),
        "one number": lambda: (nn.Linear(1, 1, bias=False), m.normal(1, 1)),
        "no samples": lambda: (nn.Linear(2, 2), m.normal(0, 2)),
        "no inputs": lambda: (_linear(0, 2), m.normal(2, 0)),
        "none inside": lambda: (nn.Sequential(_linear(2, 0), nn.Tanh(), _linear(0, 2)),
                                 m.normal(2, 2)),
        "frozen first": lambda: (
            _frozen(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1, bias=False)), 2), m.normal(1, 3)),
        "frozen weight": lambda: (_frozen(nn.Linear(3, 1), 1), m.normal(1, 3)),
        "largest": lambda: (nn.Sequential(nn.Linear(2, 3), Expression(lambda z: z.max(-1, keepdim=True).values)),
                            m.normal(1, 2)),
        "half": lambda: (nn.Sequential(nn.Linear(2, 4), Expression(lambda z: z.chunk(2, -1)[0])), m.normal(1, 2)),
        "unbound": lambda: (
            nn.Sequential(nn.Linear(2, 2), Expression(lambda z: torch.stack(z.unbind(-1)[::-1], -1))),
            m.normal(1, 2)),
        "one wide": lambda: (nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)), m.normal(1, 1)),
        "zero weights": lambda: (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), m.normal(1, 2)),
        "conv one": lambda: (nn.Sequential(nn.Conv1d(1, 1, 2), nn.Tanh(), nn.Flatten()), m.normal(1, 1, 3)),
    }  # fmt: skip
    name = m.one_of(*kinds)
    model, x = kinds[name]()
    model = m.weights(model, 0.0 if name == "zero weights" else 1.0)
    with torch.no_grad():
        shape = model(x).shape
    return Subject(name, model, x, *_loss(m, *shape), radii=(0.0, m.power(-3, 0)))


class Inverted(nn.Module):
    """A matrix of parameters, inverted or in a logarithm of its determinant, far from a singular one or near."""

    def __init__(self, kind: str, size: int, distance: float) -> None:
        super().__init__()
        self.kind, self.distance, self.of = kind, distance, nn.Parameter(torch.zeros(size, size))

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.of + self.distance * torch.eye(len(self.of), dtype=x.dtype)
        if self.kind == "inverse":
            return x @ torch.linalg.inv(lifted)
        if self.kind == "solve":
            return torch.linalg.solve(lifted, x.mT).mT
        return x * torch.logdet(lifted)


@family
def inverses(m: Material) -> Subject:
    """Inverses, solutions of linear systems and logarithms of determinants."""
    kind, size, distance = (
        m.one_of("inverse", "solve", "logdet"),
        m.whole(1, 3),
        m.one_of(1.0, 1e-2, 30.0, 1e-6, 1e5),
    )
    model = m.weights(Inverted(kind, size, distance), scale=0.2 * distance)
    rows = m.whole(1, 2)
    x = m.normal(rows, size)
    if m.chance(0.4):
        model = nn.Sequential(model, m.weights(nn.Linear(size, 2)), nn.Tanh())
    with torch.no_grad():
        columns = model(x).shape[1]
    radii = (0.0, distance * m.power(-6, -1))
    return Subject(f"{kind} near {distance:g}", model, x, *_loss(m, rows, columns), radii=radii)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer that may have no inputs or no outputs, of which torch warns when it is made."""
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = nn.Parameter(torch.zeros(outputs, inputs)), nn.Parameter(torch.zeros(outputs))
    layer.in_features, layer.out_features = inputs, outputs
    return layer


def _frozen(model: nn.Module, count: int) -> nn.Module:
    for parameter in list(model.parameters())[:count]:
        parameter.requires_grad_(False)
    return model


@family
def semantics(m: Material) -> Subject:
    """What torch does at thresholds, with odd options, and at the break itself."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "softplus 0.5": lambda z: F.softplus(z, threshold=0.5),
        "softplus 2, 1": lambda z: F.softplus(z, beta=2.0, threshold=1.0),
        "celu -1": lambda z: F.celu(z, -1.0),
        "celu 0.7": lambda z: F.celu(z, 0.7),
        "elu -0.5": lambda z: F.elu(z, -0.5),
        "|sign|": lambda z: torch.sign(z).abs(),
        "sign²": lambda z: torch.sign(z) ** 2,
        "sign z": lambda z: torch.sign(z) * z,
        "leaky -1": lambda z: F.leaky_relu(z, -1.0),
        "leaky 2": lambda z: F.leaky_relu(z, 2.0),
        "where": lambda z: torch.where(z > 0, z * z, torch.sin(z)),
        "clamp": lambda z: z.clamp(0.5, -0.5),
        "cube": lambda z: z**3,
    }
    name = m.one_of(*kinds)
    rows = m.whole(1, 2)
    x = (m.normal(rows, 2) * 2).round() / 2  # often at the break
    radii = (0.0, m.one_of(0.25, 0.5, 1.0))
    if m.chance(0.5):
        return Subject(name, Expression(kinds[name]), x, sf.Square(), m.normal(rows, 2), "input", radii)
    model = m.weights(nn.Sequential(nn.Linear(2, 1, bias=False), Expression(kinds[name])))
    with torch.no_grad():
        model[0].weight.copy_((model[0].weight * 2).round() / 2)
    return Subject(name, model, x, sf.Square(), m.normal(rows, 1), radii=radii)


_GROUPED: dict[str, Callable[[Tensor], Tensor]] = {
    "log-soft-max": lambda z: F.log_softmax(z, -1),
    "sum of exponentials": lambda z: torch.logsumexp(z, -1, keepdim=True) + z,
    "length": lambda z: torch.linalg.vector_norm(z, dim=-1, keepdim=True) * z,
    "direction": lambda z: F.normalize(z, dim=-1),
    "variance": lambda z: z.var(dim=-1, keepdim=True, unbiased=False) * z,
    "deviation": lambda z: torch.sin(z) + z.std(dim=-1, keepdim=True),
    "quotient": lambda z: z / (2 + torch.linalg.vector_norm(z, dim=-1, keepdim=True)),
    "by exponentials": lambda z: torch.tanh(z) / (1 + torch.exp(-z)),
    "soft-max": lambda z: F.softmax(3 * z, -1) * z,
    "attention": lambda z: F.softmax(z @ z.mT, -1) @ z,
    "gate": lambda z: torch.sigmoid(z[..., :1]) * F.layer_norm(z, z.shape[-1:]),
    "largest": lambda z: z - z.max(dim=-1, keepdim=True).values,
    "root mean square": lambda z: F.rms_norm(z, z.shape[-1:]) + F.gelu(z),
    "clamped": lambda z: z.clamp(-0.5, 0.75) * torch.erf(z),
}


class Grouped(nn.Module):
    """Functions of groups of numbers one behind the other, some with a residual connection."""

    def __init__(self, names: list[str], width: int, residual: bool) -> None:
        super().__init__()
        self.names, self.residual = names, residual
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=k % 2 == 0) for k in range(len(names)))

    def forward(self, z: Tensor) -> Tensor:
        for name, layer in zip(self.names, self.layers, strict=True):
            new = _GROUPED[name](layer(z))
            z = z + new if self.residual else new
        return z


@family
def groups(m: Material) -> Subject:
    """Functions of groups of numbers, between linear layers, on data of several scales and offsets."""
    names = [m.one_of(*_GROUPED) for _ in range(m.whole(1, 2))]
    rows, width, scale = m.whole(1, 3), m.whole(2, 3), m.one_of(1.0, 1.0, 0.1, 10.0, 1e-6, 1e4)
    x = m.normal(rows, width, scale=scale, mean=m.one_of(0.0, 0.0, 1.0, 1e3))
    text = f"{' > '.join(names)}, scale {scale:g}"
    if m.chance(0.2):
        model: nn.Module = Expression(_GROUPED[names[0]])
        return Subject(text, model, x, *_loss(m, rows, width), "input", (0.0, scale * m.power(-6, -1)))
    model = m.weights(Grouped(names, width, m.chance(0.4)), scale=m.one_of(1.0, 0.3, 3.0))
    return Subject(text, model, x, *_loss(m, rows, width), radii=(0.0, m.power(-6, -1)))


class Recurrent(nn.Module):
    """A recurrent layer, of which all states are read, or the last ones; or a cell, of which the last is read.

    ``x`` is steps × samples × numbers.
    """

    def __init__(self, layer: nn.Module, reads: str) -> None:
        super().__init__()
        self.layer, self.reads = layer, reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads == "cell":
            state: Any = None
            for step in x:
                state = self.layer(step, state)
            return torch.cat(state, -1) if isinstance(state, tuple) else state
        states, last = self.layer(x)
        if self.reads == "states":
            return states.flatten(0, 1)
        last = torch.cat(last, -1) if isinstance(last, tuple) else last
        return last.flatten(0, 1)


def _gates(m: Material, layer: nn.Module, hidden: int) -> str:
    """Weights in which gates differ: some of another size, some saturated by their bias, each unit its own."""
    sizes = [m.one_of(1.0, 1.0, 0.1, 3.0, 1e-4, 10.0) for _ in range(4)]
    shifts = [m.one_of(0.0, 0.0, 0.0, *SATURATED[:6]) for _ in range(4)]
    apart = m.chance(0.3)  # one unit has other gates than the others
    m.weights(layer)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "_hr" in name:
                continue
            for k, gate in enumerate(parameter.split(hidden)):
                part = gate[:1] if apart else gate
                part.mul_(sizes[k])
                if "bias_ih" in name:
                    part.add_(shifts[k])
    return f"gates {sizes} {shifts}{' apart' if apart else ''}"


@family
def recurrent(m: Material) -> Subject:
    """Recurrent layers and cells over a few steps with the same weights: saturated gates, gates that differ."""
    kind = m.one_of("RNN", "GRU", "GRU", "LSTM")
    inputs, hidden, steps, rows = m.whole(1, 2), m.whole(1, 2), m.whole(1, 3), m.whole(1, 2)
    bias = m.chance(0.8)
    if m.chance(0.4):
        layer, reads = getattr(nn, f"{kind}Cell")(inputs, hidden, bias=bias), "cell"
        text = f"{kind}Cell"
    else:
        options: dict[str, Any] = {"bias": bias, "bidirectional": m.chance(0.2)}
        if m.chance(0.2):
            options["num_layers"] = 2
        if kind == "LSTM" and hidden > 1 and m.chance(0.3):
            options["proj_size"] = 1
        layer, reads, text = (
            getattr(nn, kind)(inputs, hidden, **options),
            m.one_of("states", "last"),
            f"{kind} {options}",
        )
    text = f"{text}, {steps} steps, {_gates(m, layer, hidden)}"
    model: nn.Module = Recurrent(layer, reads).double()
    x = m.normal(steps, rows, inputs, scale=m.one_of(1.0, 1.0, 0.1, 5.0))
    if m.chance(0.3):
        with torch.no_grad():
            width = model(x).shape[1]
        model = nn.Sequential(model, m.weights(nn.Linear(width, 2)))
    with torch.no_grad():
        shape = model(x).shape
    if m.chance(0.15):
        return Subject(text, model, x, *_loss(m, *shape), "input", (0.0, m.power(-6, 1)))
    return Subject(text, model, x, *_loss(m, *shape), radii=(0.0, m.power(-6, 1)))
