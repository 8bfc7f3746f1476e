"""Derivatives sample by sample: what is computed at the centre, and how far it moves over the domain."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.calculus.adjoint.backward import backward
from surefoot.calculus.adjoint.bounds import Centre, round_off, scalar_bounds
from surefoot.calculus.adjoint.centre import at_the_centre, sample_norms
from surefoot.calculus.adjoint.costates import costates
from surefoot.calculus.adjoint.cotangents import cotangents
from surefoot.calculus.adjoint.samples import Samples, samples
from surefoot.calculus.adjoint.tangents import Ways, tangents
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.assemble import smoothness
from surefoot.calculus.forward import Pass


class Residual(nn.Module):
    """A branch around two layers, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.sigmoid(self.twice(x))
        return self.last(torch.nn.functional.softplus(self.twice(x)) * x)


def perceptron() -> nn.Module:
    layers = (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Softplus(), nn.Linear(4, 3))
    return nn.Sequential(*layers)


def setting(make: type[nn.Module] | object, seed: int = 0) -> tuple[nn.Module, Tensor, sf.CrossEntropy]:
    torch.manual_seed(seed)
    return make().double(), torch.randn(6, 3).double(), sf.CrossEntropy(torch.randint(0, 3, (6,)))


def run(model: nn.Module, x: Tensor, objective: nn.Module, domain: sf.Ball) -> Pass:
    return Analysis.of(model, x, objective).over(domain)


def points(model: nn.Module, radius: float, count: int = 4) -> list[dict[str, Tensor]]:
    """Random points on the sphere around the weights."""
    found = []
    for _ in range(count):
        step = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        size = torch.cat([d.reshape(-1) for d in step.values()]).norm()
        found.append({n: p.detach() + radius * step[n] / size for n, p in model.named_parameters()})
    return found


def separate(result: Pass) -> Samples:
    found = samples(result)
    assert found is not None
    return found


