"""What a model and its input must be before anything is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError


def as_inputs(x: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword inputs from a tensor, a sequence of tensors or a mapping of names to tensors.

    Raises:
        CaptureError: if something else was given.
    """
    if isinstance(x, Tensor):
        args, kwargs = (x,), {}
    elif isinstance(x, Mapping):
        args, kwargs = (), dict(x)
    elif isinstance(x, Sequence) and not isinstance(x, str):
        args, kwargs = tuple(x), {}
    else:
        raise CaptureError(
            f"the input is a {type(x).__name__}",
            remedy="Pass a tensor, a tuple of tensors, or a dict of keyword arguments that are tensors.",
        )
    for label, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"input {label!r} is a {type(value).__name__}, not a tensor",
                remedy="Pass tensors only; fix other arguments with functools.partial or a small wrapper module.",
            )
    return args, kwargs


def check_inputs(args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
    """Refuse inputs on which no statement about the model could be made.

    Raises:
        CaptureError: on an empty batch, on NaN or infinite entries, on complex numbers.
    """
    if not args and not kwargs:
        raise CaptureError(
            "no input was given", remedy="Pass an example batch: surefoot reads shapes from it."
        )
    for label, value in [*enumerate(args), *kwargs.items()]:
        name = f"input {label!r}"
        if value.numel() == 0:
            raise CaptureError(
                f"{name} has shape {tuple(value.shape)}: the batch is empty",
                remedy="Pass at least one sample.",
            )
        if value.is_complex():
            raise CaptureError(
                f"{name} is complex", remedy="Pass its real and imaginary parts as real tensors."
            )
        if not _finite(value):
            raise CaptureError(f"{name} has NaN or infinite entries", remedy="Clean the data first.")


def check_model(model: Any) -> None:
    """Refuse models on which no statement could be made.

    Raises:
        CaptureError: if it is no module, or a weight or buffer is NaN or infinite, or dropout is random.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"expected a torch.nn.Module, got a {type(model).__name__}",
            remedy="Wrap a function in a small module whose forward calls it.",
        )
    for path, module in model.named_modules():
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise random_dropout(path, module.p)
        if module.training and isinstance(module, nn.RReLU) and module.lower != module.upper:
            raise CaptureError(
                "RReLU draws random slopes while training",
                where=path,
                remedy="Call model.eval(), or set lower = upper.",
            )
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, value in tensors:
            if value.is_floating_point() and not _finite(value):
                owner, _, leaf = path.rpartition(".")
                raise CaptureError(
                    f"{kind} '{leaf}' has NaN or infinite entries",
                    where=owner,
                    remedy="No bound holds there: re-initialise or load finite weights.",
                )


def random_dropout(path: str, probability: float) -> CaptureError:
    """The refusal of dropout while training, whichever way it was written."""
    return CaptureError(
        f"dropout with p = {probability:g} is random while training",
        where=path,
        remedy="Call model.eval(), or set p = 0: the objective must be a function of the weights.",
    )


def _finite(value: Tensor) -> bool:
    """Whether all entries are finite; tensors without data (meta) count as finite."""
    if value.device.type == "meta" or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value.detach()).all())
