"""What a model and its input must be before anything is captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surefoot.errors import CaptureError
from surefoot.graph.owned import refuse_shared_memory
from surefoot.torch_private import Dropout


def as_inputs(x: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword inputs from a tensor, a sequence of tensors or a mapping of names to tensors.

    Raises:
        CaptureError: if something else was given.
    """
    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = {}
    if isinstance(x, Tensor):
        args = (x,)
    elif isinstance(x, Mapping):
        kwargs = dict(x)
    elif isinstance(x, Sequence) and not isinstance(x, str):
        args = tuple(x)
    else:
        raise CaptureError(
            f"the input is of type {type(x).__name__}",
            remedy="Pass a tensor, a tuple of tensors, or a dict of keyword arguments that are tensors.",
        )
    for name, value in _labelled(args, kwargs):
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"{name} is of type {type(value).__name__}, not a tensor",
                remedy="Pass tensors only; fix other arguments in a small module that wraps yours.",
            )
    return args, kwargs


def check_inputs(args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
    """Refuse inputs on which no statement about the model could be made.

    Raises:
        CaptureError: on an empty batch, on NaN or infinite entries, on complex numbers.
    """
    if not args and not kwargs:
        raise CaptureError("no input was given", remedy="Pass an example batch: surefoot reads shapes from it.")
    for name, value in _labelled(args, kwargs):
        if value.numel() == 0:
            raise CaptureError(
                f"{name} has shape {tuple(value.shape)}: the batch is empty", remedy="Pass at least one sample."
            )
        if value.is_complex():
            raise CaptureError(f"{name} is complex", remedy="Pass its real and imaginary parts as real tensors.")
        if value.layout is not torch.strided:
            raise CaptureError(f"{name} is a sparse tensor", remedy="Pass a dense one: x.to_dense().")
        if not _finite(value):
            raise CaptureError(
                f"{name} has NaN or infinite entries",
                remedy="Clean the data first; to mask entries, pass a boolean mask and not minus infinity.",
            )


def check_model(model: Any) -> None:
    """Refuse models on which no statement could be made.

    Raises:
        CaptureError: if it is no module, is compiled to TorchScript or not initialised, if a weight or buffer is
            NaN, infinite or complex, if parameters share memory, or if dropout is random.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(
            f"expected a torch.nn.Module, got {kind}",
            remedy="Pass an instance of a module; wrap a function in a small module whose forward calls it.",
        )
    for path, module in model.named_modules():
        _check_module(path, module)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, value in tensors:
            _check_tensor(kind, path, value)
    refuse_shared_memory(model)


def _check_module(path: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            "it was compiled by torch.jit, and its operations cannot be read",
            where=path,
            remedy="Pass the original module.",
        )
    if module.training and isinstance(module, Dropout) and module.p > 0:
        raise random_dropout(path, module.p)
    if module.training and isinstance(module, nn.RReLU) and module.lower != module.upper:
        raise CaptureError(
            "RReLU draws random slopes in training mode",
            where=path,
            remedy="Call model.eval(), or set lower = upper.",
        )


def _check_tensor(kind: str, path: str, value: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    if is_lazy(value):
        raise CaptureError(
            f"the {kind} '{name}' is not initialised yet (a lazy module)",
            where=owner,
            remedy="Run the model once, model(x), so that it takes its shapes.",
        )
    if value.is_inference():
        raise CaptureError(
            f"the {kind} '{name}' was made under torch.inference_mode() and can have no gradient",
            where=owner,
            remedy="Build the model outside of inference mode.",
        )
    if value.is_complex():
        raise CaptureError(
            f"the {kind} '{name}' is complex",
            where=owner,
            remedy="Hold its real and imaginary parts as real tensors.",
        )
    if not _finite(value):
        masks = "" if kind == "parameter" else " A mask is better boolean, with torch.where or masked_fill."
        raise CaptureError(
            f"the {kind} '{name}' has NaN or infinite entries",
            where=owner,
            remedy=f"No bound holds there: re-initialise it, or load finite values.{masks}",
        )


def random_dropout(path: str, probability: float) -> CaptureError:
    """The refusal of dropout while training, whichever way it was written."""
    return CaptureError(
        f"dropout with p = {probability:g} is random in training mode",
        where=path,
        remedy="Call model.eval(), or set p = 0: an objective must be a function of the weights.",
    )


def _labelled(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The inputs with the names they have in a message: ``the input``, ``input 1``, ``input 'mask'``."""
    for k, value in enumerate(args):
        yield "the input" if len(args) == 1 else f"input {k}", value
    for key, value in kwargs.items():
        yield f"input '{key}'", value


def _finite(value: Tensor) -> bool:
    """Whether all entries are finite; tensors without data (meta) count as finite.

    NaN and infinities do not vanish in a sum. If finite entries overflow in it, each is looked at.
    """
    if value.device.type == "meta" or not value.is_floating_point() or value.layout is not torch.strided:
        return True
    value = value.detach()
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
