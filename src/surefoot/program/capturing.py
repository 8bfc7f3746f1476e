"""From a model to its program, once per model and shape, with all that would make the program untrue refused."""

from __future__ import annotations

import copy
import random
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError
from surefoot.program.builder import Builder
from surefoot.program.checks import as_inputs, check_inputs, check_model, plainly, select_outputs, selected
from surefoot.program.fingerprint import fingerprint, tensor_digest
from surefoot.program.ir import Program
from surefoot.program.refusals import BACKWARDS, DRAWN, NOT_RANDOM, OTHER, SEVERED, refuse_changes, refuse_devices
from surefoot.program.symbol import Symbol
from surefoot.program.tracing import Traced, traced
from surefoot.program.transpose import differentiate
from surefoot.torch_private import writes_of

Objective = Callable[[Any], Tensor]
_KEPT = 16  # programs per model; one that changes an attribute at every call would fill the memory
_COMPARED = 1_000_000  # entries of a constant that is compared by value
_ROUNDED = 1e-12  # of the largest slope: round-off in the others


@plainly
def capture(model: nn.Module, x: Any, objective: Objective | None = None) -> Program:
    """The program of a model on a batch, or of an objective of its outputs.

    The model is left exactly as it was. The program is the same object as long as neither the model nor the
    objective, the shapes, integers of the input, nor the buffers that it reads change.

    Args:
        model: any module; it may live on the ``meta`` device.
        x: an example batch: a tensor, a tuple of tensors, or a dict of keyword tensors.
        objective: from what the model returns to one number.

    Raises:
        CaptureError: if the model cannot be read, or the program would not say the truth about it.
        UnsupportedOperation: if an operation has no rule.

    >>> model = nn.Linear(3, 1)
    >>> capture(model, torch.ones(2, 3)) is capture(model, torch.zeros(2, 3))
    True
    """
    check_model(model)
    args, kwargs = as_inputs(x)
    check_inputs(args, kwargs)
    refuse_devices(model, (*args, *kwargs.values()))
    own = fingerprint(model, objective)
    key = (
        None
        if own is None
        else (own, tuple(map(_described, args)), tuple((k, _described(v)) for k, v in kwargs.items()))
    )
    entries = _entries_of(model)
    entry = entries.get(key)
    if entry is None or entry.fixed != _fixed(model, entry.read):
        result = _checked(model, args, kwargs, objective)
        entry = _Entry(result.program, result.read, _fixed(model, result.read))
    if key is not None:
        entries[key] = entry
        entries.move_to_end(key)
        while len(entries) > _KEPT:
            entries.popitem(last=False)
    return entry.program


def values_of(program: Program, model: nn.Module, x: Any) -> dict[str, Tensor]:
    """The tensors that a program of a model reads: its parameters as they are, and a batch."""
    args, kwargs = as_inputs(x)
    named = {"x" if len(args) == 1 else f"x.{k}": value for k, value in enumerate(args)}
    present = {**dict(model.named_parameters()), **named, **kwargs}
    return {name: present[name].detach() for name in program.inputs}


@dataclass(frozen=True)
class _Entry:
    """A program, the names of the fixed tensors that it was computed from, and what these were."""

    program: Program
    read: frozenset[str]
    fixed: Hashable


_caches: dict[int, tuple[weakref.ref[nn.Module], OrderedDict[Hashable, _Entry]]] = {}


def _entries_of(model: nn.Module) -> OrderedDict[Hashable, _Entry]:
    """The programs of a model, forgotten when the model is."""
    number = id(model)
    known = _caches.get(number)
    if known is None or known[0]() is not model:
        known = weakref.ref(model, lambda _: _caches.pop(number, None)), OrderedDict()
        _caches[number] = known
    return known[1]


def _described(value: Tensor) -> Hashable:
    """What of an input a program depends on: its shape, and integers with their values."""
    integers = not value.is_floating_point() and not value.is_meta
    digest = tensor_digest(value) if integers else None
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, digest


