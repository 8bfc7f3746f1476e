"""Weights from a file into a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot.cli import output
from surefoot.cli.frame import UsageError
from surefoot.data import read_tensors


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all parameters and buffers from ``.safetensors`` or from a ``torch.save`` of tensors.

    Raises:
        DataError: if the file cannot be read without running code.
        UsageError: if names, shapes or kinds of numbers do not fit; the model is then as it was.
    """
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
