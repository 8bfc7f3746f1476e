"""What follows from a certificate: iteration counts, steps per block, damping; each attacked where it holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from surefoot.blockwise import block_curvature
from surefoot.domains import Segment
from surefoot.guarantees import (
    GuaranteeError,
    composite_damping,
    composite_iterations,
    damping,
    iterations,
    require_room,
    seen_from_weights,
    step_from,
)
from surefoot.magnitude import Magnitude


class Problem:
    """An objective as a function of one vector, on a set around the present weights, from torch alone."""

    def __init__(self, activation: type[nn.Module], loss: str, domain, depth: int = 2) -> None:
        torch.manual_seed(3)
        widths = [3, *[5] * (depth - 1), 2]
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), activation()]
        self.model = nn.Sequential(*layers[:-1]).double()
        self.x = torch.randn(12, 3).double()
        self.y = torch.randint(2, (12,)) if loss == "cross" else torch.randn(12, 2).double()
        objective = sf.CrossEntropy(self.y) if loss == "cross" else sf.Square(self.y)
        self.domain = domain
        self.certificate = sf.certify(self.model, self.x, objective=objective, domain=domain)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.sizes = [p.numel() for p in self.model.parameters()]
        self.start = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.blocks = [name.rpartition(".")[0] for name in self.names]

    def outputs(self, vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split(self.sizes)
        shaped = {n: v.reshape(self.model.get_parameter(n).shape) for n, v in zip(self.names, parts, strict=True)}
        return torch.func.functional_call(self.model, shaped, (self.x,))

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.y.is_floating_point():
            return 0.5 * (outputs - self.y).square().sum() / len(self.x)
        return F.cross_entropy(outputs, self.y)

    def value(self, vector: torch.Tensor) -> torch.Tensor:
        return self.loss(self.outputs(vector))

    def by_block(self, vector: torch.Tensor) -> dict[str, float]:
        total: dict[str, float] = {}
        for path, part in zip(self.blocks, vector.split(self.sizes), strict=True):
            total[path] = total.get(path, 0.0) + float(part.square().sum())
        return {path: value**0.5 for path, value in total.items()}

    def inside(self, vector: torch.Tensor) -> torch.Tensor:
        """Draw a displacement into the set."""
        radius = self.domain.radius
        if isinstance(self.domain, sf.Ball):
            return vector * min(1.0, radius / float(vector.norm())) * (1 - 1e-12)
        sizes = self.by_block(vector)
        parts = [
            part * min(1.0, radius / sizes[path])
            for path, part in zip(self.blocks, vector.split(self.sizes), strict=True)
        ]
        return torch.cat(parts) * (1 - 1e-12)

    def displacements(self, count: int = 60):
        """Points of the set: random ones, along the gradient, and with the weight on few blocks."""
        gradient = torch.func.grad(self.value)(self.start)
        for k in range(count):
            noise = torch.randn_like(self.start)
            if k % 3 == 1:
                noise = -gradient / gradient.norm() + 0.3 * noise / noise.norm()
            if k % 3 == 2:
                lucky = self.blocks[k % len(self.blocks)]
                scales = [1.0 if path == lucky else 0.01 for path in self.blocks]
                parts = noise.split(self.sizes)
                noise = torch.cat([part * s for part, s in zip(parts, scales, strict=True)])
            scale = float(torch.rand(())) if k % 2 else 10.0
            yield self.inside(noise / noise.norm() * scale * self.domain.radius)


DOMAINS = [sf.Ball(0.3), sf.ProductBall(0.15, center="present"), sf.Ball(2.0)]


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
@pytest.mark.parametrize("loss", ["cross", "square"])
@pytest.mark.parametrize("activation", [nn.Softplus, nn.Tanh])
def test_block_steps_majorise_everywhere_in_the_domain(activation, loss: str, domain) -> None:
    problem = Problem(activation, loss, domain, depth=3)
    steps = problem.certificate.block_step_sizes
    assert list(steps) == ["0", "2", "4"]
    assert all(0 < step < math.inf for step in steps.values())
    here, gradient = problem.value(problem.start), torch.func.grad(problem.value)(problem.start)
    for v in problem.displacements():
        quadratic = sum(0.5 * size**2 / steps[path] for path, size in problem.by_block(v).items())
        assert problem.value(problem.start + v) <= here + gradient @ v + quadratic

    known = problem.certificate.block_gradients or problem.by_block(gradient)
    promised = sum(0.5 * steps[path] * size**2 for path, size in problem.by_block(gradient).items())
    assert known == pytest.approx(problem.by_block(gradient))
    uniform = 0.5 * problem.certificate.step_size * float(gradient.square().sum())
    assert promised >= uniform * (1 - 1e-9)
    parts = zip(problem.blocks, gradient.split(problem.sizes), strict=True)
    move = torch.cat([-steps[path] * part for path, part in parts])
    if torch.equal(problem.inside(move), move * (1 - 1e-12)):  # the promised step itself
        assert problem.value(problem.start + move) <= here - promised


def test_unknown_gradients_are_replaced_by_their_bounds() -> None:
    certificate = replace(Problem(nn.Tanh, "cross", sf.Ball(0.1)).certificate, block_gradients=None)
    assert all(step > 0 for step in certificate.block_step_sizes.values())


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_block_curvature_is_a_majoriser_that_promises_no_less_than_perron(size: int) -> None:
    generator = np.random.default_rng(size)
    gains = []
    for _ in range(20):
        half = generator.random((size, size)) ** 4
        matrix = half + half.T
        gradient = generator.random(size) ** 3
        found = block_curvature(Magnitude.of(matrix), gradient).numpy()
        assert np.linalg.eigvalsh(np.diag(found) - matrix)[0] >= -1e-12 * found.max()
        largest = np.linalg.eigvalsh(matrix)[-1]
        gains.append((gradient**2 / found).sum() / (gradient**2).sum() * largest)
        assert gains[-1] >= 1 - 1e-9
    assert size == 1 or max(gains) > 1.2


def test_block_curvature_promises_what_the_best_step_lengths_do() -> None:
    matrix = np.array([[4.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 0.25]])
    gradient = np.array([1.0, 1.0, 0.5])
    best = gradient @ np.linalg.solve(matrix, gradient)
    assert (np.linalg.solve(matrix, gradient) > 0).all()
    found = block_curvature(Magnitude.of(matrix), gradient).numpy()
    assert (gradient**2 / found).sum() == pytest.approx(best, rel=1e-9)


def test_no_block_is_left_behind_and_extremes_are_survived() -> None:
    strong = Magnitude.of(np.array([[1.0, 0.9], [0.9, 1.0]]))
    found = block_curvature(strong, np.array([1.0, 1e-9])).numpy()
    assert found[1] <= 1.9 * 100 * 1.01
    huge = Magnitude(np.array([[3000.0, 2.0], [2.0, -3000.0]]))
    found = block_curvature(huge, np.array([1.0, 1.0]))
    assert found.log2[0] >= 3000
    assert found.is_finite
    assert block_curvature(huge, np.zeros(2)).is_finite
    assert block_curvature(Magnitude.zero((2, 2)), np.ones(2)).is_zero
    flat = Magnitude.of(np.array([[2.0, 0.0], [0.0, 0.0]]))
    curved, straight = block_curvature(flat, np.ones(2)).numpy()
    assert 2.0 <= curved <= 2.0 + 1e-12
    assert straight == 0.0


def test_a_block_without_finite_curvature_stands_still_and_the_others_move() -> None:
    matrix = np.array([[1.0, 0.5, 0.0], [0.5, 1.0, np.inf], [0.0, np.inf, 0.0]])
    certificate = sf.Certificate(
        *[Magnitude.of(1.0)] * 2,
        Magnitude.infinity(),
        {path: Magnitude.of(1.0) for path in "abc"},
        Magnitude.of(matrix),
        scalar=True,
    )
    steps = certificate.block_step_sizes
    assert steps["b"] == steps["c"] == 0.0
    assert steps["a"] == pytest.approx(1.0)
    assert certificate.to_dict()["block_step_sizes"] == steps
    assert json.loads(certificate.to_json())["step_size"] == 0.0


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
@pytest.mark.parametrize("loss", ["cross", "square"])
@pytest.mark.parametrize("activation", [nn.Softplus, nn.Tanh])
def test_damping_makes_the_gauss_newton_models_majorise(activation, loss: str, domain) -> None:
    problem = Problem(activation, loss, domain)
    quadratic, composite = problem.certificate.damping, composite_damping(problem.certificate)
    assert quadratic <= float(problem.certificate.smoothness) * (1 + 1e-12)
    for base in [torch.zeros_like(problem.start), *problem.displacements(2)]:
        point = problem.start + base
        jacobian = torch.autograd.functional.jacobian(problem.outputs, point)
        outputs, here = problem.outputs(point), problem.value(point)
        slope = torch.func.grad(problem.loss)(outputs)
        size = outputs.numel()
        hessian = torch.autograd.functional.hessian(problem.loss, outputs).reshape(size, size)
        for other in problem.displacements(30):
            v = other - base
            change = jacobian @ v
            model = here + (slope * change).sum() + 0.5 * change.reshape(-1) @ hessian @ change.reshape(-1)
            square = float(v.square().sum())
            value = problem.value(problem.start + other)
            assert value <= model + 0.5 * quadratic * square
            assert value <= problem.loss(outputs + change) + 0.5 * composite * square


def test_composite_damping_alone_would_not_do_for_the_quadratic_model_of_the_cross_entropy() -> None:
    model, x, y = nn.Linear(1, 2, bias=False).double(), torch.full((1, 1), 4.0).double(), torch.tensor([0])
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(3.0))
    assert composite_damping(certificate) == 0
    assert damping(certificate) > 0
    shift = torch.tensor([[-2.0], [2.0]]).double()

    def value(weight):
        return F.cross_entropy(x @ weight.T, y)

    here = model.weight.detach()
    slope, hessian = torch.func.grad(value)(here), torch.autograd.functional.hessian(value, here).reshape(2, 2)
    flat = shift.reshape(-1)
    taylor = value(here) + (slope * shift).sum() + 0.5 * flat @ hessian @ flat
    assert value(here + shift) > taylor + 1.0
    assert value(here + shift) <= taylor + 0.5 * certificate.damping * float(flat @ flat)


def test_damping_of_what_has_none() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(2, 3)
    with pytest.raises(GuaranteeError, match=r"objective=surefoot\.Square"):
        sf.certify(model, x).damping  # noqa: B018
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth"):
        sf.certify(model, x, objective=sf.Square(torch.zeros(2, 1)), domain=sf.ProductBall(1.0)).damping  # noqa: B018
    frozen = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 1))
    assert (
        sf.certify(frozen, x, objective=sf.Square(torch.zeros(2, 1)), domain=sf.ProductBall(1.0)).damping == 0
    )  # linear in what varies


def test_iterations_are_exact_whole_numbers_of_any_size() -> None:
    assert iterations(Magnitude.of(2.0), 0.5, 0.25) == 32
    assert iterations(Magnitude.of(2.0), 0.0, 0.25) == 0
    assert iterations(Magnitude.of(2.0), 0.5, 0.25, factor=4) == 64
    value = Magnitude.of(3.7)
    exact = 2 * Fraction(float(value)) * Fraction(0.3) / Fraction(1e-3) ** 2
    assert 0 <= iterations(value, 0.3, 1e-3) - exact < 1
    assert iterations(Magnitude.of(10.0) ** 1000, 1.0, 1.0) >= 2 * 10**1000
    assert iterations(Magnitude.of(10.0) ** 1000, 1.0, 1.0) * 999 < 2 * 10**1003
    for eps in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(GuaranteeError, match="eps"):
            iterations(value, 1.0, eps)
    for gap in (-1.0, math.inf, math.nan):
        with pytest.raises(GuaranteeError, match="gap"):
            iterations(value, gap, 0.1)
    with pytest.raises(GuaranteeError, match="no number of steps"):
        iterations(Magnitude(1e9), 1.0, 0.1)
    with pytest.raises(GuaranteeError, match="no number of steps"):
        iterations(Magnitude.infinity(), 1.0, 0.1)


def test_gradient_descent_reaches_the_accuracy_in_the_promised_number_of_steps() -> None:
    """From far away, with room enough for the proof that the iterates stay in the ball."""
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(-3.0 * x[0] * torch.tensor([[1.0], [-1.0]]) * (1 - 2 * y[0]))
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(200.0))
    first, eps = float(F.cross_entropy(model(x), y).detach()), 0.1
    steps = certificate.iterations(eps, gap=first)
    start = [p.detach() for p in model.parameters()]
    point, norms = start, []

    def value(weight, bias):
        return F.cross_entropy(x @ weight.T + bias, y)

    for _ in range(min(steps, 3000)):
        gradient = torch.func.grad(value, (0, 1))(*point)
        norms.append(math.hypot(*(float(g.norm()) for g in gradient)))
        if norms[-1] <= eps:
            break
        after = [p - certificate.inverse_smoothness * g for p, g in zip(point, gradient, strict=True)]
        moved = math.hypot(*(float((a - s).norm()) for a, s in zip(after, start, strict=True)))
        assert moved <= 2 * first / eps <= 200.0
        promised = 0.5 * certificate.inverse_smoothness * norms[-1] ** 2
        assert value(*after) <= value(*point) - promised * (1 - 1e-9)
        point = after
    assert len(norms) > 1
    assert norms[-1] <= eps


def test_the_gap_is_twice_the_bound_where_the_sign_is_not_known() -> None:
    class Mean(nn.Module):
        def forward(self, outputs):
            return outputs.mean()

    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(2, 3)
    certificate = sf.certify(model, x, objective=Mean(), domain=sf.ProductBall(1.0))
    assert certificate.scalar
    assert not certificate.nonnegative
    assert certificate.iterations(0.1) == iterations(certificate.smoothness, certificate.bound * 2.0, 0.1)
    loss = sf.certify(model, x, objective=sf.Square(torch.zeros(2, 1)), domain=sf.ProductBall(1.0))
    assert loss.iterations(0.1) == iterations(loss.smoothness, loss.bound, 0.1)


def test_nothing_is_promised_where_nothing_is_proved() -> None:
    x = torch.randn(2, 3)
    network = sf.certify(nn.Linear(3, 2), x)
    kinked = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    certificate = sf.certify(kinked, x, objective=sf.Square(torch.zeros(2, 1)), domain=sf.ProductBall(1.0))
    with pytest.raises(GuaranteeError, match=r"surefoot\.smooth") as caught:
        certificate.iterations(0.1)
    assert "relu" in str(caught.value)
    with pytest.raises(GuaranteeError, match="certify an objective"):
        network.iterations(0.1)
    with pytest.raises(GuaranteeError, match="certify an objective"):
        network.block_step_sizes  # noqa: B018
    with pytest.raises(GuaranteeError, match="not upper bounds"):
        replace(network, scalar=True, flags=("a bias",)).iterations(0.1)
    with pytest.raises(GuaranteeError, match="Certify on a Segment"):
        network.safe_step  # noqa: B018
    assert replace(network, segment_step=0.25).safe_step == 0.25
    assert step_from(Magnitude.zero()) == math.inf
    assert step_from(Magnitude(5000.0)) == 0.0
    assert Fraction(step_from(Magnitude.of(3.0))) * 3 <= 1


def test_on_a_segment_the_step_is_the_safe_one_and_nothing_else_is_promised() -> None:
    problem = Problem(nn.Tanh, "cross", sf.Ball(0.1))
    objective = sf.CrossEntropy(problem.y)
    certificate = sf.certify(problem.model, problem.x, objective=objective, domain=Segment(None, 0.5))
    assert 0 < certificate.step_size == certificate.safe_step <= 0.5
    assert "1/L" not in str(certificate)
    assert "guaranteed step along the segment" in str(certificate)
    gradient = torch.func.grad(problem.value)(problem.start)
    assert problem.value(problem.start - certificate.safe_step * gradient) < problem.value(problem.start)
    with pytest.raises(GuaranteeError, match="safe_step"):
        certificate.iterations(0.1)
    with pytest.raises(GuaranteeError, match="safe_step"):
        certificate.block_step_sizes  # noqa: B018
    assert json.loads(certificate.to_json())["safe_step"] == certificate.safe_step


def test_the_report_shows_the_steps_and_rounds_them_down() -> None:
    certificate = Problem(nn.Tanh, "cross", sf.Ball(0.1), depth=3).certificate
    text = str(certificate)
    assert min(certificate.block_step_sizes.values()) < certificate.step_size  # of no use to anyone
    assert "or per block: " not in text
    joint = certificate.step_size
    longer = {path: joint * (1 + k / 7) for k, path in enumerate(certificate.block_lipschitz)}
    useful = str(replace(certificate, written_block_steps=longer))
    line = next(line for line in useful.splitlines() if line.startswith("or per block: "))
    shown = dict(part.split(" ") for part in line.removeprefix("or per block: ").split(", "))
    assert shown.keys() == longer.keys()
    for path, step in longer.items():
        assert step * 0.999 <= float(shown[path]) <= step
    one = next(line for line in text.splitlines() if line.startswith("guaranteed step size"))
    assert float(one.partition(" = ")[2].partition(":")[0]) <= certificate.step_size
    read = json.loads(certificate.to_json())
    assert read["block_step_sizes"] == certificate.block_step_sizes
    assert read["damping"] == certificate.damping
    assert read["safe_step"] is None
    assert read["scalar"] is True
    deep = Problem(nn.Tanh, "cross", sf.Ball(0.1), depth=12).certificate
    many = {path: deep.step_size * (1 + k / 7) for k, path in enumerate(deep.block_lipschitz)}
    assert "and 4 more" in str(replace(deep, written_block_steps=many))
    assert max(map(len, str(deep).splitlines()[-4:])) <= 115


class OneWeight(nn.Module):
    """u ↦ tanh(xu)."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.tensor([[start]]).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.u)


