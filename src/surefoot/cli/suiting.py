"""Weights, samples and devices that suit a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import tensors_of
from surefoot.cli import output
from surefoot.cli.guard import UsageError
from surefoot.data import Dataset, read_tensors
from surefoot.objectives.loss import shape_of
from surefoot.optim.bursts import evaluating


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all parameters and buffers from ``.safetensors`` or from a ``torch.save`` of tensors."""
    held = _without_prefix(read_tensors(path), set(model.state_dict()))
    expected = model.state_dict()
    wrong = [
        f"'{name}' is {shape_of(held[name])}, not {shape_of(value)}"
        for name, value in expected.items()
        if name in held and held[name].shape != value.shape
    ]
    wrong += [
        f"'{name}' holds {held[name].dtype}, which is no {value.dtype}"
        for name, value in expected.items()
        if name in held and not torch.can_cast(held[name].dtype, value.dtype)
    ]
    missing = [f"'{name}' is missing" for name in expected if name not in held]
    unknown = [f"'{name}' is not in the model" for name in held if name not in expected]
    problems = wrong + missing + unknown
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UsageError(f"the weights of '{path}' do not fit the model: {'; '.join(problems[:4])}{more}")
    model.load_state_dict(held)


def _without_prefix(held: dict[str, Tensor], expected: set[str]) -> dict[str, Tensor]:
    """The tensors without the prefix ``module.`` that ``DataParallel`` adds to all names."""
    if held and not expected & set(held) and all(name.startswith("module.") for name in held):
        output.note("the names in the weights start with 'module.', which was taken off")
        return {name.removeprefix("module."): value for name, value in held.items()}
    return held


def suited(model: nn.Module, data: Dataset) -> Dataset:
    """The data as images or flat, whichever the model takes."""
    forms = [data, data.flat()] if data.x.dim() != 2 and data.x.is_floating_point() else [data]
    tried = [(form, refusal(model, form.x[:2])) for form in forms]  # a few samples are enough for most models
    if all(error for _, error in tried):  # others take only one number of samples
        tried += [(form, refusal(model, form.x)) for form in forms]
    for form, error in tried:
        if error is None:
            return form
    shape = "×".join(map(str, data.x.shape[1:])) or "single numbers"
    kind = "" if data.x.is_floating_point() else f" ({str(data.x.dtype).removeprefix('torch.')})"
    raise UsageError(f"the model does not take the samples of {data.name}, {shape}{kind}: {tried[0][1]}")


def refusal(model: nn.Module, x: Any) -> Exception | None:
    """The exception that a model raises on an input, in evaluation mode; ``None`` if it takes the input."""
    args, kwargs = ((), x) if isinstance(x, Mapping) else ((x,) if isinstance(x, Tensor) else tuple(x), {})
    try:
        with in_evaluation(model):
            model(*args, **kwargs)
    except Exception as error:
        return error
    return None


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; afterwards its mode and its buffers are as before."""
    buffers = [(value, value.detach().clone()) for value in model.buffers()]
    try:
        with evaluating(model), torch.no_grad():
            yield
    finally:
        for value, before in buffers:
            value.detach().copy_(before)


def scaled(x: Any, norm: float) -> Any:
    """Random inputs scaled together to this norm, or slightly less, so that the norm bounds them."""
    real = [tensor.double() for tensor in tensors_of(x) if tensor.is_floating_point()]
    size = math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in real))
    factor = norm * (1 - 1e-6) / size if size else 1.0
    return mapped(x, lambda tensor: tensor * factor if tensor.is_floating_point() else tensor)


def real_dtype(model: nn.Module) -> torch.dtype:
    """The type of the parameters of a model."""
    real = [value.dtype for value in model.parameters() if value.is_floating_point()]
    return real[0] if real else torch.get_default_dtype()


def mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with a function applied to every tensor: a tensor, tuples and dicts of them, or ``None``."""
    if isinstance(x, Mapping):
        return {name: mapped(value, change) for name, value in x.items()}
    if isinstance(x, Tensor):
        return change(x)
    return x if x is None else tuple(mapped(value, change) for value in x)


def with_batch(tensor: Tensor, batch: int) -> Tensor:
    """A tensor with another number of samples: its rows, repeated as often as needed."""
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
