"""The Gauss-Newton oracles against the model written out: dense Jacobian, dense curvature, dense solve."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.objectives import Objective, Ridge
from surefoot.oracles import OracleError, Step, gauss_newton
from surefoot.oracles.dual import solve_dual
from surefoot.oracles.dual_gram import DualGram
from surefoot.oracles.factor import factor_of
from surefoot.oracles.gram import assemble
from surefoot.oracles.problem import Problem

F64 = torch.float64
METHODS = ("dual", "dual_gram")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.two(torch.tanh(self.one(x))))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 3), nn.Linear(7, 2), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.tanh(self.one(x))], dim=1)
        return self.head(torch.cat([x, torch.tanh(self.two(x))], dim=1))


class Attention(nn.Module):
    """An embedding, a position that is added, an encoder layer whose attention puts samples second, a mean."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, 4, padding_idx=2), nn.Parameter(torch.randn(length, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids) + self.position).mean(1))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class Mixed(nn.Module):
    """Samples meet after the first layer: their mean is added to each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        return self.two(y + y.mean(0, keepdim=True))


class Rows(nn.Module):
    """As many positions as samples, and the two exchanged: rows of the first layer are not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x.transpose(0, 1))).transpose(0, 1).sum(1))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def weight_normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (5, 4)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2, bias=False), nn.AvgPool2d(2), nn.Flatten(), nn.LayerNorm(4),
            nn.Linear(4, 3),
        ),
        (4, 2, 8, 8),
    ),
    "convolution-1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Softplus(), nn.MaxPool1d(2),
            nn.Conv1d(3, 2, 2, dilation=2), nn.Flatten(), nn.Linear(4, 3),
        ),
        (4, 2, 16),
    ),
    "padded-same": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)),
        (3, 2, 5),
    ),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.LayerNorm((5, 3)), nn.Flatten(), nn.Linear(15, 3)),
        (4, 5, 2),
    ),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False, eps=0.1), nn.Tanh(), nn.Linear(5, 3)
        ),
        (5, 4),
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.Linear(5, 3)), (5, 4)),
    "residual": (Residual, (5, 4)),
    "dense": (Dense, (5, 4)),
    "attention": (lambda: Attention(5), (4, 5)),
    "attention-square": (lambda: Attention(4), (4, 4)),
    "shared": (Shared, (5, 4)),
    "mixed": (Mixed, (5, 4)),
    "rows": (Rows, (4, 4, 4)),
    "frozen": (frozen, (5, 4)),
    "weight-norm": (weight_normalised, (5, 4)),
    "one-sample": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (1, 4)),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    model = make().double()
    x = torch.randint(0, 7, shape) if "attention" in name else torch.randn(shape, dtype=F64)
    return model, x


def objectives(n: int) -> dict[str, Objective]:
    torch.manual_seed(4)
    return {
        "labels": sf.CrossEntropy(torch.randint(0, 3, (n,))),
        "soft": sf.CrossEntropy(torch.softmax(torch.randn(n, 3, dtype=F64), dim=1)),
        "square": sf.Square(torch.randn(n, 3, dtype=F64)),
    }


class Model:
    """The quadratic model with everything written out: gradient, matrix, minimiser."""

    def __init__(
        self, model: nn.Module, x: Tensor, objective: Objective, kappa: float, ridge: Ridge | None
    ) -> None:
        every = {name: value.detach().clone() for name, value in model.named_parameters()}
        varying = {n: every[n].requires_grad_() for n, v in model.named_parameters() if v.requires_grad}
        self.names = list(varying)

        output = torch.func.functional_call(model, every, (x,))
        rows = [
            torch.autograd.grad(number, list(varying.values()), retain_graph=True, allow_unused=True)
            for number in output.reshape(-1)
        ]
        jacobian = torch.stack([_joined(row, list(varying.values())) for row in rows])

        def loss(flat: Tensor) -> Tensor:
            return objective(flat.reshape(output.shape))

        flat = output.detach().reshape(-1)
        slope = torch.autograd.functional.jacobian(loss, flat)
        curvature = torch.autograd.functional.hessian(loss, flat)
        weights = torch.cat(
            [torch.full((every[n].numel(),), ridge.weight_of(n) if ridge else 0.0, dtype=F64) for n in self.names]
        )
        point = torch.cat([every[name].detach().reshape(-1) for name in self.names])
        self.gradient = jacobian.T @ slope + weights * point
        self.matrix = jacobian.T @ curvature @ jacobian + torch.diag(weights + kappa)
        self.minimiser = torch.linalg.solve(self.matrix, -self.gradient)

    def flat(self, step: Step) -> Tensor:
        assert set(step.direction) == set(self.names)
        return torch.cat([step.direction[name].double().reshape(-1) for name in self.names])

    def residual(self, step: Step) -> float:
        return float((self.gradient + self.matrix @ self.flat(step)).norm() / self.gradient.norm())

    def decrease(self, v: Tensor) -> float:
        return -float(self.gradient @ v + 0.5 * v @ self.matrix @ v)