@pytest.mark.parametrize("domain", [sf.Ball(1e-3), sf.ProductBall(1e-3, center="present")], ids=str)
def test_the_printed_step_stays_in_the_domain_and_descends(domain) -> None:
    """1/L alone leaves a small ball: where tanh is flat it is hundreds of times as long as what is proved."""
    model, x, y = OneWeight(2.5), torch.full((1, 1), 1.0).double(), torch.full((1, 1), -1.0).double()
    objective = sf.Square(y)
    certificate = sf.certify(model, x, objective=objective, domain=domain)
    (gradient,) = torch.autograd.grad(objective(model(x)), [model.u])
    size, before = float(gradient.norm()), float(objective(model(x)).detach())
    assert certificate.inverse_smoothness * size > 1e-3  # what used to be printed
    for step in (certificate.step_size, *certificate.block_step_sizes.values()):
        assert 0.99e-3 < step * size <= 1e-3
        with torch.no_grad():
            moved = objective(torch.tanh(x * (model.u - step * gradient)))
        assert float(moved) <= before - 0.5 * step * size**2
    text = str(certificate)
    assert "the domain ends there (1/L = " in text
    printed = float(text.partition("guaranteed step size = ")[2].partition(":")[0])
    assert printed <= certificate.step_size
    document = certificate.to_dict()
    assert document["step_size"] == certificate.step_size < document["inverse_smoothness"]
    restored = sf.Certificate.from_dict(document)
    assert restored.radius == certificate.radius
    assert restored.step_size == certificate.step_size


