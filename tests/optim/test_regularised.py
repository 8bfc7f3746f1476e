"""Regularisers and sets: constants against dense Hessians, proximal steps against scipy, promises by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import surefoot as sf
from surefoot.domains import DomainError
from surefoot.objectives import ElasticNet, ObjectiveError, PseudoHuber, Regularizer, Ridge
from surefoot.optim import GaussNewton, OptimizerError, ProjectedGradient, ProjectedSGD
from surefoot.optim.projection import Balls, Intervals

PENALTIES = {
    "ridge": lambda: Ridge(0.3),
    "ridge per block": lambda: Ridge({"0": 0.7}),
    "pseudo-Huber": lambda: PseudoHuber({"0": 0.2, "2": 1.5}, delta=0.3),
    "elastic": lambda: ElasticNet(0.05, 0.1),
    "absolute": lambda: ElasticNet({"0": 0.2}),
}
SETS = {
    "product": lambda: sf.ProductBall(1.0),
    "ball": lambda: sf.Ball(0.3),
    "box": lambda: sf.Box(-0.4, 0.5),
}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(12, 3).double(), torch.arange(12) % 2


def flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def objective_of(model: nn.Module, penalty: Regularizer, dtype: torch.dtype = torch.float64):
    """In double precision, on the data as that type stores them."""
    x, y = data()
    x = x.to(dtype).double()
    shapes = [(name, value.shape) for name, value in model.named_parameters()]

    def value(u: Tensor) -> Tensor:
        parts = torch.split(u, [int(np.prod(shape)) for _, shape in shapes])
        named = {name: part.reshape(shape) for (name, shape), part in zip(shapes, parts, strict=True)}
        outputs = torch.func.functional_call(model, named, x)
        return nn.functional.cross_entropy(outputs, y) + penalty(named)

    return value


@pytest.mark.parametrize("kind", ["ridge", "ridge per block", "pseudo-Huber"])
@pytest.mark.parametrize("domain", [sf.Ball(0.2), sf.ProductBall(1.5), sf.Box(-1.0, 1.0)], ids=str)
def test_certificates_hold_for_the_sum(kind: str, domain) -> None:
    model, penalty, (x, y) = network(), PENALTIES[kind](), data()
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=domain, regularizer=penalty)
    alone = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=domain)
    value = objective_of(model, penalty)
    here = flat(model)
    for _ in range(6):
        u = torch.randn_like(here)
        if isinstance(domain, sf.Ball):
            u = here + 0.2 * u / u.norm()
        elif isinstance(domain, sf.ProductBall):
            u = 1.5 * u / u.norm()
        else:
            u = u.sign()
        assert float(value(u)) <= float(certificate.bound)
        assert float(torch.func.grad(value)(u).norm()) <= float(certificate.lipschitz)
        hessian = torch.autograd.functional.hessian(value, u)
        assert float(torch.linalg.matrix_norm(hessian, 2)) <= float(certificate.smoothness)
    assert alone.smoothness < certificate.smoothness
    assert float(certificate.smoothness) <= float(alone.smoothness) + 1.5 + 1e-9
    assert sf.Certificate.from_json(certificate.to_json()) == certificate
    assert repr(penalty) in str(certificate)


def test_the_default_domain_and_its_step_are_those_of_the_sum() -> None:
    model, penalty, (x, y) = network(), Ridge(0.4), data()
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), regularizer=penalty)
    value, u = objective_of(model, penalty), flat(model)
    slope = torch.func.grad(value)(u)
    sizes = certificate.block_gradients
    assert float(slope.norm()) <= sum(size**2 for size in sizes.values()) ** 0.5
    step = certificate.step_size
    drop = float(value(u) - value(u - step * slope))
    assert drop >= 0.5 * step * float(slope.square().sum()) * (1 - 1e-9) > 0


def nearest_by_scipy(point: np.ndarray, weight: float, constraint) -> np.ndarray:
    """The same problem with p = a − b, a, b ≥ 0: smooth with constraints."""
    n = len(point)

    def value(z):
        p = z[:n] - z[n:]
        return 0.5 * np.sum((p - point) ** 2) + weight * z.sum()

    start = np.concatenate([np.maximum(point, 0), np.maximum(-point, 0)]) * 0.1 + 1e-3
    options = {"maxiter": 500, "ftol": 1e-15}
    constraints = [{"type": "ineq", "fun": lambda z: constraint(z[:n] - z[n:])}]
    found = minimize(
        value, start, method="SLSQP", bounds=[(0, None)] * (2 * n), constraints=constraints, options=options
    )
    return found.x[:n] - found.x[n:]


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_nearest_points_with_absolute_values(centred: bool, weight: float) -> None:
    torch.manual_seed(5)
    for _ in range(5):
        point = {"a": 2 * torch.randn(5).double()}
        centre = {"a": torch.randn(5).double()} if centred else {}
        middle = centre.get("a", torch.zeros(5).double()).numpy()
        found = Balls(((("a",), 0.8),), centre).project(point, {"a": weight})["a"].numpy()
        judged = nearest_by_scipy(
            point["a"].numpy(), weight, lambda p, middle=middle: 0.64 - np.sum((p - middle) ** 2)
        )
        assert found == pytest.approx(judged, abs=2e-5)
        lower, upper = -torch.rand(5).double(), torch.rand(5).double() + 0.2
        box = Intervals({"a": lower}, {"a": upper})
        inner = box.project(point, {"a": weight})["a"].numpy()
        low, high = lower.numpy(), upper.numpy()
        judged = nearest_by_scipy(
            point["a"].numpy(), weight, lambda p, a=low, b=high: np.concatenate([p - a, b - p])
        )
        assert inner == pytest.approx(judged, abs=2e-5)


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("where", SETS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32])
def test_every_proximal_step_keeps_its_promise(kind: str, where: str, dtype: torch.dtype) -> None:
    model, penalty, (x, y) = network().to(dtype), PENALTIES[kind](), data()
    optimizer = ProjectedGradient(model, sf.CrossEntropy(), domain=SETS[where](), regularizer=penalty)
    value = objective_of(network(), penalty, dtype)
    x = x.to(dtype)
    smoothness = float(optimizer.prepare(x, y).smoothness)
    before = None
    for _ in range(12):
        optimizer.step(x, y)
        record, after = optimizer.history[-1], float(value(flat(model).double()))
        assert optimizer.region(x).contains(dict(model.named_parameters()))
        if before is not None:
            assert before - after >= record.promised_decrease
            if dtype == torch.float64:
                assert record.promised_decrease >= record.stationarity**2 / (2 * smoothness) * (1 - 1e-6)
        before = after
    assert optimizer.history[-1].loss < optimizer.history[0].loss


def test_absolute_values_make_entries_zero_and_smooth_penalties_do_not() -> None:
    x, y = data()
    zeros = {}
    for name, penalty in {"absolute": ElasticNet(0.5), "ridge": Ridge(0.5)}.items():
        model = network()
        optimizer = ProjectedGradient(model, sf.CrossEntropy(), domain=sf.ProductBall(1.0), regularizer=penalty)
        for _ in range(60):
            optimizer.step(x, y)
        zeros[name] = int((flat(model) == 0).sum())
    assert zeros["absolute"] > 0 == zeros["ridge"]


def test_evaluated_steps_take_smooth_penalties() -> None:
    model, (x, y) = network(), data()
    penalty = PseudoHuber(0.2, delta=0.1)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), regularizer=penalty)
    value = objective_of(network(), penalty)
    before = float(value(flat(model)))
    for _ in range(40):
        assert optimizer.step(x, y) == pytest.approx(before, rel=1e-12)
        after = float(value(flat(model)))
        assert after < before
        before = after
    assert float(torch.func.grad(value)(flat(model)).norm()) < 1e-2


@pytest.mark.parametrize("domain", [None, sf.Ball(0.2), sf.ProductBall(0.1, center="present")])
@pytest.mark.parametrize("kind", ["elastic", "absolute"])
def test_a_certificate_with_absolute_values_is_about_proximal_steps(kind: str, domain: sf.Ball | None) -> None:
    """m and ℓ bound the whole objective; proximal steps of the sizes it names stay inside and descend."""
    model, (x, y) = network(), data()
    penalty = PENALTIES[kind]()
    certificate = sf.certify(model, x, objective=sf.CrossEntropy(y), regularizer=penalty, domain=domain)
    given = domain or sf.Ball(certificate.radius)  # a search meets other balls inside than a given ball has
    same, plain = (
        sf.certify(model, x, objective=sf.CrossEntropy(y), regularizer=part, domain=given)
        for part in (penalty, penalty.smooth_part)
    )
    assert float(same.smoothness) == float(plain.smoothness)
    assert "proximal steps of at most 1/L" in str(certificate)
    assert "absolute values" in " ".join(certificate.remarks)
    value, smooth, start = objective_of(model, penalty), objective_of(model, penalty.smooth_part), flat(model)
    sizes = [parameter.numel() for parameter in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    weights = torch.cat(
        [torch.full((n,), penalty.threshold_of(name)).double() for n, name in zip(sizes, names, strict=True)]
    )
    slope = torch.func.grad(smooth)(start)
    radius = certificate.radius if isinstance(certificate.radius, float) else 0.1
    torch.manual_seed(5)
    for _ in range(20):
        move = torch.randn_like(start)
        there = start + radius * torch.rand(()).double() * move / move.norm()
        assert float(value(there)) <= float(certificate.bound)
        assert abs(float(value(there) - value(start))) <= float(certificate.lipschitz) * float(
            (there - start).norm()
        )
    blocks = torch.cat(
        [
            torch.full((n,), certificate.block_step_sizes[name.partition(".")[0]]).double()
            for n, name in zip(sizes, names, strict=True)
        ]
    )
    for steps in (torch.full_like(start, certificate.step_size), blocks):
        aim = start - steps * slope
        after = aim.sign() * (aim.abs() - steps * weights).clamp_min(0)
        reached = after - start
        parts = [float(part.norm()) for part in reached.split([sizes[0] + sizes[1], sizes[2] + sizes[3]])]
        assert max(parts) <= radius if isinstance(domain, sf.ProductBall) else float(reached.norm()) <= radius
        assert float(value(start) - value(after)) >= 0.5 * float((reached.square() / steps).sum()) * (1 - 1e-9) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_evaluated_proximal_steps_reach_the_minimum_of_scipy(dtype: torch.dtype) -> None:
    """A linear model has one minimum; scipy finds it with positive and negative parts."""
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(3, 2).to(dtype), data()
    penalty = ElasticNet(0.05, 0.1)
    value, start = objective_of(nn.Linear(3, 2).double(), penalty, dtype), flat(model).double()
    smooth = objective_of(nn.Linear(3, 2).double(), Ridge(0.1), dtype)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), regularizer=penalty)
    before = float(value(start))
    for _ in range(40):
        optimizer.step(x.to(dtype), y)
        record, after = optimizer.history[-1], float(value(flat(model).double()))
        if record.step_size:
            assert before - after >= record.promised_decrease > 0
        before = after
        if not record.step_size:
            break

    def parted(both: np.ndarray) -> tuple[float, np.ndarray]:
        up, down = torch.as_tensor(both).split(8)
        slope = torch.func.grad(smooth)(up - down)
        total = float(smooth(up - down)) + 0.05 * float((up + down).sum())
        return total, torch.cat([slope + 0.05, 0.05 - slope]).numpy()

    best = minimize(
        parted, np.full(16, 0.1), jac=True, bounds=[(0, None)] * 16, method="L-BFGS-B", options={"ftol": 1e-15}
    )
    assert before <= best.fun + (1e-6 if dtype == torch.float32 else 1e-9)
    assert bool((flat(model) == 0).any())
    assert optimizer.history[-1].stationarity < 1e-3


def test_proximal_steps_on_a_loader_and_with_kinks_in_the_network() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double(), data()
    penalty = ElasticNet({"0": 0.02})
    value = objective_of(model, penalty)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), regularizer=penalty)
    loader, before = [(x[:5], y[:5]), (x[5:], y[5:])], float(value(flat(model)))
    for _ in range(30):
        assert optimizer.step(loader) == pytest.approx(before, rel=1e-12)
        after = float(value(flat(model)))
        assert before - after >= optimizer.history[-1].promised_decrease > 0
        before = after
    resumed = sf.CertifiedDescent(model, sf.CrossEntropy(), regularizer=penalty)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.step(loader) == pytest.approx(before, rel=1e-12)
    assert bool((flat(model) == 0).any())


def test_what_does_not_fit_is_refused() -> None:
    model, (x, y) = network(), data()
    bound = sf.CrossEntropy(y)
    with pytest.raises(DomainError, match="objective"):
        sf.certify(model, x, regularizer=Ridge(0.1), domain=sf.Ball(0.1))
    with pytest.raises(DomainError, match="segment"):
        sf.certify(model, x, objective=bound, domain=sf.Segment(None, 0.1), regularizer=Ridge(0.1))
    with pytest.raises(ValueError, match="proximal"):
        sf.CertifiedDescent(model, sf.CrossEntropy(), direction="lbfgs", regularizer=ElasticNet(0.1))
    with pytest.raises(TypeError, match="Ridge as its regulariser"):
        GaussNewton(model, sf.CrossEntropy(), regularizer=PseudoHuber(0.1))
    with pytest.raises(OptimizerError, match="ridge"):
        sf.CertifiedDescent(model, sf.CrossEntropy(), direction="gauss_newton", regularizer=PseudoHuber(0.1)).step(
            x, y
        )
    with pytest.raises(ValueError, match="theorems for a ridge"):
        sf.CertifiedDescent(model, sf.CrossEntropy(), until="proved", regularizer=PseudoHuber(0.1))
    with pytest.raises(ObjectiveError, match="positive"):
        PseudoHuber(1.0, delta=0.0)
    with pytest.raises(DomainError, match="lower not above"):
        sf.certify(model, x, objective=bound, domain=sf.Box(1.0, -1.0))
    with pytest.raises(DomainError, match="no bound for"):
        sf.certify(model, x, objective=bound, domain=sf.Box({"0.weight": 0.0}, 1.0))


def test_a_box_that_the_weights_are_outside_of_says_so() -> None:
    model, (x, y) = network(), data()
    outside = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Box(5.0, 6.0))
    assert outside.weights_inside is False
    ends = {name: value.detach() - 0.1 for name, value in model.named_parameters()}
    inside = sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Box(ends, 10.0))
    assert inside.weights_inside


def test_noisy_proximal_steps_stay_in_the_set() -> None:
    model, (x, y) = network(), data()
    optimizer = ProjectedSGD(model, sf.CrossEntropy(), domain=sf.Box(-0.5, 0.5), regularizer=ElasticNet(0.3))
    for k in range(12):
        optimizer.step(x[k % 3 :: 3], y[k % 3 :: 3])
    assert optimizer.region(x).contains(dict(model.named_parameters()))
    assert bool((flat(model) == 0).any())
