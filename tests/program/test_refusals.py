"""What cannot be captured is refused: what, where, what to do, in the user's terms."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from surefoot.errors import CaptureError, SurefootError
from surefoot.program import capture

X = torch.ones(2, 3)
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Both:
    """Two tensors, and no name that says which is meant."""

    left: Tensor
    right: Tensor


def old_fashioned(transform: Callable[..., Any], *args: Any) -> Any:
    """A transformation of a layer that torch advises against."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return transform(nn.Linear(3, 3), *args)


class Inner(nn.Module):
    """A linear layer, and whatever a test wants forward to do with it."""

    def __init__(self, action: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.action = action
        self.register_buffer("average", torch.zeros(3))
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, *args: Any) -> Any:
        return self.action(self, *args)


def inside(action: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A model that does it in its submodule ``1``."""
    return nn.Sequential(nn.Linear(3, 3), Inner(action, **attributes))


def at_top(action: Callable[..., Any]) -> nn.Module:
    return Inner(action)


def assert_refused(make: Callable[[], Any], x: Any, says: str, where: str | None) -> None:
    """The refusal says what, where and what to do, in one sentence each and in the user's terms."""
    with pytest.raises(CaptureError, match=f"(?si){says}") as caught:
        capture(make(), x)
    error, message = caught.value, str(caught.value)
    assert error.where == where
    assert where is None or message.startswith(f"In module '{where}': " if where else "In the model itself: ")
    assert message.endswith(".")
    assert message == f"{message[: -len(error.remedy)]}{error.remedy}"
    assert len(message) < 520
    for internal in ("\n", "export", "Fake", "fake", "Traceback", "dynamo", "unbacked", "Sym", "lifted", "issue"):
        assert internal not in message
    assert error.__suppress_context__ or error.__context__ is None


def branch(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if y.sum() > 0:
        return y
    return -y


def loop(self: Any, x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = x / 2
    return self.layer(x)


def write_parameter(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.mul_(2)
    return self.layer(x)


def write_data(self: Any, x: Tensor) -> Tensor:
    self.layer.weight.data.mul_(2)
    return self.layer(x)


def write_buffer(self: Any, x: Tensor) -> Tensor:
    self.average.mul_(0.9).add_(x.mean(0))
    return self.layer(x - self.average)


def assign_buffer(self: Any, x: Tensor) -> Tensor:
    self.average = self.average + 1
    return self.layer(x - self.average)


def create_layer(self: Any, x: Tensor) -> Tensor:
    if self.head is None:
        self.head = nn.Linear(x.shape[1], 2)
    return self.head(x)


def write_input(self: Any, x: Tensor) -> Tensor:
    x += 1
    return self.layer(x)


def count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(x) * self.calls


def remember(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    if self.memory:
        y = y + self.memory[0]()
    self.memory.append(lambda: y)
    return y


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.layer(x)
    return self.layer(x) + y


def detached_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.layer(x)
    y.detach().mul_(2)
    return y


def lower_precision(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layer(x)


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
    "branch on data": (
        lambda: inside(branch), X, r"control flow depends on the data.*if y\.sum\(\) > 0.*torch\.where", "1",
    ),
    "packed sequence": (
        lambda: inside(
            lambda s, x: s.cell(nn.utils.rnn.pack_padded_sequence(x[None], [2], batch_first=True))[1][-1],
            cell=nn.GRU(3, 3, batch_first=True),
        ),
        X, r"size of a tensor depends on the values of another.*padded batch", "1",
    ),
    "loop on data": (lambda: inside(loop), X, r"control flow.*while x\.norm\(\) > 1", "1"),
    "item": (lambda: inside(lambda s, x: s.layer(x) * x.max().item()), X, r"\.item\(\)", "1"),
    "item of a parameter": (lambda: inside(lambda s, x: x * s.layer.weight.max().item()), X, r"\.item\(\)", "1"),
    "float": (lambda: inside(lambda s, x: s.layer(x) * float(x.max())), X, "control flow.*number", "1"),
    "tolist": (lambda: inside(lambda s, x: s.layer(x) * sum(x[0].tolist())), X, "tolist", "1"),
    "range of data": (lambda: inside(lambda s, x: sum(x for _ in range(int(x.sum())))), X, "loop", "1"),
    "mask selects": (lambda: inside(lambda s, x: s.layer(x)[x > 0]), X, "shape.*depends on the data", "1"),
    "torch.cond": (
        lambda: inside(lambda s, x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (s.layer(x),))),
        X, "control flow", "1",
    ),
    "writes parameter": (lambda: inside(write_parameter), X, "writes into the parameter 'weight'", "1.layer"),
    "writes parameter.data": (lambda: inside(write_data), X, "writes into the parameter 'weight'", "1.layer"),
    "writes buffer": (lambda: inside(write_buffer), X, "reads the buffer 'average' and writes", "1"),
    "assigns buffer": (lambda: inside(assign_buffer), X, "assigns another value.*'average'", "1"),
    "creates a layer": (lambda: inside(create_layer, head=None), X, "draws random.*self.head = nn.Linear", "1"),
    "writes input": (lambda: at_top(write_input), X, r"writes into its input.*clone", ""),
    "writes attribute": (
        lambda: inside(lambda s, x: s.layer(x) * s.total.add_(1), total=torch.zeros(3)), X,
        "changes 'total', and the next", "1",
    ),
    "embedding with max_norm": (
        lambda: nn.Embedding(5, 3, max_norm=1.0), torch.tensor([1]), "writes into the parameter 'weight'", "",
    ),
    "spectral norm while training": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))), X, r"model\.eval\(\)",
        "0.parametrizations.weight.0",
    ),
    "counts calls": (lambda: inside(count, calls=0), X, "changes 'calls', and the next", "1"),
    "remembers": (lambda: inside(remember, memory=[]), X, "changes 'memory', and the next", "1"),
    "detach": (lambda: inside(lambda s, x: s.layer(x).detach() + x), X, "is detached.*derivative", "1"),
    "detach in place": (lambda: inside(detached_in_place), X, "is detached", "1"),
    "no_grad": (lambda: inside(without_gradient), X, r"torch\.no_grad\(\)", "1.layer"),
    "data": (lambda: inside(lambda s, x: s.layer(x).data + s.layer(x)), X, "is detached", "1"),
    "numpy": (lambda: inside(lambda s, x: torch.from_numpy(s.layer(x).numpy())), X, r"\.numpy\(\)", "1"),
    "reentrant checkpoint": (
        lambda: inside(lambda s, x: checkpoint(s.layer, x, use_reentrant=True)), X, "use_reentrant=False",
        "",
    ),
    "autocast": (lambda: inside(lower_precision), X, "precision", "1"),
    "dropout module": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), X, r"dropout.*model\.eval", "1"),
    "dropout function": (lambda: inside(lambda s, x: functional.dropout(s.layer(x), 0.2)), X, "p = 0.2", "1"),
    "alpha dropout": (
        lambda: inside(lambda s, x: functional.alpha_dropout(s.layer(x), 0.2, True)), X, "p = 0.2", "1",
    ),
    "attention dropout": (
        lambda: inside(lambda s, x: functional.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.1)), X,
        "p = 0.1", "1",
    ),
    "attention module dropout": (
        lambda: nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1, batch_first=True), torch.ones(1, 2, 4), "p = 0.1",
        "dropout",
    ),
    "recurrent dropout": (lambda: nn.GRU(3, 3, 2, dropout=0.3), torch.ones(2, 1, 3), "p = 0.3", ""),
    "rrelu": (lambda: nn.Sequential(nn.RReLU()), X, "random slopes", "0"),
    "rrelu function": (lambda: inside(lambda s, x: functional.rrelu(s.layer(x), training=True)), X, "draws", "1"),
    "noise": (lambda: inside(lambda s, x: s.layer(x) + torch.randn_like(x)), X, "draws random numbers", "1"),
    "noise in place": (lambda: inside(lambda s, x: s.layer(x) + torch.empty(3).uniform_()), X, "draws", "1"),
    "gumbel": (lambda: inside(lambda s, x: functional.gumbel_softmax(s.layer(x))), X, "draws random numbers", "1"),
    "python's random": (lambda: inside(lambda s, x: s.layer(x) * random.random()), X, r"\(from random\)", ""),
    "numpy's random": (lambda: inside(lambda s, x: s.layer(x) * np.random.rand()), X, "numpy.random", ""),  # noqa: NPY002
    "own random": (
        lambda: inside(lambda s, x: s.layer(x) * s.generator.random(), generator=random.Random(0)), X,
        r"from '1\.generator'", "",
    ),
    "own numpy random": (
        lambda: inside(lambda s, x: s.layer(x) * s.generator.random(), generator=np.random.default_rng(0)), X,
        r"from '1\.generator'", "",
    ),
}  # fmt: skip


