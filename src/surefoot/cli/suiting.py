"""Weights, samples and devices that suit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.cli import output
from surefoot.cli.guard import UsageError
from surefoot.data import Dataset, read_tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all parameters and buffers from ``.safetensors`` or from a ``torch.save`` of tensors."""
    held = _without_prefix(read_tensors(path), set(model.state_dict()))
    wanted = model.state_dict()
    wrong = [
        f"'{name}' is {_shape(held[name])}, not {_shape(value)}"
        for name, value in wanted.items()
        if name in held and held[name].shape != value.shape
    ]
    wrong += [
        f"'{name}' holds {held[name].dtype}, which is no {value.dtype}"
        for name, value in wanted.items()
        if name in held and not torch.can_cast(held[name].dtype, value.dtype)
    ]
    missing = [f"'{name}' is missing" for name in wanted if name not in held]
    unknown = [f"'{name}' is not in the model" for name in held if name not in wanted]
    problems = wrong + missing + unknown
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UsageError(f"the weights of '{path}' do not fit the model: {'; '.join(problems[:4])}{more}")
    model.load_state_dict(held)


def _without_prefix(held: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Names without the ``module.`` that ``DataParallel`` puts in front of all of them."""
    if held and not wanted & set(held) and all(name.startswith("module.") for name in held):
        output.note("the names in the weights start with 'module.', which was taken off")
        return {name.removeprefix("module."): value for name, value in held.items()}
    return held


def _shape(value: Tensor) -> str:
    return "×".join(map(str, value.shape)) or "a number"


def suited(model: nn.Module, data: Dataset) -> Dataset:
    """The data as images or flat, whichever the model takes."""
    given = [data, data.flat()] if data.x.dim() != 2 and data.x.is_floating_point() else [data]
    found = [(each, refusal(model, each.x[:2])) for each in given]
    found += [(each, refusal(model, each.x)) for each in given if all(error for _, error in found)]
    for each, error in found:  # a few samples where that will do, all where a model takes one number of them only
        if error is None:
            return each
    shape = "×".join(map(str, data.x.shape[1:])) or "single numbers"
    kind = "" if data.x.is_floating_point() else f" ({str(data.x.dtype).removeprefix('torch.')})"
    raise UsageError(f"the model does not take the samples of {data.name}, {shape}{kind}: {found[0][1]}")


def refusal(model: nn.Module, x: Any) -> Exception | None:
    """What a model raises on an input, in evaluation mode and without gradients; ``None`` if it takes it."""
    args, kwargs = ((), x) if isinstance(x, Mapping) else ((x,) if isinstance(x, Tensor) else tuple(x), {})
    try:
        with in_evaluation(model):
            model(*args, **kwargs)
    except Exception as error:
        return error
    return None


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """In the body a model is in evaluation mode, without gradients; then it is as before, its buffers too."""
    buffers = [(value, value.detach().clone()) for value in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for value, before in buffers:
            value.detach().copy_(before)


def scaled(x: Any, norm: float) -> Any:
    """A random batch with this norm, a hair less, so that the bound on it is one."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x * (norm * (1 - 1e-6) / float(torch.linalg.vector_norm(x.double())))


def real_dtype(model: nn.Module) -> torch.dtype:
    """The type of the parameters of a model."""
    real = [value.dtype for value in model.parameters() if value.is_floating_point()]
    return real[0] if real else torch.get_default_dtype()


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with every tensor changed: a tensor, tuples and dicts of them, or ``None``."""
    if isinstance(x, Mapping):
        return {name: mapped(value, change) for name, value in x.items()}
    if isinstance(x, Tensor):
        return change(x)
    return x if x is None else tuple(mapped(value, change) for value in x)


def with_batch(tensor: Tensor, batch: int) -> Tensor:
    """The same with another number of samples: its rows, repeated as often as needed."""
    if not tensor.dim():
        return tensor
    return tensor.repeat(-(-batch // max(len(tensor), 1)), *[1] * (tensor.dim() - 1))[:batch]


def device_named(name: str) -> torch.device:
    """The device of this name, if doubles can be put there."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()  # on the meta device there are no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise UsageError(
            f"--device {name}: PyTorch cannot compute with doubles there on this machine. Use --device cpu, or "
            "leave it out; surefoot doctor lists the devices"
        ) from error
    return device
