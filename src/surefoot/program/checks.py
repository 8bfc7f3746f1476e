"""What a model, its input and what it returns must be, and the modes in which it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from surefoot.errors import CaptureError
from surefoot.torch_private import TABLES, Dropout, is_sharded

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ONE_THREAD = RLock()


@contextmanager
def with_gradients() -> Iterator[None]:
    """A context, or a decorator, in the modes in which derivatives are right, in whatever mode one is.

    Under ``torch.no_grad()`` and ``torch.inference_mode()`` PyTorch records nothing. Slopes would then be missing,
    or zero, and a proof that starts from them would be about another function. Autocast rounds factors. Anomaly
    detection ends passes whose results are looked at afterwards.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        if torch.is_anomaly_enabled():
            modes.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


def plainly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that people call, in the modes in which it is proved, in whatever its caller is.

    Tensors on a default device ``meta`` have no entries; it stays for a model that is there. Tracing and default
    types belong to the whole process, so threads wait for each other.
    """

    @wraps(function)
    def called(*args: _P.args, **options: _P.kwargs) -> _R:
        is_meta = torch.get_default_device().type == "meta" and not _is_on_meta(*args, *options.values())
        with _ONE_THREAD, with_gradients(), torch.device("cpu") if is_meta else nullcontext():
            return function(*args, **options)

    return called


def differentiable_attention() -> Any:
    """A context in which attention is computed so that it has second derivatives: the fused kernels have none."""
    return sdpa_kernel(SDPBackend.MATH)


def _is_on_meta(*given: object) -> bool:
    """Whether a model among these, or that of an optimizer, is on the ``meta`` device."""
    models = (getattr(item, "model", item) for item in given)
    return any(value.is_meta for model in models if isinstance(model, nn.Module) for value in model.parameters())


def as_inputs(x: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword inputs from a tensor, a sequence of tensors or a mapping of names to tensors."""
    if isinstance(x, Tensor):
        return (recordable(x),), {}
    args: tuple[Tensor, ...] = ()
    kwargs: dict[str, Tensor] = {}
    if isinstance(x, Mapping):
        kwargs = dict(x)
    elif isinstance(x, Sequence) and not isinstance(x, str):
        args = tuple(x)
    else:
        remedy = "Pass a tensor, a tuple of tensors, or a dict of keyword arguments that are tensors"
        remedy += ": torch.as_tensor(x) makes one of an array." if hasattr(x, "__array__") else "."
        raise CaptureError(f"the input is of type {type(x).__name__}", remedy=remedy)
    for name, value in _labelled(args, kwargs):
        if not isinstance(value, Tensor):
            remedy = "Pass tensors only; fix other arguments in a small module that wraps yours."
            raise CaptureError(f"{name} is of type {type(value).__name__}, not a tensor", remedy=remedy)
    return tuple(map(recordable, args)), {name: recordable(value) for name, value in kwargs.items()}


def as_targets(y: Any) -> Tensor:
    """Targets as a tensor; one that is a tensor stays on its device, whatever the default device is."""
    return recordable(y if isinstance(y, Tensor) else torch.as_tensor(y))


def recordable(value: Tensor) -> Tensor:
    """The tensor, or a copy if it was made in inference mode: through such tensors there are no derivatives."""
    if not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


def is_loader(x: Any) -> bool:
    """Whether something is many batches, and not one: a tensor, tensors in a row, or tensors by name are one."""
    if isinstance(x, Tensor | Mapping | str) or hasattr(x, "__array__") or not isinstance(x, Iterable):
        return False
    return not (isinstance(x, Sequence) and all(isinstance(item, Tensor) for item in x) and len(x))