CASES |= {
    "NaN weight": (lambda: nn.Sequential(nn.ReLU(), not_a_number(nn.Linear(3, 3))), X, "'weight' has NaN", "1"),
    "infinite buffer": (infinite_buffer, X, "buffer 'running_var' has NaN or infinite.*mask", "1"),
    "NaN input": (lambda: nn.Linear(3, 3), torch.full((2, 3), torch.nan), "input has NaN", None),
    "infinite input": (lambda: nn.Linear(3, 3), torch.full((2, 3), torch.inf), "infinite", None),
    "complex input": (lambda: nn.Linear(3, 3), X + 1j, "input is complex.*real and imaginary", None),
    "complex weight": (lambda: nn.Linear(3, 3, dtype=torch.complex64), X, "parameter 'weight' is complex", ""),
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
    "data parallel": (lambda: nn.DataParallel(nn.Linear(3, 4)), X, r"model\.module", ""),
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


def test_a_refusal_is_a_value_error_of_surefoot() -> None:
    assert issubclass(CaptureError, SurefootError)
    assert issubclass(CaptureError, ValueError)


def test_a_refusal_is_not_remembered_as_a_capture() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    for _ in range(2):
        with pytest.raises(CaptureError):
            capture(model, X)
    assert capture(model.eval(), X).parameters == ("0.weight", "0.bias")
