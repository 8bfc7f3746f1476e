"""Batches as a model takes them: how many samples, of which shape, how long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import zoo
from surefoot.cli.guard import UsageError
from surefoot.cli.models import Spec
from surefoot.data import Dataset


def sample_shape(spec: Spec, data: Dataset) -> tuple[int, ...]:
    """The shape of the data as the model takes them: flat if a model of the zoo takes vectors."""
    if spec.is_zoo and len(zoo.entry(spec.target).sample(spec.options).shape) == 1:
        return (len(data), int(data.x[0].numel()))
    return tuple(data.x.shape)


def suited(model: nn.Module, data: Dataset) -> Dataset:
    """The data as images or flat, whichever the model takes.

    Raises:
        UsageError: if it takes neither.
    """
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


def with_batch(inputs: Any, batch: int) -> Any:
    """The same inputs with another number of samples: their rows, repeated as often as needed."""
    if isinstance(inputs, Tensor):
        repeats = -(-batch // max(len(inputs), 1))
        return inputs.repeat(repeats, *[1] * (inputs.dim() - 1))[:batch] if inputs.dim() else inputs
    if isinstance(inputs, Mapping):
        return {name: with_batch(value, batch) for name, value in inputs.items()}
    return tuple(with_batch(value, batch) for value in inputs)