def _fixed(model: nn.Module, names: frozenset[str]) -> Hashable:
    """The values of buffers and frozen parameters; large ones by their place in memory and how often written."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {name: tensors.get(name) for name in sorted(names)}
    return tuple(
        (name, None if value is None or value.is_meta else _state(value)) for name, value in known.items()
    )


def _state(value: Tensor) -> Hashable:
    if value.layout is not torch.strided:
        return tensor_digest(value.to_dense())
    if value.numel() <= _COMPARED:
        return tensor_digest(value)
    return value.data_ptr(), writes_of(value)


def _checked(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], objective: Objective | None
) -> Traced:
    """Trace a copy of a model, so that the model stays as it is, and refuse what would not be true of it."""
    twin, around = _copied(model), _closures(model)
    before, state, drawn = fingerprint(twin, objective), _attributes(twin), _random_state()
    goal = selected if objective is None else lambda out: objective(selected(out))
    try:
        result = traced(twin, args, goal, kwargs)
        touched = [name for name, kept in _random_state().items() if not _equal(kept, drawn[name])]
        if touched:
            what = f"the forward pass draws random numbers (from {' and '.join(touched)})"
            raise CaptureError(what, where="", remedy=NOT_RANDOM)
        if before is None or before != fingerprint(twin, objective):
            again = _again(twin, args, goal, kwargs)
            if again is None or str(again.program) != str(result.program) or not _same_constants(result, again):
                refuse_changes(state, _attributes(twin))
    finally:
        _restore(drawn)
        for container, content in around:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
    program = result.program
    data = [name for name in program.inputs if name not in program.parameters]
    dependent = program.depends(data)
    if data and not any(dependent[k] for k in program.outputs):
        remedy = "Return something that is computed from the input."
        raise CaptureError("the output does not depend on the input", where="", remedy=remedy)
    if result.severed or result.custom:
        _refuse_other_derivative(model, args, kwargs, goal, result)
    return result


def _again(model: nn.Module, args: Any, goal: Objective, kwargs: Any) -> Traced | None:
    """What a second call in a row computes; None if it reads what the first one left."""
    try:
        return traced(model, args, goal, kwargs)
    except Exception:  # whatever happens to what is stored
        return None


def _same_constants(first: Traced, second: Traced) -> bool:
    pairs = zip(first.program.constants.values(), second.program.constants.values(), strict=True)
    return all(a.is_meta or torch.equal(a, b) for a, b in pairs)


def _copied(model: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers; the model itself if it cannot be copied."""
    memo: dict[int, Any] = {id(value): value for value in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # tensors that were computed cannot be copied
        memo |= {id(v): v.detach() for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return copy.deepcopy(model, memo)
    except Exception:  # locks, files, generators of other libraries
        return model


def _closures(model: nn.Module) -> list[tuple[Any, Any]]:
    """Containers that hooks and functions of a model may fill, as with activations, and copies of them."""
    functions = [f for module in model.modules() for f in vars(module).values()]
    functions += [f for table in functions if isinstance(table, dict) for f in table.values()]
    cells = [cell for f in functions for cell in getattr(f, "__closure__", None) or ()]
    contents = [cell.cell_contents for cell in cells if _is_filled(cell)]
    return [(c, copy.copy(c)) for c in contents if isinstance(c, dict | list | set)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What every module holds, as far as it can be told without a walk: to name what has changed."""
    held = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = tuple(map(id, value)) if isinstance(value, list | tuple | set | dict) else ()
            number = value if isinstance(value, int | float | str) else id(value)
            if isinstance(value, random.Random | np.random.Generator):
                state = value.getstate() if isinstance(value, random.Random) else value.bit_generator.state
                number = DRAWN + repr(state)
            written = writes_of(value) if isinstance(value, Tensor) and not value.is_inference() else 0
            held[path, name] = number, items, written
    return held


def _random_state() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy.random": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)


def _restore(state: Mapping[str, Any]) -> None:
    random.setstate(state["random"])
    np.random.set_state(state["numpy.random"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])


def _refuse_other_derivative(
    model: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], goal: Objective, result: Traced
) -> None:
    """Refuse a model whose gradient, as torch computes it, is not the derivative of what it computes.

    Hand-written backward functions, and tensors that are detached, make it so. Gradients are compared in double
    precision at the example and at eight times it, for random slopes: a test at two inputs and no proof.
    """
    values = (*model.parameters(), *args, *kwargs.values())
    same = not any(value.is_meta for value in values)
    try:
        twin = copy.deepcopy(model).double() if same else model
        same = same and all(_same_derivative(twin, args, kwargs, goal, scale) for scale in (1.0, 8.0))
    except Exception:  # a copy or a run in double precision may fail in many ways
        same = False
    if same:
        return
    if result.severed or "CheckpointFunction" in result.custom:
        path, how = (result.severed or [("", "is computed under torch.no_grad() (in torch.utils.checkpoint)")])[0]
        remedy = f"{SEVERED} {BACKWARDS}" if result.transforms else SEVERED
        raise CaptureError(f"a tensor that depends on the parameters {how}", where=path, remedy=remedy)
    names = " and ".join(f"'{name}'" for name in result.custom)
    what = f"the backward of {names} (torch.autograd.Function) is not seen to be the derivative of forward at the "
    raise CaptureError(f"{what}example and at eight times it, where the two are compared", where="", remedy=OTHER)


def _same_derivative(
    model: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], goal: Objective, scale: float
) -> bool:
    args = [_scaled(value, scale) for value in args]
    kwargs = {name: _scaled(value, scale) for name, value in kwargs.items()}
    program = traced(model, args, goal, kwargs).program
    builder, generator = Builder(program), torch.Generator().manual_seed(0)
    slopes = [
        torch.randn(program.nodes[k].shape, dtype=torch.float64, generator=generator) for k in program.outputs
    ]
    slopes = [slope.to(program.device) for slope in slopes]
    total = sum((Symbol(builder, k) * s).sum() for k, s in zip(program.outputs, slopes, strict=True))
    assert isinstance(total, Symbol)
    live = select_outputs(goal(model(*args, **kwargs)))
    weights = dict(model.named_parameters())
    value = sum((out * slope).sum() for out, slope in zip(live, slopes, strict=True))
    assert isinstance(value, Tensor)
    wanted = [weights[name] for name in program.parameters]
    theirs: Sequence[Tensor] = [torch.zeros_like(weight) for weight in wanted]
    if value.requires_grad:
        theirs = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
    both = differentiate(builder.finish([total.index]))
    inputs = {**kwargs, **{"x" if len(args) == 1 else f"x.{k}": v for k, v in enumerate(args)}}
    ours = both.results({name: (weights | inputs)[name].detach() for name in both.inputs})[1:]
    if scale != 1 and not all(bool(slope.isfinite().all()) for slope in ours):
        return True  # too far from the example to say anything
    sizes = [float(slope.abs().max()) if slope.numel() else 0.0 for slope in ours]
    least = _ROUNDED * max(sizes, default=0.0)  # a derivative that is zero, such as that of what a mean removes
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=max(1e-4 * size, least))
        for a, b, size in zip(theirs, ours, sizes, strict=True)
    )


def _scaled(value: Tensor, scale: float) -> Tensor:
    return value.detach().double() * scale if value.is_floating_point() else value
