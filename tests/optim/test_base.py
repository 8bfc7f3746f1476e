"""The shared part of the optimizers: gradients, closures, steps that happen or do not, records, resuming."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import surefoot as sf
from surefoot.errors import CaptureError
from surefoot.optim import GuaranteedOptimizer, OptimizerError, StepRecord
from surefoot.optim.record import best_stationarity, from_columns, to_columns
from surefoot.optim.stored import norm_of
from surefoot.optim.watch import Fingerprint


class Plain(GuaranteedOptimizer):
    """Gradient descent with a step that happens to be safe."""

    def advance(self, x, y, closure):
        loss, gradient = self.value_and_gradient(x, y, closure)
        self.write({name: value - 0.1 * gradient[name] for name, value in self.trainable.items()})
        size = norm_of(gradient)
        return StepRecord(
            len(self.history), loss, size, 0.1, promised_decrease=0.05 * size**2, data=self.fingerprint(x, y)
        )


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, dtype=torch.float64), torch.randint(2, (count,))


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradient_is_that_of_finite_differences_and_lands_in_grad() -> None:
    model, (x, y) = network(), batch()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    optimizer = Plain(model, sf.CrossEntropy())
    loss, gradient = optimizer.value_and_gradient(x, y)
    assert loss == float(nn.functional.cross_entropy(model(x), y).detach()) == optimizer.value(x, y)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradient[name])
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter += 1e-6 * direction
            above = optimizer.value(x, y)
            parameter -= 2e-6 * direction
            below = optimizer.value(x, y)
            parameter += 1e-6 * direction
        slope = float((gradient[name] * direction).sum())
        assert slope == pytest.approx((above - below) / 2e-6, abs=1e-8)
    assert not gradient["unused"].any()


def test_closure_replaces_the_forward_pass() -> None:
    model, (x, y) = network(), batch()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    optimizer = Plain(model, sf.CrossEntropy())

    def closure():
        outputs = model(x)
        return outputs, nn.functional.cross_entropy(outputs, y)

    twin = network()
    twin.load_state_dict(model.state_dict())
    assert optimizer.step(x, y, closure) == Plain(twin, sf.CrossEntropy()).step(x, y)
    assert len(calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs, loss: loss, "pair"),
        (lambda outputs, loss: (outputs, float(loss.detach())), "pair"),
        (lambda outputs, loss: (outputs, loss.detach()), "differentiable"),
        (lambda outputs, loss: (outputs, loss + 0.01), "the guarantee speaks of the objective"),
        (lambda outputs, loss: (outputs, outputs), "one number"),
        (lambda outputs, loss: (outputs, loss * float("nan")), "nan"),
    ],
)
def test_wrong_closures_are_refused_and_change_nothing(returned, message: str) -> None:
    model, (x, y) = network(), batch()
    optimizer, before = Plain(model, sf.CrossEntropy()), copies(model)

    def closure():
        outputs = model(x)
        return returned(outputs, nn.functional.cross_entropy(outputs, y))

    with pytest.raises(OptimizerError, match=message):
        optimizer.step(x, y, closure)
    assert_untouched(model, before)
    assert optimizer.history == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_undoes_the_step_bit_by_bit(error: type[BaseException]) -> None:
    class Breaks(Plain):
        def advance(self, x, y, closure):
            super().advance(x, y, closure)
            raise error

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    (x, y), before = batch(), copies(model)
    with pytest.raises(error):
        Breaks(model, sf.CrossEntropy()).step(x, y)
    assert_untouched(model, before)  # running statistics too
    Plain(model, sf.CrossEntropy()).step(x, y)
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert not torch.equal(before["1.running_mean"], model[1].running_mean)


def test_a_loss_or_gradient_that_is_not_finite_is_an_error() -> None:
    model, (x, y) = network(), batch()
    optimizer, before = Plain(model, sf.CrossEntropy()), copies(model)
    x[0, 0] = float("nan")
    with pytest.raises(OptimizerError, match="the loss is nan"):
        optimizer.step(x, y)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return x @ self.weight.sqrt()[:, None]

    with pytest.raises(OptimizerError, match="gradient with respect to 'weight' is not finite"):
        Plain(Root(), sf.Square()).step(torch.ones(1, 2).double(), torch.ones(1, 1).double())
    assert_untouched(model, before)


def test_resuming_continues_the_same_run_to_the_last_bit() -> None:
    model, (x, y) = network(), batch()
    optimizer = Plain(model, sf.CrossEntropy())
    for _ in range(3):
        optimizer.step(x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for _ in range(3):
        optimizer.step(x, y)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = network()
    twin.load_state_dict(saved["model"])
    resumed = Plain(twin, sf.CrossEntropy())
    resumed.load_state_dict(saved["optimizer"])
    assert [record.actual_decrease is None for record in resumed.history] == [False, False, True]
    for _ in range(3):
        resumed.step(x, y)
    assert resumed.history == optimizer.history
    assert_untouched(twin, copies(model))


def test_a_copy_goes_its_own_way() -> None:
    model, (x, y) = network(), batch()
    optimizer = Plain(model, sf.CrossEntropy())
    optimizer.step(x, y)
    twin = copy.deepcopy(optimizer)
    assert optimizer.step(x, y) == twin.step(x, y)
    assert_untouched(twin.model, copies(model))
    twin.step(x, y)
    assert len(optimizer.history) == 2
    assert not torch.equal(model[0].weight, twin.model[0].weight)
    assert pickle.loads(pickle.dumps(optimizer)).history == optimizer.history


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = network()
    optimizer = Plain(model, sf.CrossEntropy())
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
    other = optimizer.state_dict()
    other["surefoot"]["kind"] = "Newton"
    with pytest.raises(ValueError, match="the state of Newton, not of Plain"):
        optimizer.load_state_dict(other)


def test_parameter_groups_hold_parameters_of_the_model_only() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = Plain(model, sf.CrossEntropy())
    assert list(optimizer.trainable) == ["2.weight", "2.bias"]
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters()})
    assert list(optimizer.trainable) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    before, (x, y) = copies(model), batch()
    optimizer.step(x, y)
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_what_it_is_made_of_is_checked() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"CrossEntropy\(\) without targets"):
        Plain(model, sf.CrossEntropy(torch.zeros(3, dtype=torch.int64)))
    with pytest.raises(TypeError, match="Linear"):
        Plain(model, nn.Linear(2, 1))
    assert isinstance(Plain(model, nn.CrossEntropyLoss()).objective, sf.CrossEntropy)
    with pytest.raises(ValueError, match="requires_grad_"):
        Plain(network().requires_grad_(False), sf.CrossEntropy())
    with pytest.raises(ValueError, match="finite"):
        Plain(model, sf.CrossEntropy(), lower=-float("inf"))


def test_history_and_progress() -> None:
    model, (x, y), seen = network(), batch(), []
    optimizer = Plain(model, sf.CrossEntropy(), progress=seen.append)
    first, second = optimizer.step(x, y), optimizer.step(x.clone(), y.clone())
    optimizer.step(x + 1, y)
    assert [record.step for record in seen] == [0, 1, 2]
    assert optimizer.history[0].actual_decrease == first - second > 0
    assert optimizer.history[1].actual_decrease is None  # the next loss was that of other data
    assert optimizer.stationarity().bound is None
    assert "different data" in optimizer.stationarity().why
    assert from_columns(to_columns(optimizer.history)) == optimizer.history
    assert from_columns(to_columns([])) == []


def test_anytime_bound_holds_on_a_quadratic_and_is_the_theorem() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    x, y = torch.eye(2, dtype=torch.float64) * 1.4, torch.randn(2, 1, dtype=torch.float64)  # L = 0.98
    optimizer = Plain(model, sf.Square())
    for steps in range(1, 40):
        optimizer.step(x, y)
        found = optimizer.stationarity()
        assert found.steps == steps
        assert found.smallest == min(record.gradient_norm for record in optimizer.history) <= found.bound
        assert found.bound == pytest.approx((optimizer.history[0].loss * 20 / steps) ** 0.5)
    assert best_stationarity([]).bound is None
    assert best_stationarity([StepRecord(0, 1.0, 1.0, 0.1)]).bound is None
    assert best_stationarity([StepRecord(0, 1.0, 0.0, 0.1, promised_decrease=0.0)]).bound == 0


def test_fingerprints_see_every_change() -> None:
    name = Fingerprint()
    x, y = torch.randn(4, 3), torch.arange(4)
    first = name(x, y)
    assert name(x, y) == first == Fingerprint()(x.clone(), y.tolist())
    assert name(x.double(), y) != first
    assert name(x.reshape(3, 4), y) != first
    assert name((x, x), y) != first
    x[2, 1] += 1e-3  # in place: the same tensor, other data
    assert name(x, y) != first
    unseen = name(x, y)
    x.data.neg_()  # of which torch keeps no count
    assert name(x, y) != unseen
    unseen = name(x, y)
    y.numpy()[:] = [1, 0, 2, 3]
    assert name(x, y) != unseen
    with torch.inference_mode():
        hidden = x.clone()
        before = name(hidden, y)
        hidden[0, 0] += 1
        assert name(hidden, y) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_promises_are_about_the_data_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = network().to(dtype), torch.randn(12, 3, dtype=dtype)
    y = 1 - model(x).argmax(dim=1)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    optimizer.step(x, y)
    many = 4 * torch.randn(500, 3, dtype=dtype)
    fitting = torch.log_softmax(model(many), dim=1).argmax(dim=0)
    x.data.copy_(many[fitting[y]])  # on which the loss is lower than the step before left it
    for _ in range(2):
        before = sf.evaluate(model, x.clone(), sf.CrossEntropy(y))
        optimizer.step(x, y)
        after = sf.evaluate(model, x.clone(), sf.CrossEntropy(y))
        assert optimizer.history[-1].promised_decrease <= before.upper - after.lower


def test_the_type_of_a_model_may_change_between_steps() -> None:
    model, (x, y) = network(), batch()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    optimizer.step(x, y)
    model.float()
    optimizer.step(x.float(), y)
    assert optimizer.history[-1].promised_decrease > 0


@pytest.mark.parametrize("options", [{}, {"direction": torch.optim.Adam}, {"proof": "ball"}])
def test_a_run_goes_on_after_pickling(options: dict[str, Any]) -> None:
    optimizer, (x, y) = sf.CertifiedDescent(network(), sf.CrossEntropy(), **options), batch()
    for _ in range(3):
        optimizer.step(x, y)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert copied.model is not optimizer.model
        fourth, fifth = copied.step(x, y), copied.step(x, y)
    assert [optimizer.step(x, y), optimizer.step(x, y)] == [fourth, fifth]
    assert [record.step_size for record in copied.history] == [record.step_size for record in optimizer.history]


def test_a_lazy_model_has_to_be_run_before_the_first_step() -> None:
    model, (x, y) = nn.LazyLinear(2).double(), batch()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    with pytest.raises(CaptureError, match=r"not initialised yet .* Run the model once"):
        optimizer.step(x, y)
    model(x)
    assert optimizer.step(x, y) > 0


def test_hooks_of_torch_are_called_and_profiles_have_the_name_of_the_step() -> None:
    optimizer, calls = sf.CertifiedDescent(nn.Linear(4, 3).double(), sf.CrossEntropy()), []
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    handles = (
        optimizer.register_step_pre_hook(lambda owner, args, options: calls.append(("before", len(args)))),
        optimizer.register_step_post_hook(lambda owner, args, options: calls.append(("after", len(args)))),
        register_optimizer_step_post_hook(lambda owner, *_: calls.append(owner)),
    )
    optimizer.step(x, y)
    assert calls == [("before", 3), ("after", 3), optimizer]
    for handle in handles:
        handle.remove()
    with torch.profiler.profile() as profile:
        optimizer.step(x, y)
    assert len(calls) == 3
    assert "Optimizer.step#CertifiedDescent.step" in {event.key for event in profile.key_averages()}
