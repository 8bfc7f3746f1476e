"""Second derivatives on balls: every tensor of a program, attacked at random points and by ascent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.bounds.centre import Centre, Unbounded
from surefoot.bounds.hessian import Hessian
from surefoot.bounds.jacobians import Jacobians
from surefoot.bounds.movement import Ball, filled
from surefoot.bounds.speed import Speed
from surefoot.program import differentiate, trace


class Written(nn.Module):
    """A network written out by hand, from a function of its parameters and the data."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / max(1, shape[-1]) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


def gated(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (F.silu(x @ a) * torch.sigmoid(x @ b)) @ c


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    scores = (x @ q) @ (x @ k).transpose(-2, -1) / 2
    mask = torch.ones(x.shape[1], x.shape[1]).tril() == 0
    y = torch.softmax(scores.masked_fill(mask, -torch.inf), -1) @ (x @ v)
    return (F.gelu(x + y) @ w).mean(1)


def normalised(x: Tensor, a: Tensor, g: Tensor, b: Tensor) -> Tensor:
    h = x @ a
    h = (h - h.mean(-1, keepdim=True)) / torch.sqrt(h.var(-1, keepdim=True, unbiased=False) + 1e-2)
    return torch.tanh(h * g) @ b


def channels(x: Tensor, k: Tensor, c: Tensor, w: Tensor) -> Tensor:
    h = F.softplus(F.conv1d(x[:, None], k, stride=2, padding=1))
    h = F.conv1d(h, c, groups=2, dilation=2, padding=2)
    return torch.cat([h[:, :1], h[:, 1:].flip(2).cumsum(2)], 1).flatten(1) @ w


def tied(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(torch.sin(x @ a + b) @ a.T) @ a


def larger(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(x @ a, x @ b).square()


def back(x: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return F.conv_transpose2d(torch.tanh(F.conv2d(x, k, stride=2)), t, stride=2).mean((2, 3))


class Pre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        n = self.norm(h)
        return self.last(F.gelu(h + self.attention(n, n, n, need_weights=False)[0], approximate="tanh").mean(1))


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def act(function: nn.Module, *others: nn.Module) -> Callable[[], nn.Module]:
    """A perceptron of two layers or more."""
    return lambda: stack(nn.Linear(3, 4), function, *others, nn.Linear(4, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "sigmoid": (lambda: stack(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 3)), (6, 3), 0.3),
    "mish and silu": (act(nn.Mish(), nn.Linear(4, 4), nn.SiLU()), (5, 3), 0.1),
    "relu": (lambda: stack(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)), (4, 3), 0.0004),
    "elu": (lambda: stack(nn.Linear(3, 5), nn.ELU(), nn.Linear(5, 3)), (4, 3), 0.05),
    "gated": (lambda: Written(gated, a=(3, 4), b=(3, 4), c=(4, 3)), (5, 3), 0.1),
    "attention": (lambda: Written(attention, q=(4, 3), k=(4, 3), v=(4, 4), w=(4, 3)), (3, 4, 4), 0.05),
    "attention of torch": (Pre, (2, 3, 3), 0.02),
    "normalised by hand": (lambda: Written(normalised, a=(3, 5), g=(5,), b=(5, 3)), (4, 3), 0.03),
    "batch norm": (act(nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh()), (7, 3), 0.05),
    "group norm": (act(nn.GroupNorm(2, 4), nn.Softplus(2.0)), (4, 3), 0.03),
    "channels": (lambda: Written(channels, k=(2, 1, 3), c=(4, 1, 3), w=(16, 3)), (4, 8), 0.1),
    "max-pooling": (lambda: stack(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(9, 3)),
                    (3, 1, 7), 0.002),
    "larger of two": (lambda: Written(larger, a=(3, 3), b=(3, 3)), (4, 3), 0.01),
    "tied": (lambda: Written(tied, a=(3, 4), b=(4,)), (5, 3), 0.05),
    "transposed convolution": (lambda: Written(back, k=(2, 1, 2, 2), t=(2, 3, 3, 3)), (3, 1, 6, 6), 0.2),
    "pooling": (lambda: stack(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()), (3, 1, 4, 4), 0.1),
}  # fmt: skip
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda out: F.cross_entropy(out, torch.arange(len(out)) % 3, label_smoothing=0.1),
    "square": lambda out: 0.5 * (out - 0.3).square().sum(1).mean(),
}


class Case:
    """A model with its loss, its program, and the judge: the loss as a function of one vector of weights."""

    def __init__(self, name: str, loss: str = "cross entropy", seed: int = 0) -> None:
        torch.manual_seed(seed + len(name))
        build, shape, self.radius = CASES[name]
        self.model, self.x, self.loss = build().double(), torch.randn(shape).double(), LOSSES[loss]
        self.program = differentiate(trace(self.model, (self.x,), self.loss))
        weights = dict(self.model.named_parameters())
        self.weights = {n: weights[n].detach() for n in self.program.parameters}
        self.sizes = [w.numel() for w in self.weights.values()]
        self.start = torch.cat([w.flatten() for w in self.weights.values()])
        self.centre = Centre(self.program, self.values(self.start), self.program.parameters)
        self.wanted = Jacobians(self.centre).wanted

    def values(self, u: Tensor) -> dict[str, Tensor]:
        parts = zip(self.weights.items(), u.split(self.sizes), strict=True)
        return {name: part.reshape(w.shape) for (name, w), part in parts} | {"x": self.x}

    def __call__(self, u: Tensor) -> Tensor:
        weights = self.values(u)
        x = weights.pop("x")
        with sdpa_kernel(SDPBackend.MATH):
            return self.loss(functional_call(self.model, weights, (x,)))

    def gradient(self, u: Tensor) -> Tensor:
        """By the program, whose primitives torch differentiates rightly: not so its second derivatives of
        normalisations, which are not symmetric.
        """
        nodes = self.program.run(self.values(u))
        return torch.cat([nodes[k].flatten() for k in self.program.outputs[1:]])

    def hessian(self, u: Tensor) -> Tensor:
        return jacrev(self.gradient)(u)

    def points(self, count: int) -> list[Tensor]:
        """On the sphere: at random, against and along the gradient, along one weight."""
        generator = torch.Generator().manual_seed(1)
        ways = [torch.randn(len(self.start), generator=generator).double() for _ in range(count)]
        slope = torch.func.grad(self)(self.start).detach()
        ways += [slope, -slope, torch.eye(len(self.start)).double()[0]]
        return [self.start + self.radius * way / way.norm() for way in ways]


@cache
def case(name: str, loss: str = "cross entropy") -> Case:
    return Case(name, loss)


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_stays_within_its_bounds(name: str) -> None:
    """Values and derivatives of every node: by entry, by fibre, as a whole."""
    case_ = case(name)
    needed = sorted(case_.centre.needed)
    real = [k for k in needed if case_.centre.points[k].moves]

    def tensors(u: Tensor) -> list[Tensor]:
        nodes = case_.program.run(case_.values(u))
        return [nodes[k] for k in real]

    start = jacrev(tensors)(case_.start)
    for radius, shells in ((case_.radius, 1), (case_.radius, 3), (case_.radius / 30, 1)):
        ball = None
        for k in range(shells):
            ball = Ball(case_.centre, radius * (k + 1) / shells, ball)
        assert ball is not None
        for point in case_.points(2):
            u = case_.start + (point - case_.start) * (radius / case_.radius) * (1 - 1e-12)
            values, slopes = tensors(u), jacrev(tensors)(u)
            for k, value, slope, old in zip(real, values, slopes, start, strict=True):
                motion, at = ball.of(k), case_.centre.points[k]
                label = f"{case_.program.nodes[k]} at radius {radius}"
                moved, change = (value - at.value).abs(), slope - old
                assert (moved <= motion.e + 1e-12).all(), label
                assert float(moved.norm()) <= motion.s + 1e-12, label
                assert (change.norm(dim=-1) <= motion.d + 1e-11).all(), label
                assert float(torch.linalg.matrix_norm(change.flatten(0, -2), 2)) <= motion.D + 1e-11, label
                if value.dim():
                    assert (moved.norm(dim=-1) <= motion.fe + 1e-12).all(), label
                    assert (torch.linalg.matrix_norm(change, 2) <= motion.f + 1e-11).all(), label


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", CASES)
def test_the_second_derivative_at_the_weights(name: str, loss: str) -> None:
    case_ = case(name, loss)
    exact, bound = case_.hessian(case_.start), Hessian(case_.program, case_.values(case_.start))
    assert float((exact - bound.matrix).norm()) <= bound.offset + 1e-12 * float(exact.norm())
    assert bound.offset <= 1e-6 * float(exact.norm())
    norm = float(torch.linalg.matrix_norm(exact, 2))
    assert norm <= bound.norm <= norm * (1 + 1e-5)
    for k in case_.centre.needed:
        point = case_.centre.points[k]
        assert not point.moves or float(point.error.max()) <= 1e-9 * (1 + float(point.value.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_norms_of_derivatives_at_the_weights(name: str) -> None:
    """Of rows, fibres and the whole: not below the exact ones, and not above where they are asked for."""
    case_ = case(name)
    real = [k for k in sorted(case_.centre.needed) if case_.centre.points[k].moves]

    def tensors(u: Tensor) -> list[Tensor]:
        nodes = case_.program.run(case_.values(u))
        return [nodes[k] for k in real]

    slopes = jacrev(tensors)(case_.start)
    for k, slope in zip(real, slopes, strict=True):
        point = case_.centre.points[k]
        exact = float(torch.linalg.matrix_norm(slope.flatten(0, -2), 2))
        assert exact <= point.norm * (1 + 1e-9) + 1e-12
        assert (slope.norm(dim=-1) <= point.rows * (1 + 1e-9) + 1e-12).all()
        assert torch.allclose(slope.norm(dim=-1), point.rows, rtol=1e-6, atol=1e-10)
        if slope.dim() > 1:
            assert (torch.linalg.matrix_norm(slope, 2) <= point.fibres * (1 + 1e-9) + 1e-12).all()
        if k in case_.wanted:
            assert point.norm <= exact * (1 + 1e-6) + 1e-12


def ascent(case_: Case, measure: Callable[[Tensor], Tensor], start: Tensor, steps: int = 12) -> float:
    """The largest value that climbing within the ball attains."""
    u, best = start.clone(), 0.0
    for _ in range(steps):
        u.requires_grad_()
        value = measure(u)
        best = max(best, float(value.detach()))
        (slope,) = torch.autograd.grad(value, u)
        way = u.detach() + slope / (float(slope.norm()) + 1e-300) * case_.radius - case_.start
        u = case_.start + way * min(1.0, case_.radius * (1 - 1e-9) / float(way.norm()))
    return best


@pytest.mark.parametrize("name", CASES)
def test_ascent_stays_below(name: str) -> None:
    """Climbing on the norm of the second derivative, and on how far it moves."""
    case_ = case(name)
    bound, here = Hessian(case_.program, case_.values(case_.start)), case_.hessian(case_.start).detach()
    bound.grow(case_.radius / 2)
    bound.grow(case_.radius)
    start = case_.points(1)[0]

    def norm(u: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(case_.hessian(u), 2)

    def moved(u: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(case_.hessian(u) - here, 2)

    assert ascent(case_, norm, start, 6) <= bound.smoothness
    assert ascent(case_, moved, start, 6) <= bound.moved + bound.offset


@pytest.mark.parametrize("name", CASES)
def test_the_third_derivative_stays_below_the_speed(name: str) -> None:
    case_ = case(name)
    speed = Speed(Ball(case_.centre, case_.radius)).bound
    at_weights = Speed(Ball(case_.centre, 0.0)).bound
    assert 0 < at_weights <= speed
    for u, limit in ((case_.start, at_weights), (case_.points(1)[0], speed)):
        h = torch.randn(len(u), generator=torch.Generator().manual_seed(2)).double()
        for _ in range(5):  # the power method of symmetric tensors
            h = h / h.norm()

            def second(t: Tensor, h: Tensor = h, u: Tensor = u) -> Tensor:
                return jvp(lambda s: jvp(case_.gradient, (u + s * h,), (h,))[1], (t,), (1 + 0 * t,))[1]

            third = second(torch.zeros((), dtype=torch.float64))
            assert abs(float(third @ h)) <= limit * (1 + 1e-9)
            h = third + 1e-3 * h


@pytest.mark.parametrize("name", CASES)
def test_monotone_in_the_radius_and_sharper_in_shells(name: str) -> None:
    case_ = case(name)
    whole, values = [], case_.values(case_.start)
    for part in (1e-4, 0.1, 1.0, 3.0, 1e6):
        bound = Hessian(case_.program, values)
        whole.append(bound.grow(case_.radius * part))
    assert all(a <= b for a, b in pairwise(whole))
    assert whole[0] <= bound.norm * 1.5  # and close to the norm at the centre
    assert whole[2] < float("inf")
    bound = Hessian(case_.program, values)
    shells = [bound.grow(case_.radius * (k + 1) / 5) for k in range(5)]
    assert shells == sorted(shells)
    assert shells[-1] <= whole[2]
    with pytest.raises(ValueError, match="balls grow"):
        bound.grow(case_.radius)


def test_filling_up_is_the_linear_program() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, squares = (torch.rand(30, generator=generator).double() for _ in range(2))
    for total in (0.0, 0.7, 5.0, 1e9):
        scipy: Any = pytest.importorskip("scipy.optimize")
        best = scipy.linprog(
            (-weights).tolist(), A_ub=[[1.0] * 30], b_ub=[total], bounds=[(0, float(t)) for t in squares]
        )
        assert filled(weights, squares, total) == pytest.approx(-best.fun, abs=1e-9)


def test_kinks() -> None:
    """A kink at the weights, and one within reach."""
    model, x = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU()).double(), torch.tensor([[1.0, 1.0]]).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
    program = differentiate(trace(model, (x,), lambda out: out.square().sum()))
    with pytest.raises(Unbounded):
        Hessian(program, {"0.weight": model[0].weight.detach(), "x": x})
    weight = torch.tensor([[1.0, -0.5]]).double()
    bound = Hessian(program, {"0.weight": weight, "x": x})
    assert bound.grow(0.3) < 100
    assert bound.grow(0.4) == float("inf")


def test_another_entry_becomes_the_largest() -> None:
    model, x = Written(lambda x, w: (x * w).amax(1), w=(3,)).double(), torch.ones(1, 3).double()
    program = differentiate(trace(model, (x,), lambda out: out.square().sum()))
    bound = Hessian(program, {"w": torch.tensor([1.0, 0.5, -3.0]).double(), "x": x})
    assert bound.grow(0.24) < 3
    assert bound.grow(0.26) == float("inf")


def test_what_has_no_rule_is_refused() -> None:
    model, x = Written(lambda x, w: (x * w).sort(1).values[:, 0], w=(3,)).double(), torch.ones(1, 3).double()
    program = differentiate(trace(model, (x,), lambda out: out.square().sum()))
    with pytest.raises(NotImplementedError, match="no rule for"):
        Hessian(program, {"w": torch.tensor([1.0, 0.5, -3.0]).double(), "x": x})


@pytest.mark.parametrize("name", CASES)
def test_the_judge_has_the_gradient_of_the_model(name: str) -> None:
    case_ = case(name)
    assert torch.allclose(case_.gradient(case_.start), torch.func.grad(case_)(case_.start), atol=1e-12)
