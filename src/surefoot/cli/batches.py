"""Batches as a model takes them: how many samples, of which shape, how long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import zoo
from surefoot.cli.frame import UsageError
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
    if data.x.dim() == 2 or not data.x.is_floating_point():
        return data
    mode = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(data.x[:2])
        return data
    except Exception as error:
        try:
            with torch.no_grad():
                model(data.flat().x[:2])
        except Exception:
            shape = "×".join(map(str, data.x.shape[1:]))
            raise UsageError(f"the model does not take {shape}, the samples of {data.name}: {error}") from error
        return data.flat()
    finally:
        for module, training in mode:
            module.training = training


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