def flat_value(model: nn.Module, x: Tensor, objective: nn.Module) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The objective as a function of all weights in one vector, and that vector."""
    names, shapes = [name for name, _ in model.named_parameters()], [p.shape for p in model.parameters()]

    def loss(u: Tensor) -> Tensor:
        pieces = u.split([shape.numel() for shape in shapes])
        held = {n: p.reshape(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return objective(torch.func.functional_call(model, held, (x,)))

    return loss, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


MODELS = [perceptron, Residual]


def test_second_derivatives_are_those_of_each_sample() -> None:
    model, x, objective = setting(perceptron)
    found = separate(run(model, x, objective, sf.Ball(0.0)))
    n = 2
    layers = list(model)
    widths = [source.width for source in found.sources]

    def loss(injected: Tensor) -> Tensor:
        parts = iter(injected.split(widths))
        out = x[n]
        for layer in layers:
            out = layer(out) + next(parts) if isinstance(layer, nn.Linear) else layer(out)
        return nn.functional.cross_entropy(out[None], objective.targets[n : n + 1]) / len(x)

    dense = torch.autograd.functional.hessian(loss, torch.zeros(sum(widths)).double())
    for last in range(len(widths)):
        for other, block in enumerate(found.curvatures(last)):
            rows = slice(sum(widths[:last]), sum(widths[: last + 1]))
            columns = slice(sum(widths[:other]), sum(widths[: other + 1]))
            assert torch.allclose(block[n], dense[rows, columns], atol=1e-14)


class Mixture(nn.Module):
    """Experts side by side, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 3)
        experts = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(3)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), dim=1)
        return sum(shares[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


@pytest.mark.parametrize("frozen", ["", "bias", "weight"])
@pytest.mark.parametrize("make", [*MODELS, Mixture])
def test_the_second_derivative_is_added_up_from_those_of_the_samples(
    monkeypatch: pytest.MonkeyPatch, make: object, frozen: str
) -> None:
    model, x, objective = setting(make)
    loss, here = flat_value(model, x, objective)
    dense = torch.autograd.functional.hessian(loss, here)
    last = [name for name, _ in model.named_parameters() if frozen and name.endswith(frozen)][-1:]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in last)
    kept = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
    dense = dense[kept][:, kept]
    result = run(model, x, objective, sf.Ball(0.0))
    lengths = [result.enclosures[name].numel for name in result.region.variables]
    norm = at_the_centre(separate(result), len(lengths), round_off(result), lengths).norm
    exact = float(torch.linalg.eigvalsh(dense).abs().max())
    assert exact * (1 - 1e-13) <= float(norm) <= exact * (1 + 1e-9)
    monkeypatch.setattr("surefoot.calculus.adjoint.centre._ENTRIES", 100.0)  # a few samples at a time
    again = at_the_centre(separate(result), len(lengths), round_off(result), lengths).norm
    assert float(again) == pytest.approx(exact, rel=1e-9)
    for effort in ("normal", "high"):
        found = sf.certify(model, x, objective=objective, domain=sf.Ball(0.0), effort=effort)
        assert exact * (1 - 1e-13) <= float(found.smoothness) <= exact * (1 + 1e-6)


@pytest.mark.parametrize(("radius", "shells"), [(0.0, 1), (0.02, 1), (0.5, 1), (0.02, 4), (0.5, 3)])
@pytest.mark.parametrize("make", MODELS)
def test_derivatives_stay_within_their_bounds(make: object, radius: float, shells: int) -> None:
    model, x, objective = setting(make)
    result = run(model, x, objective, sf.Ball(radius))
    here = separate(result)
    centre = at_the_centre(here, len(result.region.variables), round_off(result))
    at = backward(result)
    assert at is not None
    inside = None
    for k in range(1, shells):
        inner = tangents(run(model, x, objective, sf.Ball(radius * k / shells)), here, centre, inside)
        cotangents(inner, centre, at)
        inside = inner.ways
    forth = tangents(result, here, centre, inside)
    back = cotangents(forth, centre, at)
    slack = 1e-12
    for point in points(model, radius):
        away = run(model, x, objective, sf.Ball(0.0, center=point))
        there, at_point = separate(away), backward(away)
        assert at_point is not None
        slopes = costates(away, at_point)
        for name, rows in forth.rows.items():
            move = away.enclosures[name].value - result.enclosures[name].value
            sharp = forth.result.enclosures[name]
            assert bool((move.norm(dim=1) <= sharp.rows.tensor() + slack).all())
            assert bool((move.abs() <= sharp.radius() + slack).all())
            before, after = here.jacobians(name), there.jacobians(name)
            for k in range(len(before)):
                norms = torch.linalg.matrix_norm(after[k] - before[k], 2)
                assert bool((norms <= rows.change.tensor()[:, k] + slack).all()), (name, k)
                assert bool((torch.linalg.matrix_norm(after[k], 2) <= rows.domain.tensor()[:, k] + slack).all())
        for name, costate in back.costates.items():
            move = slopes[name].value - costate.value
            assert float(move.norm()) <= float(costate.spread) + slack
            if costate.rows is not None:
                assert bool((move.abs() <= costate.radius() + slack).all())
        change = back.change.tensor()
        for last in range(len(here.sources)):
            pairs = zip(here.curvatures(last), there.curvatures(last), strict=True)
            for other, (before, after) in enumerate(pairs):
                norms = torch.linalg.matrix_norm(after - before, 2)
                assert bool((norms <= change[:, last, other] + slack).all())


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("domain", [sf.Ball, sf.ProductBall])
def test_shells_make_less_of_a_domain(make: object, domain: type[sf.Ball] | type[sf.ProductBall]) -> None:
    """In one group of variables or in several; a domain is not inside a smaller one."""
    model, x, objective = setting(make)

    def over(radius: float) -> Pass:
        return run(model, x, objective, domain(radius, center="present"))

    found, ways = Centre(), []
    for radius in (0.1, 0.2, 0.3):
        bounds = scalar_bounds(over(radius), found)
        assert bounds is not None
        assert bounds.variation is not None
        ways.append(found.ways[-1])
    alone = scalar_bounds(over(0.3), Centre())
    assert alone is not None
    assert alone.variation is not None
    assert float(smoothness(bounds.variation)) < 0.95 * float(smoothness(alone.variation))
    assert ways[0].lies_in(ways[1].region)
    assert not ways[1].lies_in(ways[0].region)
    with pytest.raises(ValueError, match="said to be inside is not"):
        Ways(ways[0].region, ways[1])


WIDTHS, ACTIVATIONS = (1, 2, 3, 5), (nn.Tanh, nn.Softplus, nn.GELU, nn.Sigmoid, nn.SiLU)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 8))])
def test_no_point_of_a_ball_in_shells_curves_more(seed: int) -> None:
    """Networks at random: the Hessian at random points, and where ascent leads, against certificates."""
    torch.manual_seed(seed)
    chosen = [WIDTHS[k] for k in torch.randint(len(WIDTHS), (2 + seed % 4,)).tolist()]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, *chosen, 3)):
        kind = ACTIVATIONS[int(torch.randint(len(ACTIVATIONS), ()))]
        layers += [nn.Linear(inputs, outputs, bias=bool(torch.rand(()) < 0.7)), kind()]
    model = nn.Sequential(*layers[:-1]).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(float(2.0 * torch.rand(())) + 0.5)
    x, objective = torch.randn(4, 3).double(), sf.CrossEntropy(torch.randint(0, 3, (4,)))
    value, here = flat_value(model, x, objective)
    hessian = torch.func.hessian(value)
    speed = torch.func.jacrev(lambda u, v: v @ hessian(u) @ v)
    for radius in (0.01, 0.1, 0.4):
        found = sf.certify(model, x, objective=objective, domain=sf.Ball(radius))
        bound, seen = float(found.smoothness), float(found.one_step or found.smoothness)
        move = torch.randn_like(here)
        for _ in range(3):
            point = here + radius * move / move.norm()
            values, vectors = torch.linalg.eigh(hessian(point))
            assert float(values.abs().max()) * (1 - 1e-9) <= bound
            rise = value(point) - value(here) - torch.func.grad(value)(here) @ (point - here)
            assert float(rise) <= 0.5 * seen * radius**2 * (1 + 1e-9)
            top = int(values.abs().argmax())
            move = move / move.norm() + 3.0 * values[top].sign() * speed(point, vectors[:, top])


