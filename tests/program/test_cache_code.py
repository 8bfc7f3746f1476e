"""Whatever a forward pass reads matters: attributes, closures, defaults, global names, classes."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cached import Custom, X, assert_current
from torch import Tensor, nn
from torch.nn import functional

from surefoot.program import capture

FACTOR = 2.0
TABLE = {"shift": [1.0]}
settings = types.ModuleType("settings")
settings.scale = 2.0  # type: ignore[attr-defined]


def set_number(model: Custom) -> None:
    model.number = 3.0


def set_sign_of_zero(model: Custom) -> None:
    model.number = math.copysign(0.0, -1.0)


def set_item(model: Custom) -> None:
    model.numbers["deep"][0]["er"] = (5.0, [6.0])


def set_in_tuple(model: Custom) -> None:
    model.numbers["deep"][0]["er"][1][0] = 7.0


def set_queue(model: Custom) -> None:
    model.queue.append(4.0)


def set_attribute_of_object(model: Custom) -> None:
    model.options.scale = 9.0


def write_tensor(model: Custom) -> None:
    model.tensor.fill_(3.0)


def write_tensor_data(model: Custom) -> None:
    model.tensor.data.fill_(3.0)


def write_array(model: Custom) -> None:
    model.array[0] = 3.0


def write_memory_of_tensor(model: Custom) -> None:
    model.tensor.numpy()[...] = 3.0


def set_function(model: Custom) -> None:
    model.choice = torch.cos


def set_attribute_of_parent(model: Custom) -> None:
    model.parent.scale = 8.0


def set_partial(model: Custom) -> None:
    model.partial.keywords["beta"] = 5.0


class Options:
    """A plain object with a setting."""

    scale = 0.0

    def __init__(self) -> None:
        self.scale = 2.0


def read_all(self: Custom, x: Tensor) -> Tensor:
    """Something of every attribute, taken as a number where it can be."""
    numbers = self.numbers["deep"][0]["er"]
    total = numbers[0] + numbers[1][0] + sum(self.queue) + self.options.scale + self.tensor.item()
    x = self.partial(self.choice(x * total * self.weak().scale))
    return x * float(self.array[0]) + torch.copysign(torch.ones(3), torch.tensor(self.number))


@pytest.mark.parametrize(
    "change",
    [
        set_number, set_sign_of_zero, set_item, set_in_tuple, set_queue, set_attribute_of_object, write_tensor,
        write_tensor_data, write_array, write_memory_of_tensor, set_function, set_partial, set_attribute_of_parent,
    ],
)  # fmt: skip
def test_whatever_forward_reads_matters(change: Callable[[Custom], None]) -> None:
    parent = Options()
    model = Custom(
        read_all,
        parent=parent,
        weak=weakref.ref(parent),
        number=0.0,
        numbers={"deep": [{"er": (1.0, [2.0])}]},
        queue=deque([1.0]),
        options=Options(),
        tensor=torch.tensor(2.0),
        array=np.ones(2),
        choice=torch.sin,
        partial=functools.partial(functional.softplus, beta=1.0),
    )
    program = capture(model, X)
    assert capture(model, X) is program
    change(model)
    assert capture(model, X) is not program
    assert_current(model)


def test_a_new_object_in_the_place_of_an_old_one_is_not_taken_for_it() -> None:
    def scaled(factor: float) -> Callable[[Any, Tensor], Tensor]:
        return eval(f"lambda self, x: {factor} * x")

    model = Custom(scaled(1.0))
    for factor in range(2, 12):
        capture(model, X)
        model.function = scaled(float(factor))  # may get the identity of the function it replaces
        assert_current(model)


def test_variables_of_an_enclosing_function_matter() -> None:
    def make() -> tuple[Custom, Callable[[float], None]]:
        factor = 1.0

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        return Custom(lambda self, x: factor * x), change

    model, change = make()
    capture(model, X)
    change(4.0)
    assert_current(model)


def test_default_arguments_matter() -> None:
    def scale(self: Any, x: Tensor, *, factor: float = 2.0) -> Tensor:
        return factor * x

    model = Custom(scale)
    capture(model, X)
    scale.__kwdefaults__ = {"factor": 5.0}
    assert_current(model)


def test_wrappers_around_functions_of_torch_matter() -> None:
    factor = [2.0]

    @functools.wraps(torch.sigmoid)
    def scaled(x: Tensor) -> Tensor:
        return factor[0] * torch.sigmoid(x)

    scaled.__module__ = "torch"
    model = Custom(lambda self, x: scaled(x))
    capture(model, X)
    factor[0] = 3.0
    assert_current(model)


def read_globals(self: Any, x: Tensor) -> Tensor:
    return helper(x) + TABLE["shift"][0] + settings.scale  # type: ignore[attr-defined]


def helper(x: Tensor) -> Tensor:
    return FACTOR * x


@pytest.mark.parametrize("where", ["a number", "a table", "a module", "a function"])
def test_global_names_matter(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Custom(read_globals)
    program = capture(model, X)
    assert capture(model, X) is program
    if where == "a number":
        monkeypatch.setitem(globals(), "FACTOR", 7.0)
    elif where == "a table":
        monkeypatch.setitem(TABLE, "shift", [8.0])
    elif where == "a module":
        monkeypatch.setattr(settings, "scale", 9.0)
    else:
        monkeypatch.setitem(globals(), "helper", torch.exp)
    assert_current(model)


def test_classes_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Custom(lambda self, x: x + self.options.scale, options=Options())
    capture(model, X)
    monkeypatch.setattr(Custom, "gain", 3.0)
    assert_current(model)
    del model.options.scale
    capture(model, X)
    monkeypatch.setattr(Options, "scale", 4.0)
    assert_current(model)
    monkeypatch.setattr(Custom, "forward", lambda self, x: self.layer(x))
    assert_current(model)


def test_patched_methods_of_torch_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    capture(model, X)
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: torch.sin(x))
    assert_current(model)


def test_functions_of_torch_that_a_user_calls_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Custom(lambda self, x: functional.softsign(x))
    capture(model, X)
    monkeypatch.setattr(functional, "softsign", torch.sin)
    assert_current(model)