def test_one_step_meets_the_curvature_of_every_ball_on_its_way() -> None:
    """Against the exact integral of a staircase, and a function whose curvature grows with the distance."""
    generator = np.random.default_rng(0)
    for count in (1, 2, 7):
        radii = np.cumsum(generator.uniform(1e-9, 1.0, count)).tolist()
        sizes = np.cumsum(generator.uniform(0.0, 1.0, count)).tolist()
        parts = [Fraction(0), *(Fraction(radius) / Fraction(radii[-1]) for radius in radii)]
        weights = [(1 - a) ** 2 - (1 - b) ** 2 for a, b in pairwise(parts)]
        exact = sum(weight * Fraction(size) for weight, size in zip(weights, sizes, strict=True))
        found = float(seen_from_weights(list(zip(radii, map(Magnitude.of, sizes), strict=True))))
        assert exact <= Fraction(found) <= exact * (1 + Fraction(1, 10**9)) + Fraction(1, 10**12)
    steps = np.linspace(0, 2.0, 101)[1:]
    balls = [(float(r), Magnitude.of(1.0 + 3.0 * r)) for r in steps]  # of x²/2 + |x|³/2
    assert (2.0**2 / 2 + 2.0**3 / 2) * 2 / 2.0**2 <= float(seen_from_weights(balls)) <= 1.0 + 2.0 + 0.1


