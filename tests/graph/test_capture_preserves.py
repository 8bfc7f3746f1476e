"""A capture leaves the model, and everything around it, as it was: also when it fails."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError
from surefoot.operations.captured import capture


class Custom(nn.Module):
    """A linear layer, and whatever a test wants forward to do."""

    def __init__(self, action: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.action = action
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.action(self, x)


def everything(model: nn.Module) -> dict[str, Any]:
    """All there is to see of a model: identities of what it refers to, copies of values."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            seen[f"{path}:{key}"] = value
            if isinstance(value, dict | OrderedDict):
                seen[f"{path}:{key}:items"] = list(value.items())
            elif isinstance(value, list | deque):
                seen[f"{path}:{key}:items"] = list(value)
            elif isinstance(value, set):
                seen[f"{path}:{key}:items"] = set(value)
    for path, value in (*model.named_parameters(), *model.named_buffers()):
        seen[f"{path}:value"] = value.detach().clone()
        seen[f"{path}:version"] = value._version
        seen[f"{path}:flags"] = (value.requires_grad, value.is_leaf, value.grad, value.data_ptr())
    return seen


def same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Any:
    before = everything(model)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    switches = (
        torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(), torch.get_default_dtype(),
        warnings.filters[:], warnings.showwarning,
    )  # fmt: skip
    yield
    after = everything(model)
    assert list(before) == list(after)
    assert [key for key in before if not same(before[key], after[key])] == []
    assert random.getstate() == generators[0]
    assert all(map(np.array_equal, np.random.get_state(), generators[1]))  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert switches == (
        torch.backends.mha.get_fastpath_enabled(), torch.is_grad_enabled(), torch.get_default_dtype(),
        warnings.filters[:], warnings.showwarning,
    )  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def with_running_statistics() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.BatchNorm1d(3, momentum=None)
    )


def with_hooks() -> nn.Module:
    model = plain()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model[2].register_full_backward_hook(lambda module, before, after: None)
    model[2].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def with_gradients() -> nn.Module:
    model = plain()
    model(torch.ones(2, 3)).sum().backward()
    model[0].bias.requires_grad_(False)
    return model


def mixed_modes() -> nn.Module:
    model = with_running_statistics()
    model[1].eval()
    return model


def recurrent() -> nn.Module:
    return nn.RNN(3, 4, batch_first=True)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 4, batch_first=True).eval()


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


def hooked_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))).eval()


def counting() -> nn.Module:
    def action(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.shapes.append(tuple(x.shape))
        self.notes["last"] = "seen"
        self.new = "attribute"
        return self.layer(x)

    return Custom(action, count=0, shapes=[(0,)], notes={"first": 1})


@pytest.mark.parametrize(
    "make",
    [
        plain, with_running_statistics, with_hooks, with_gradients, mixed_modes, recurrent, attention, weight_norm,
        hooked_weight_norm, spectral_norm, counting,
    ],
)  # fmt: skip
def test_a_capture_changes_nothing(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(2, 4, 3) if make in (recurrent, attention) else torch.randn(4, 3)
    with unchanged(model):
        capture(model, x)


def storing(self: Any, x: Tensor) -> Tensor:
    self.kept = self.layer(x)
    return self.kept


def storing_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.history.append(self.layer(x))
    return self.history[-1]


def storing_deeply(self: Any, x: Tensor) -> Tensor:
    self.deep["a"][0].add(self.layer(x))
    return self.layer(x)


def writing_into_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.total.add_(1)
    return self.layer(x) * self.total


def writing_into_a_kept_parameter(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.weights[0].mul_(2)
    return self.layer(x)


def failing_in_the_middle(self: Any, x: Tensor) -> Tensor:
    self.count = 5
    self.layer.extra = "yes"
    self.layer.train(False)
    torch.rand(3)
    random.random()
    np.random.rand()  # noqa: NPY002
    raise RuntimeError("failed in the middle")


def unhooking(self: Any, x: Tensor) -> Tensor:
    self.layer._forward_hooks.clear()
    self.layer.bias = None
    return self.layer(x)


def creating_a_layer(self: Any, x: Tensor) -> Tensor:
    self.second = nn.Linear(3, 3)
    return self.second(x)


def drawing(self: Any, x: Tensor) -> Tensor:
    return self.layer(x) * random.random() + float(np.random.rand())  # noqa: NPY002


def dropping(self: Any, x: Tensor) -> Tensor:
    return nn.functional.dropout(self.layer(x))


@pytest.mark.parametrize(
    "action",
    [
        storing, storing_in_a_list, storing_deeply, writing_into_an_attribute, writing_into_a_kept_parameter,
        failing_in_the_middle, unhooking, creating_a_layer, drawing, dropping,
    ],
)  # fmt: skip
def test_a_refusal_changes_nothing(action: Callable[..., Tensor]) -> None:
    model = Custom(action, history=deque([1]), deep={"a": [set()]}, total=torch.zeros(3), count=0)
    model.weights = [model.layer.weight]
    model.layer.register_forward_hook(lambda module, inputs, output: None)
    kept = model.total.clone()
    with unchanged(model), pytest.raises(CaptureError):
        capture(model, torch.ones(2, 3))
    assert torch.equal(model.total, kept)
    assert model.deep == {"a": [set()]}


def test_what_a_hook_keeps_outside_of_the_model_is_put_back_too() -> None:
    features: dict[str, Tensor] = {}
    model = plain()
    model[0].register_forward_hook(lambda module, inputs, output: features.update(first=output))
    model(torch.ones(2, 3))
    kept = features["first"]
    with unchanged(model):
        capture(model, torch.ones(2, 3))
    assert features["first"] is kept


def test_the_input_is_not_changed() -> None:
    x = torch.randn(4, 3)
    copied, version = x.clone(), x._version
    capture(with_running_statistics(), x)
    assert torch.equal(x, copied)
    assert x._version == version
    assert not x.requires_grad


def test_capture_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def branching(self: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else self.layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(with_running_statistics(), torch.randn(4, 3))
        for model, x in ((Custom(branching), torch.ones(2, 3)), (plain(), torch.ones(2, 5))):
            with pytest.raises(CaptureError):
                capture(model, x)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


def test_capture_works_wherever_gradients_are_off() -> None:
    models = [plain() for _ in range(3)]
    with torch.no_grad():
        off = capture(models[0], torch.ones(2, 3))
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inference = capture(models[1], torch.ones(2, 3))
        assert torch.is_inference_mode_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = capture(models[2], torch.ones(2, 3))
    for graph in (off, inference, lower):
        assert [node.op for node in graph.nodes] == ["aten.linear", "aten.tanh", "aten.linear"]
        assert {spec.dtype for node in graph.nodes for spec in node.specs} == {torch.float32}