def _joined(row: tuple[Tensor | None, ...], like: list[Tensor]) -> Tensor:
    parts = [torch.zeros_like(b) if a is None else a for a, b in zip(row, like, strict=True)]
    return torch.cat([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("name", MODELS)
def test_directions_are_those_of_the_dense_model(name: str) -> None:
    model, x = build(name)
    chain = sf.Chain(model, x)
    regularizers = {
        "none": None,
        "ridge": Ridge(0.2),
        "layers": Ridge({next(iter(chain.graph.blocks)): 0.5}),
    }
    cases = [("labels", "none", 0.1), ("labels", "layers", 1e-3), ("soft", "ridge", 0.1), ("square", "none", 1e-2)]
    cases += [("square", "layers", 0.1)]
    for loss, kind, kappa in cases:
        objective, ridge = objectives(x.shape[0])[loss], regularizers[kind]
        judge = Model(model, x, objective, kappa, ridge)
        for method in METHODS:
            step = gauss_newton(chain, objective, kappa=kappa, method=method, regularizer=ridge)
            v = judge.flat(step)
            where = f"{name}, {loss}, {kind}, {method}: {step.status}"
            assert float((v - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-8, where
            assert judge.residual(step) < 1e-9, where
            assert step.solved, where
            assert step.model_decrease == pytest.approx(judge.decrease(v), rel=1e-7), where
            if method == "dual":
                assert step.calls <= 2 * x.shape[0] * 3 + 1, where
            if step.residual <= 1e-12:
                assert judge.residual(step) <= 1e-10, where
            assert step.direction.keys() == chain.parameters.keys()


def test_calls_are_counted() -> None:
    model, x = build("perceptron")
    for objective in objectives(5).values():
        for ridge in (None, Ridge(0.1)):
            problem = Problem(sf.Chain(model, x), objective, None, ridge)
            step = solve_dual(problem, 1e-3, 1e-12)
            assert step.calls == problem.autodiff.calls <= 2 * 15 + 1
            assert step.iterations <= 15


def test_a_small_problem_ends_within_the_calls_however_small_kappa_is() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(1, 3, dtype=F64)
    for kappa in (1e-8, 1.0, 1e8):
        for ridge in (None, Ridge(0.5)):
            objective = sf.Square(torch.ones(1, 1, dtype=F64))
            step = gauss_newton(sf.Chain(model, x), objective, kappa=kappa, regularizer=ridge)
            judge = Model(model, x, objective, kappa, ridge)
            assert step.calls <= 3
            assert float((judge.flat(step) - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-7


@pytest.mark.parametrize("method", METHODS)
def test_linear_least_squares_are_solved_in_one_step(method: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=F64), torch.randn(20, 2, dtype=F64)
    model = nn.Linear(3, 2).double()
    step = gauss_newton(sf.Chain(model, x), sf.Square(y), kappa=1e-10, method=method, tolerance=1e-9)
    design = torch.cat([x, torch.ones(20, 1, dtype=F64)], dim=1)
    best = torch.linalg.lstsq(design, y).solution
    found = torch.cat(
        [
            model.weight.detach() + step.direction["weight"],
            (model.bias.detach() + step.direction["bias"])[:, None],
        ],
        dim=1,
    )
    assert torch.allclose(found, best.T, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accumulate", [torch.float64, None])
@pytest.mark.parametrize("kappa", [0.1, 1e-3])
def test_single_precision_reaches_its_tolerance(method: Any, accumulate: Any, kappa: float) -> None:
    """The judge is in double precision, at the very parameters of the model in single precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 10))
    x, y = torch.randn(40, 8), torch.randint(0, 10, (40,))
    step = gauss_newton(sf.Chain(model, x), sf.CrossEntropy(y), kappa=kappa, method=method, accumulate=accumulate)
    judge = Model(copy.deepcopy(model).double(), x.double(), sf.CrossEntropy(y), kappa, None)
    assert step.solved, step.status
    assert step.residual <= 1e-6
    assert judge.residual(step) < 3e-6
    assert {value.dtype for value in step.direction.values()} == {torch.float32}


def test_the_gram_matrix_serves_every_kappa_and_every_weight() -> None:
    model, x = build("convolution")
    chain, objective = sf.Chain(model, x), objectives(4)["labels"]
    for ridge in (None, Ridge(0.2), Ridge({"0": 0.3, "7": 0.1})):
        problem = Problem(chain, objective, None, ridge)
        system = DualGram(problem)
        system.solve(1.0, 1e-12)
        for kappa in (1e-3, 0.1, 10.0):
            before = problem.autodiff.calls
            step = system.solve(kappa, 1e-12)
            assert problem.autodiff.calls - before <= 9  # no further slopes of layers
            judge = Model(model, x, objective, kappa, ridge)
            assert float((judge.flat(step) - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-8


def test_layers_are_found_where_samples_are_apart_and_only_there() -> None:
    """What has no formula is reached by one pull-back per row: 8 rows here, and no more than needed."""
    counts = {}
    for name in ("perceptron", "convolution", "mixed", "rows", "shared"):
        model, x = build(name)
        problem = Problem(sf.Chain(model, x), objectives(x.shape[0])["labels"])
        gram = assemble(problem, factor_of(problem, F64))
        assert gram is not None
        counts[name] = problem.autodiff.calls, len(gram.outers.layers) if gram.outers else 0
    assert counts["perceptron"] == (2, 2)  # two columns, all at once for the whole batch
    assert counts["convolution"] in ((2, 1), (2 + 4, 1))  # the probes where an operation is not known to keep rows
    assert counts["shared"] == (2 + 10, 1)
    probes = 2 * 3
    assert counts["mixed"] == (probes + 2 + 10, 1)
    assert counts["rows"] == (4 + 2 + 8, 1)


def test_what_is_too_large_or_cannot_be_batched_takes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("convolution")
    chain, objective = sf.Chain(model, x), objectives(4)["labels"]
    judge = Model(model, x, objective, 0.1, None)
    for limit, words in (("_FEW", "Gram"), ("_MOST_ROWS", "on the dual"), ("_MOST_DUAL", "on the dual")):
        with monkeypatch.context() as patch:
            patch.setattr(f"surefoot.oracles.gram.{limit}", 0)
            step = gauss_newton(chain, objective, kappa=0.1, method="dual_gram")
        assert words in step.status
        assert float((judge.flat(step) - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-8


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_start_at_the_solution_ends_at_once(method: Any) -> None:
    model, x = build("residual")
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    cold = gauss_newton(chain, objective, kappa=0.1, method=method)
    warm = gauss_newton(chain, objective, kappa=0.1, method=method, warm_start=cold.output_change, tolerance=1e-9)
    assert warm.iterations <= 1 or method == "dual_gram"
    assert all(torch.allclose(warm.direction[path], value, rtol=1e-7) for path, value in cold.direction.items())
    elsewhere = gauss_newton(chain, objective, kappa=0.1, method=method, warm_start=torch.ones(5, 3, dtype=F64))
    assert all(torch.allclose(elsewhere.direction[path], v, rtol=1e-8) for path, v in cold.direction.items())
    with pytest.raises(OracleError, match="shape of the output"):
        gauss_newton(chain, objective, method=method, warm_start=torch.ones(3))


class Huber(Objective):
    """A convex loss of the package's user; its curvature is found by itself."""

    operation = "test.huber"
    function = staticmethod(
        lambda outputs, targets: (outputs - targets).square().add(1).sqrt().sum() / len(outputs)
    )

    def check(self, outputs: Any, targets: Any) -> None:
        pass


class Valley(Huber):
    function = staticmethod(
        lambda outputs, targets: (outputs - targets).square().sub(1).square().sum() / len(outputs)
    )


class Coupled(Huber):
    function = staticmethod(lambda outputs, targets: (outputs - targets).mean(0).square().sum())


def test_any_convex_loss_of_the_rows() -> None:
    model, x = build("perceptron")
    target = torch.randn(5, 3, dtype=F64)
    judge = Model(model, x, Huber(target), 0.1, None)
    for method in METHODS:
        step = gauss_newton(sf.Chain(model, x), Huber(target), method=method)
        assert float((judge.flat(step) - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-8
        with pytest.raises(OracleError, match="not convex at this output"):
            gauss_newton(sf.Chain(model, x), Valley(model(x).detach()), method=method)
        with pytest.raises(OracleError, match="not a sum over the rows"):
            gauss_newton(sf.Chain(model, x), Coupled(target), method=method)


def test_a_loss_that_says_it_is_not_convex_is_refused() -> None:
    class Flagged(Huber):
        convex = False

    model, x = build("perceptron")
    for method in (*METHODS, "dynamic"):
        with pytest.raises(OracleError, match="Flagged is not convex"):
            gauss_newton(sf.Chain(model, x), Flagged(torch.zeros(5, 3)), method=method)  # type: ignore[arg-type]


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_no_output_depends_on(method: Any) -> None:
    torch.manual_seed(0)
    model, x = Idle().double(), torch.randn(5, 4, dtype=F64)
    chain, objective = sf.Chain(model, x), objectives(5)["labels"]
    plain = gauss_newton(chain, objective, kappa=0.1, method=method)
    assert not plain.direction["idle.weight"].any()
    ridge = gauss_newton(chain, objective, kappa=0.1, method=method, regularizer=Ridge(0.4))
    expected = -0.4 * model.idle.weight.detach() / 0.5
    assert torch.allclose(ridge.direction["idle.weight"], expected, rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_saturated_outputs_and_stationary_points(method: Any) -> None:
    """Probabilities that underflow, so that the curvature is zero; then a gradient that is zero."""
    model = nn.Linear(2, 2).double()
    x = torch.tensor([[1e4, 0.0], [0.0, 1e4]], dtype=F64)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2) * 10)
        model.bias.zero_()
    wrong = sf.CrossEntropy(torch.tensor([1, 0]))
    judge = Model(model, x, wrong, 0.1, None)
    step = gauss_newton(sf.Chain(model, x), wrong, kappa=0.1, method=method)
    assert float((judge.flat(step) - judge.minimiser).norm() / judge.minimiser.norm()) < 1e-8
    right = gauss_newton(sf.Chain(model, x), sf.CrossEntropy(torch.tensor([0, 1])), kappa=0.1, method=method)
    assert all(not value.any() for value in right.direction.values())
    assert (right.solved, right.model_decrease, right.residual) == (True, 0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_bad_input_is_refused_and_nothing_is_touched(method: Any) -> None:
    model, x = build("perceptron")
    y = objectives(5)["labels"]
    before = copy.deepcopy(model.state_dict())
    chain = sf.Chain(model, x)
    for kappa in (0.0, -1.0, float("nan"), None):
        with pytest.raises(OracleError, match="kappa is a positive number"):
            gauss_newton(chain, y, kappa=kappa, method=method)  # type: ignore[arg-type]
    spoiled = x.clone()
    later = sf.Chain(model, spoiled)
    spoiled[0, 0] = float("nan")
    with pytest.raises(OracleError, match="input has entries that are not finite"):
        gauss_newton(later, y, method=method)
    large = {path: value.detach() * 1e200 for path, value in model.named_parameters()}
    with pytest.raises(OracleError, match="the objective is"):
        gauss_newton(chain, sf.Square(torch.zeros(5, 3, dtype=F64)), method=method, params=large)
    half = nn.Linear(4, 3).bfloat16()
    with pytest.raises(OracleError, match="single or double precision"):
        gauss_newton(sf.Chain(half, x.bfloat16()), y, method=method)
    with pytest.raises(OracleError, match="CrossEntropy compares"):
        gauss_newton(chain, sf.CrossEntropy(torch.zeros(4).long()), method=method)
    with pytest.raises(OracleError, match="has shape"):
        gauss_newton(chain, y, method=method, params={k: v.new_zeros(1) for k, v in chain.parameters.items()})
    with pytest.raises(OracleError, match="no value was given"):
        gauss_newton(chain, y, method=method, params={})
    with pytest.raises(OracleError, match="tolerance"):
        gauss_newton(chain, y, method=method, tolerance=0.0)
    with pytest.raises(OracleError, match="Ridge"):
        gauss_newton(chain, y, method=method, regularizer=0.1)  # type: ignore[arg-type]
    with pytest.raises(OracleError, match="asks for gradients"):
        gauss_newton(sf.Chain(nn.Tanh(), torch.ones(5, 3)), y, method=method)
    with pytest.raises(OracleError, match="such as surefoot"):
        gauss_newton(chain, nn.MSELoss(), method=method)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[path]) for path, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())


def test_unknown_methods_are_refused() -> None:
    model, x = build("perceptron")
    with pytest.raises(OracleError, match="'dual_gram'"):
        gauss_newton(sf.Chain(model, x), objectives(5)["labels"], method="exact")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["perceptron", "convolution", "residual", "frozen"])
def test_dynamic_programming_agrees(name: str) -> None:
    model, x = build(name)
    chain, objective = sf.Chain(model, x), objectives(x.shape[0])["labels"]
    a = gauss_newton(chain, objective, kappa=0.1, method="dual")
    b = gauss_newton(chain, objective, kappa=0.1, method="dynamic")
    for path, value in a.direction.items():
        assert torch.allclose(b.direction[path], value, rtol=1e-7, atol=1e-10)