def test_where_the_gradient_is_not_known_its_bound_keeps_the_step_in_the_domain() -> None:
    problem = Problem(nn.Tanh, "cross", sf.Ball(0.01))
    unknown = replace(problem.certificate, block_gradients=None)
    assert 0 < unknown.step_size <= problem.certificate.step_size
    assert unknown.step_size * float(problem.certificate.lipschitz) <= 0.01 * (1 + 1e-9)
    around_zero = sf.certify(
        problem.model, problem.x, objective=sf.CrossEntropy(problem.y), domain=sf.ProductBall(1.0)
    )
    assert around_zero.radius is None
    assert around_zero.step_size == around_zero.inverse_smoothness
    assert "while steps stay in the domain" in str(around_zero)


def test_block_steps_together_stay_in_the_ball_and_promise_no_less_than_one_step() -> None:
    for domain in (sf.Ball(0.003), sf.Ball(0.05), sf.Ball(0.3), sf.ProductBall(0.01, center="present")):
        problem = Problem(nn.Tanh, "square", domain, depth=3)
        gradient = torch.func.grad(problem.value)(problem.start)
        steps = problem.certificate.block_step_sizes
        parts = zip(problem.blocks, gradient.split(problem.sizes), strict=True)
        move = torch.cat([-steps[path] * part for path, part in parts])
        assert torch.equal(problem.inside(move), move * (1 - 1e-12))
        promised = -0.5 * float(gradient @ move)
        assert promised >= 0.5 * problem.certificate.step_size * float(gradient @ gradient) * (1 - 1e-9)
        assert problem.value(problem.start + move) <= problem.value(problem.start) - promised


