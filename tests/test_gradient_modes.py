"""What is proved does not depend on the modes that the caller is in, nor on other threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def _data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 4), torch.arange(16) % 3


def _constants(found: Any) -> list[float]:
    return [float(found.bound), float(found.lipschitz), float(found.smoothness)]


def _losses(optimizer: Any, x: Tensor, y: Tensor) -> list[float]:
    return [optimizer.step(x, y) for _ in range(3)]


def _epochs(model: nn.Module, x: Tensor, y: Tensor) -> float:
    adam = torch.optim.Adam(model.eval().parameters(), 0.01)
    return sf.ProvedEpochs(adam, sf.CrossEntropy(), [(x[:8], y[:8]), (x[8:], y[8:])], model=model).run(epochs=2)


def _passes(chain: sf.Chain, traced: bool = False) -> list[float]:
    oracle = chain.autodiff()
    if traced:
        oracle.trace()
    slope, v = torch.ones_like(oracle.value), {path: torch.ones_like(u) for path, u in chain.parameters.items()}
    found = [*oracle.pullback(slope).values(), oracle.pushforward(v), *oracle.bent(v, slope, slope).values()]
    return [float(part.double().sum()) for part in (oracle.value, *found)]


def _shortened(chain: sf.Chain, objective: sf.objectives.Objective) -> float:
    step = sf.oracles.gradient(chain, objective, kappa=1e-2)
    return sf.oracles.line_search(chain, objective, step).length


def _matrices(chain: sf.Chain, objective: sf.objectives.Objective) -> list[float]:
    layers = sf.oracles.linear_quadratic(chain, objective)
    return [float(part.double().sum()) for one in layers for part in (one.A, one.B, one.P, one.Q, one.R)]


Call = Callable[[nn.Module, Tensor, Tensor], Any]
CALLS: dict[str, Call] = {
    "evaluate": lambda m, x, y: sf.evaluate(m, x, sf.CrossEntropy(y)).value,
    "certify": lambda m, x, y: _constants(sf.certify(m, x, objective=sf.CrossEntropy(y), domain=sf.Ball(1e-3))),
    "certify, followed by sample": lambda m, x, y: _constants(
        sf.certify(m.eval(), x, objective=sf.CrossEntropy(y), domain=sf.Ball(1e-3))
    ),
    "certify, longest step": lambda m, x, y: sf.certify(m, x, objective=sf.CrossEntropy(y)).step_size,
    "certify, inputs": lambda m, x, y: _constants(sf.certify(m, x, wrt="input", domain=sf.Ball(1e-3))),
    "estimate": lambda m, x, y: _constants(
        sf.estimate(m, x, objective=sf.CrossEntropy(y), domain=sf.Ball(1e-3))
    ),
    "convergence": lambda m, x, y: sf.convergence(
        m.eval(), x, sf.CrossEntropy(y), sf.Ridge(0.1), method="newton"
    ).missing,
    "gradient": lambda m, x, y: sf.oracles.gradient(sf.Chain(m, x), sf.CrossEntropy(y)).model_decrease,
    "gauss_newton": lambda m, x, y: sf.oracles.gauss_newton(
        sf.Chain(m, x), sf.CrossEntropy(y), kappa=0.1
    ).model_decrease,
    "newton": lambda m, x, y: sf.oracles.newton(sf.Chain(m, x), sf.CrossEntropy(y), kappa=1.0).model_decrease,
    "line search": lambda m, x, y: _shortened(sf.Chain(m, x), sf.CrossEntropy(y)),
    "linear_quadratic": lambda m, x, y: _matrices(sf.Chain(m.eval(), x), sf.CrossEntropy(y)),
    "passes": lambda m, x, y: _passes(sf.Chain(m, x)),
    "passes, traced": lambda m, x, y: _passes(sf.Chain(m.eval(), x), traced=True),
    "passes of batches": lambda m, x, y: _passes(sf.Chain(m.eval(), [(x[:9], y[:9]), (x[9:], y[9:])])),
    "CertifiedDescent": lambda m, x, y: _losses(sf.CertifiedDescent(m, sf.CrossEntropy()), x, y),
    "CertifiedDescent, segment": lambda m, x, y: _losses(
        sf.CertifiedDescent(m, sf.CrossEntropy(), proof="segment"), x, y
    ),
    "GaussNewton": lambda m, x, y: _losses(sf.GaussNewton(m, sf.CrossEntropy()), x, y),
    "Newton": lambda m, x, y: _losses(sf.Newton(m, sf.CrossEntropy()), x, y),
    "ProvedEpochs": _epochs,
}  # fmt: skip


@contextmanager
def _others() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.detect_anomaly(), torch.device("meta"):
        yield


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_those_of_recorded_gradients(call: Call) -> None:
    usual = call(_model(), *_data())
    for mode in (torch.no_grad(), torch.inference_mode(), _others()):
        model, data = _model(), _data()
        with mode:
            assert call(model, *data) == usual


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_data_may_be_made_in_inference_mode(call: Call) -> None:
    with torch.inference_mode():
        data = _data()
    assert call(_model(), *data) == call(_model(), *_data())


def test_threads_do_not_disturb_each_other() -> None:
    calls = [CALLS["evaluate"], CALLS["certify"], CALLS["CertifiedDescent"], CALLS["gauss_newton"]]
    models, (x, y) = [_model() for _ in calls], _data()
    usual = [call(_model(), x, y) for call in calls]
    with ThreadPoolExecutor(len(calls)) as threads:
        found = [threads.submit(call, model, x, y) for call, model in zip(calls, models, strict=True)]
        assert [each.result() for each in found] == usual


def test_a_model_on_the_meta_device_may_make_tensors_there() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.ones(2)

    with torch.device("meta"):
        found = sf.certify(Shifted(3, 2), torch.empty(4, 3), domain=sf.ProductBall(1.0), input_norm=1.0)
    assert found.smoothness.is_finite