def check_inputs(args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> None:
    """Refuse inputs on which no statement about the model could be made."""
    if not args and not kwargs:
        raise CaptureError("no input was given", remedy="Pass an example batch: surefoot reads shapes from it.")
    for name, value in _labelled(args, kwargs):
        if value.numel() == 0:
            what, remedy = f"has shape {tuple(value.shape)}: the batch is empty", "Pass at least one sample."
        elif value.is_complex():
            what, remedy = "is complex", "Pass its real and imaginary parts as real tensors."
        elif value.layout is not torch.strided:
            what, remedy = "is a sparse tensor", "Pass a dense one: x.to_dense()."
        elif not _finite(value):
            what = "has NaN or infinite entries"
            remedy = "Clean the data first; to mask entries, pass a boolean mask and not minus infinity."
        else:
            continue
        raise CaptureError(f"{name} {what}", remedy=remedy)


def check_model(model: Any) -> None:
    """Refuse models on which no statement could be made."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        remedy = "Pass an instance of a module; wrap a function in a small module whose forward calls it."
        raise CaptureError(f"expected a torch.nn.Module, got {kind}", remedy=remedy)
    _refuse_sharded(model)
    for path, module in model.named_modules():
        for what, remedy in _module_problems(module):
            raise CaptureError(what, where=path, remedy=remedy)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, value in tensors:
            owner, _, name = path.rpartition(".")
            for problem, remedy in _tensor_problems(kind, value):
                raise CaptureError(f"the {kind} '{name}' {problem}", where=owner, remedy=remedy)
    _refuse_shared_memory(model)
    _refuse_views(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without the wrapper that averages gradients of several processes.

    Raises:
        CaptureError: if its weights are sharded.
    """
    _refuse_sharded(model)
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _refuse_sharded(model: nn.Module) -> None:
    if is_sharded(model):
        remedy = (
            "Load them whole into a plain copy of the model on each process, "
            "copy.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))) "
            "with torch.distributed.checkpoint.state_dict, and pass that; data may be split, with group=."
        )
        raise CaptureError("the weights of the model are sharded over several processes", remedy=remedy)


def _module_problems(module: nn.Module) -> Iterator[tuple[str, str]]:
    """What is wrong with a module, and what to do about it."""
    if isinstance(module, torch.jit.ScriptModule):
        yield "it was compiled by torch.jit, and its operations cannot be read", "Pass the original module."
    if isinstance(module, nn.DataParallel):
        yield "DataParallel wraps the model to run it on several devices", "Pass the model inside, model.module."
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield (
            "DistributedDataParallel wraps the model to run it in other processes as well",
            "Pass the model inside, model.module, and group= for the data of several processes.",
        )
    if module.training and isinstance(module, Dropout) and module.p > 0:
        yield random_dropout(module.p)
    if module.training and isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        yield random_dropout(module.dropout)
    if module.training and isinstance(module, nn.RReLU) and module.lower != module.upper:
        yield "RReLU draws random slopes in training mode", "Call model.eval(), or set lower = upper."


def _tensor_problems(kind: str, value: Tensor) -> Iterator[tuple[str, str]]:
    """What is wrong with a parameter or buffer, and what to do about it."""
    if is_lazy(value):
        yield (
            "is not initialised yet (a lazy module)",
            "Run the model once, model(x), so that it takes its shapes.",
        )
    if value.is_inference():
        what = "was made under torch.inference_mode() and can have no gradient"
        yield what, "Build the model outside of inference mode."
    if kind == "parameter" and not value.is_meta and _overlaps_itself(value):
        what = f"has entries that share one place in memory (strides {value.stride()}, as expand() makes)"
        yield what, "A step could not move them one by one: give it its own memory, nn.Parameter(value.clone())."
    if kind == "parameter" and value.layout is not torch.strided:
        yield "is a sparse tensor", "Hold it as a dense one; buffers may be sparse."
    if kind == "parameter" and value.is_complex():
        yield "is complex", "Hold its real and imaginary parts as real tensors; buffers may be complex."
    if not _finite(value) and not (kind == "buffer" and _is_mask(value)):
        masks = "" if kind == "parameter" else " A mask is better boolean, with torch.where or masked_fill."
        yield (
            "has NaN or infinite entries",
            f"No bound holds there: re-initialise it, or load finite values.{masks}",
        )


def _overlaps_itself(value: Tensor) -> bool:
    """Whether two entries may lie in one place: some stride does not pass what smaller ones reach."""
    if value.layout is not torch.strided or value.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _is_mask(value: Tensor) -> bool:
    """Whether all entries are finite or minus infinity, as in a mask that is added to scores."""
    return bool((torch.isfinite(value) | torch.isneginf(value)).all())


def random_dropout(probability: float) -> tuple[str, str]:
    """What is wrong with dropout while training, whichever way it was written, and what to do about it."""
    what = f"dropout with p = {probability:g} is random in training mode"
    return what, "Call model.eval(), or set p = 0: an objective must be a function of the weights."


def span(value: Tensor) -> tuple[int, int]:
    """First and last position of its entries in the storage."""
    start = int(value.storage_offset())
    return start, start + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a parameter that shares its memory with another parameter, a buffer or an attribute that is a tensor.

    A step along one would move the other. Buffers may share theirs, with each other and with frozen weights.
    """
    spans: dict[int, list[tuple[int, int, str, str]]] = {}
    for kind, path, value in _tensors_of(model):
        if value.device.type != "meta" and value.numel() and value.layout is torch.strided:
            spans.setdefault(value.untyped_storage().data_ptr(), []).append((*span(value), kind, path))
    for together in spans.values():
        together.sort()
        reached: dict[str, tuple[int, str]] = {}  # by kind: where the furthest one so far ends, and its path
        for start, stop, kind, path in together:
            for other, (end, first) in reached.items():
                if start < end and ("parameter" in (kind, other) or kind == other == "frozen parameter"):
                    owner, _, name = path.rpartition(".")
                    what = f"the {kind} '{name}' shares its memory with the {other} '{first}'"
                    remedy = (
                        "Tie parameters by assigning one nn.Parameter to both; give all else memory of its own."
                    )
                    raise CaptureError(what, where=owner, remedy=remedy)
            reached[kind] = max(reached.get(kind, (0, "")), (stop, path))


def _has_memory(value: Tensor) -> bool:
    return not value.is_meta and value.layout is torch.strided


def _refuse_views(model: nn.Module) -> None:
    """Refuse an attribute that was computed from a parameter: it keeps an old value, and its gradient is lost."""
    weights = [(path, value) for path, value in model.named_parameters() if _has_memory(value)]
    owners = {value.untyped_storage().data_ptr(): path for path, value in weights}
    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) is Tensor and not value.is_leaf and _has_memory(value):
                path = owners.get(value.untyped_storage().data_ptr())
                if path is not None:
                    owner, _, own = path.rpartition(".")
                    what = f"the attribute '{name}' is a view of the parameter '{own}', made outside of forward"
                    raise CaptureError(what, where=owner, remedy=f"Make it inside forward, from self.{own}.")


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """All parameters, and the buffers and attributes that a step could move: kind, path and value."""
    for path, value in model.named_parameters():
        yield "parameter" if value.requires_grad else "frozen parameter", path, value
    yield from (("buffer", path, value) for path, value in model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else (value,)
            )
            own = dict(module.named_parameters(recurse=False))
            if name in TABLES or f"{name}_orig" in own:  # which a hook of torch.nn.utils writes before each call
                continue
            for item in items:
                if type(item) is Tensor and not item.requires_grad:
                    yield "attribute", f"{path}.{name}".lstrip("."), item


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


_OBVIOUS = ("loss", "logits", "last_hidden_state", "output", "out", "prediction", "predictions", "sample")


def select_outputs(result: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors a model returns.

    A tensor is itself. A tuple or list of tensors is several outputs. Anything else (a mapping, a named tuple, an
    output object, a tuple of this and that) stands for the one tensor in it that goes by an obvious name
    (``loss`` if that is a number, ``logits``, ``last_hidden_state``, …), or for the only one there is, at any
    depth. Without such a name, an output object of the ``transformers`` package stands for its tensors, in order.
    """
    if isinstance(result, Tensor):
        return _real({"the output": result})
    plain = isinstance(result, tuple | list) and not hasattr(result, "_fields")
    if plain and result and all(isinstance(item, Tensor) for item in result):
        return _real({f"output {k}": item for k, item in enumerate(result)})
    tensors = {f"output '{key}'": value for key, value in _entries(result).items() if isinstance(value, Tensor)}
    for name in _OBVIOUS:
        if f"output '{name}'" in tensors and (name != "loss" or tensors[f"output '{name}'"].dim() == 0):
            return _real({f"output '{name}'": tensors[f"output '{name}'"]})
    if tensors and hasattr(result, "to_tuple"):  # of the transformers package, with names of its own
        return _real(tensors)
    candidates = _real_tensors(result, "")
    if len(candidates) == 1:
        return tuple(candidates.values())
    names = ", ".join(f"'{name}'" for name in candidates)
    what = f"several tensors: {names}" if candidates else "no floating-point tensor"
    remedy = "Wrap it in a module whose forward returns the tensor you mean, or a tuple of tensors for several."
    raise CaptureError(f"the model returns a {type(result).__name__} with {what}", where="", remedy=remedy)


def selected(result: Any) -> Any:
    """The tensor that a model returns, or a tuple of several."""
    outputs = select_outputs(result)
    return outputs[0] if len(outputs) == 1 else outputs


def _entries(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(key): value for key, value in result.items()}
    if hasattr(result, "_asdict"):
        return dict(result._asdict())
    if isinstance(result, tuple | list):
        return {str(k): item for k, item in enumerate(result)}
    return dict(getattr(result, "__dict__", {}))


def _real_tensors(result: Any, label: str, depth: int = 4) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {label: result} if result.is_floating_point() else {}
    found: dict[str, Tensor] = {}
    if depth and not isinstance(result, type):
        for key, value in _entries(result).items():
            found |= _real_tensors(value, f"{label}.{key}" if label else key, depth - 1)
    return found


def _real(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    for name, value in tensors.items():
        if value.is_complex():
            remedy = "Return its real and imaginary parts, or its absolute value."
            raise CaptureError(f"{name} is complex", where="", remedy=remedy)
        if not value.is_floating_point():
            remedy = "Return scores rather than decisions: there is no derivative through integers."
            raise CaptureError(f"{name} is made of {value.dtype}, not of real numbers", where="", remedy=remedy)
    return tuple(tensors.values())