def test_iterations_on_a_small_ball_are_refused_with_the_radius_that_would_do() -> None:
    problem = Problem(nn.Tanh, "cross", sf.Ball(0.3))
    first = float(problem.value(problem.start))
    with pytest.raises(GuaranteeError, match=r"a radius of \d\.\d{3}e[+-]\d\d would do") as caught:
        problem.certificate.iterations(0.01, gap=first)
    needed = float(str(caught.value).partition("a radius of ")[2].split()[0])
    assert 2 * first / 0.01 <= needed <= 2 * first / 0.01 * 1.001
    enough = replace(problem.certificate, radius=needed)
    assert enough.iterations(0.01, gap=first) == iterations(problem.certificate.smoothness, first, 0.01)
    assert problem.certificate.iterations(2 * first / 0.3 * 1.01, gap=first) > 0


def test_gauss_newton_says_before_its_first_step_how_many_it_takes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, y = torch.randn(3, 2).double(), 0.2 * torch.randn(3, 1).double()
    objective = sf.Square(y)
    gap, eps = float(objective(model(x)).detach()), 0.1
    certificate = sf.certify(model, x, objective=objective, domain=sf.Ball(2.01 * gap / eps))
    optimizer = sf.GaussNewton(model, sf.Square(), damping=certificate.damping, adapt=False)
    require_room(certificate, gap, eps)
    most = composite_iterations(certificate.damping, gap, eps)
    lengths, start = [], nn.utils.parameters_to_vector(model.parameters()).detach()
    while not lengths or lengths[-1] * certificate.damping > eps:
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer.step(x, y)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        lengths.append(float((after - before).norm()))
        assert float((after - start).norm()) <= 2.01 * gap / eps
    assert len(lengths) <= most
    with pytest.raises(GuaranteeError, match="may leave the ball"):
        require_room(certificate, gap, eps / 10)