@pytest.mark.parametrize("make", MODELS)
def test_at_a_point_the_certificate_is_close_to_the_second_derivative(make: object) -> None:
    model, x, objective = setting(make)
    loss, point = flat_value(model, x, objective)
    exact = float(torch.linalg.matrix_norm(torch.autograd.functional.hessian(loss, point), 2))
    found = float(sf.certify(model, x, objective=objective, domain=sf.Ball(0.0)).smoothness)
    assert exact <= found <= 2.5 * exact


@pytest.mark.parametrize("scale", [0.0, 1e-200, 1.0, 1e150])
@pytest.mark.parametrize("shape", [(5, 3, 7), (4, 8, 8), (3, 40, 2), (2, 1, 1), (2, 70, 300), (1, 290, 290)])
def test_sample_norms(shape: tuple[int, int, int], scale: float) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape).double() * scale
    exact = torch.linalg.svdvals(matrices / (scale or 1.0))[:, 0] * scale
    found = sample_norms(matrices)
    assert bool((exact <= found).all())
    assert bool((found <= 1.2 * exact).all())


def test_norms_of_samples_hold_where_products_of_singles_are_rounded_to_fewer_bits() -> None:
    matrix = torch.full((1, 64, 4), 1 - 0.51 * 2.0**-8, dtype=torch.float64)  # bfloat16 rounds this down
    matrix[0, 0, 0] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        found = sample_norms(matrix)
    assert float(found) >= float(torch.linalg.matrix_norm(matrix, 2))


class Weighted(nn.Module):
    """Reads a variable other than as the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


class Learned(nn.Module):
    """The input of the layer is a variable itself, with as many rows as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows = nn.Linear(3, 3), nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.rows)) + x


class Mixing(nn.Module):
    """Samples see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x - x.mean(dim=0)


class Idle(nn.Module):
    """A layer whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + 0.0 * self.idle(x)


@pytest.mark.parametrize("make", [Weighted, Learned, Mixing])
def test_norms_where_samples_are_not_separate(make: type[nn.Module]) -> None:
    model, x, objective = setting(make)
    assert samples(run(model, x, objective, sf.Ball(0.1))) is None
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
    assert float(certificate.smoothness) < float("inf")


def test_a_layer_without_effect() -> None:
    model, x, objective = setting(Idle)
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.1))
    assert certificate.block_gradients is not None
    assert certificate.block_gradients["idle"] == 0.0
    assert float(certificate.smoothness) < float("inf")


@pytest.mark.parametrize(("width", "followed"), [(200, True), (1700, False)])
def test_layers_beyond_the_budget_are_left_to_norms(width: int, followed: bool) -> None:
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).double()
    _, x, objective = setting(perceptron)
    assert (samples(run(model, x, objective, sf.Ball(0.1))) is not None) == followed


def test_layers_of_any_width_are_followed_while_the_budget_lasts() -> None:
    """There is no cliff at a width: with few samples, wide layers are as sharp as narrow ones."""
    x, objective = torch.linspace(-1, 1, 6).reshape(2, 3).double(), sf.CrossEntropy(torch.tensor([0, 1]))
    ratios = []
    for width in (120, 140):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        model = model.double()
        parameters = list(model.parameters())
        slopes = torch.autograd.grad(objective(model(x)), parameters, create_graph=True)
        vector = [torch.ones_like(p) for p in parameters]
        for _ in range(30):
            size = torch.cat([v.flatten() for v in vector]).norm()
            vector = list(torch.autograd.grad(slopes, parameters, [v / size for v in vector], retain_graph=True))
        norm = float(torch.cat([v.flatten() for v in vector]).norm())
        certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(0.0))
        ratios.append(float(certificate.smoothness) / norm)
    assert min(ratios) >= 1 - 1e-9
    assert ratios[1] <= 1.2 * ratios[0]
