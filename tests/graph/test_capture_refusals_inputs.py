"""Inputs, weights and outputs on which nothing can be said are refused: what, where, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refused import Both, Pair, X, assert_refused, at_top, inside, old_fashioned
from torch import Tensor, nn


def branch(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.sum() > 0:
        return y
    return -y


def not_a_number(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        next(model.parameters())[0] = torch.nan
    return model


def infinite_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_var.fill_(torch.inf)
    return model


def distributed() -> nn.Module:
    """A model in the wrapper of torch.distributed, without a process group to make it in."""
    kind = nn.parallel.DistributedDataParallel
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Linear(3, 4)
    return wrapper


def shared_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    return model


def stale_view() -> nn.Module:
    model = inside(lambda self, x: x * self.view)
    model[1].view = model[1].layer.weight.view(-1)[:3]
    return model


# name: (model, input, what the message says, the module it names; None: no module is to blame)
CASES: dict[str, tuple[Callable[[], Any], Any, str, str | None]] = {
    "NaN weight": (lambda: nn.Sequential(nn.ReLU(), not_a_number(nn.Linear(3, 3))), X, "'weight' has NaN", "1"),
    "infinite buffer": (infinite_buffer, X, "buffer 'running_var' has NaN or infinite.*mask", "1"),
    "NaN input": (lambda: nn.Linear(3, 3), torch.full((2, 3), torch.nan), "input has NaN", None),
    "infinite input": (lambda: nn.Linear(3, 3), torch.full((2, 3), torch.inf), "infinite", None),
    "complex input": (lambda: nn.Linear(3, 3), X + 1j, "input is complex.*real and imaginary", None),
    "complex weight": (lambda: nn.Linear(3, 3, dtype=torch.complex64), X, "parameter 'weight' is complex", ""),
    "complex output": (lambda: at_top(lambda s, x: torch.fft.fft(s.layer(x))), X, "output is complex", ""),
    "empty batch": (lambda: nn.Linear(3, 3), torch.ones(0, 3), r"shape \(0, 3\): the batch is empty", None),
    "sparse input": (lambda: nn.Linear(3, 3), X.to_sparse(), "sparse.*to_dense", None),
    "no input": (lambda: nn.Linear(3, 3), (), "no input", None),
    "number as input": (lambda: nn.Linear(3, 3), 3.0, "the input is of type float", None),
    "list of numbers": (lambda: nn.Linear(3, 3), [1.0, 2.0], "input 0 is of type float", None),
    "dict of numbers": (lambda: nn.Linear(3, 3), {"input": 1}, "input 'input' is of type int", None),
    "not a module": (lambda: torch.sin, X, "expected a torch.nn.Module", None),
    "a class": (lambda: nn.ReLU, X, "class ReLU.*instance", None),
    "script": (lambda: nn.Sequential(old_fashioned(torch.jit.trace, X)), X, "torch.jit", "0"),
    "wrapped": (distributed, X, r"model\.module", ""),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), X, "not initialised.*Run the model once", "0"),
    "shared memory": (shared_memory, X, "shares its memory", "1"),
    "view of a parameter": (stale_view, X, "view of the parameter.*inside forward", "1.layer"),
    "does not fit": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2)), X,
        r"in_features=5.*\[2, 4\] X \[5, 2\]", "2",
    ),
    "convolution does not fit": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), torch.ones(1, 2, 8, 8), "expected input.* to have 3 channels",
        "0",
    ),
    "wrong number of inputs": (lambda: inside(branch), (X, X), "takes 2 positional arguments but 3", ""),
    "wrong names": (lambda: nn.Linear(3, 3), {"x": X}, "unexpected keyword argument 'x'", ""),
    "own error": (lambda: inside(lambda s, x: {}["no"]), X, "KeyError: 'no'", "1"),
    "element types": (lambda: nn.Sequential(nn.Linear(3, 3)), X.double(), "float64 by torch.float32", "0"),
    "meta model": (lambda: nn.Linear(3, 3, device="meta"), X, "model is on meta, the input on cpu", ""),
    "meta input": (lambda: nn.Linear(3, 3), X.to("meta"), "model is on cpu, the input on meta", ""),
    "integers": (lambda: nn.Sequential(nn.Linear(3, 3)), X.long(), r"integers.*x\.float", "0"),
    "integers converted": (lambda: inside(lambda s, x: x), X.long(), "integers", "0"),
    "integers multiplied": (lambda: at_top(lambda s, x: s.layer(x * 0.5)), X.long(), "integers", ""),
    "ids too large": (lambda: nn.Sequential(nn.Embedding(4, 3)), torch.tensor([[0, 4]]), "4 entries.*0 to 4", "0"),
    "ids negative": (lambda: nn.Embedding(4, 3), torch.tensor([-1]), "from -1", ""),
    "constant output": (lambda: at_top(lambda s, x: s.layer.weight * 2), X, "does not depend on the input", ""),
    "zeros of its shape": (lambda: at_top(lambda s, x: torch.zeros_like(x)), X, "does not depend", ""),
    "decision": (lambda: at_top(lambda s, x: s.layer(x).argmax(1)), X, "torch.int64.*scores", ""),
    "returns nothing": (lambda: at_top(lambda s, x: None), X, "NoneType with no floating-point tensor", ""),
    "returns a number": (lambda: at_top(lambda s, x: 1.0), X, "a float with no", ""),
    "dict of two": (lambda: at_top(lambda s, x: {"a": s.layer(x), "b": x}), X, "several tensors: 'a', 'b'", ""),
    "dataclass of two": (
        lambda: at_top(lambda s, x: Both(s.layer(x), x)), X, "Both with several tensors: 'left', 'right'", "",
    ),
    "named tuple of two": (lambda: at_top(lambda s, x: Pair(s.layer(x), x)), X, "'left', 'right'", ""),
    "nested": (lambda: nn.LSTM(3, 3), torch.ones(2, 1, 3), r"'0', '1\.0', '1\.1'", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_clear_message(name: str) -> None:
    assert_refused(*CASES[name])
