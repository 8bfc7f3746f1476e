"""Leaving the user's model as it was found, whatever happens in between."""

from __future__ import annotations

import array
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.graph.survey import Generator, Survey, state_of
from surefoot.torch_private import set_writes_of, writes_of


@dataclass(frozen=True)
class Change:
    """Something that is not as it was."""

    label: str  # where: ``encoder.history``
    of_model: bool  # whether it belongs to the model, and not only to a closure
    holds_tensor: bool  # whether a tensor was put there


class Watch:
    """The content of all attributes and containers that a model refers to, at one moment."""

    def __init__(self, survey: Survey) -> None:
        self._holders = [(holder, _copy(holder.value)) for holder in survey.holders]

    def changes(self, own: Iterable[Tensor] = ()) -> list[Change]:
        """What is not as it was; tensors that are the model's own may be moved about."""
        found = []
        known = {id(value) for value in own}
        for holder, saved in self._holders:
            for key, value in _differences(holder.value, saved):
                label = ".".join(part for part in (holder.label, key) if part)
                holds_tensor = any(id(tensor) not in known for tensor in _tensors_in(value))
                found.append(Change(label, holder.of_model, holds_tensor))
        return found

    def restore(self) -> None:
        """Put everything back."""
        for holder, saved in self._holders:
            _restore(holder.value, saved)


class Snapshot:
    """The state of a model that is not in the values of its parameters and buffers, and of random generators."""

    def __init__(self, model: nn.Module, survey: Survey) -> None:
        self._watch = Watch(survey)
        known = [(label, value) for label, value in survey.tensors if _has_values(value)]
        self._tensors = [(label, value, value.detach().clone(), writes_of(value)) for label, value in known]
        self._gradients = [(value, value.requires_grad, value.grad) for value in model.parameters()]
        generators = [*global_generators().items(), *((f"'{key}'", value) for key, value in survey.generators)]
        self._generators = [(name, generator, state_of(generator)) for name, generator in generators]
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def drawn_from(self) -> list[str]:
        """The generators that random numbers were drawn from while tracing: they are baked into the graph."""
        return [name for name, one, state in self._generators if not same_state(state_of(one), state)]

    def written_to(self) -> list[str]:
        """The tensors, other than parameters and buffers in their tables, whose entries are not what they were."""
        return [label for label, value, saved, _ in self._tensors if not _equal(value, saved)]

    def restore(self) -> None:
        """Put everything back."""
        self._watch.restore()
        for _, value, saved, version in self._tensors:
            if not _equal(value, saved):
                value.data.copy_(saved)
            # Autograd counts writes. A pending backward pass may go on: the values are what they were.
            set_writes_of(value, version)
        for parameter, requires_grad, grad in self._gradients:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad
        for _, generator, state in self._generators:
            set_state(generator, state)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def preserved(model: nn.Module, survey: Survey) -> Iterator[Snapshot]:
    """Restore the model and the random state on leaving.

    What is restored is every attribute, table, hook and container that the model refers to, at any depth, the
    values of tensors that are neither parameters nor buffers, the gradient flag and ``.grad`` of every parameter,
    and the state of the random generators. Values of parameters and buffers are not copied: nothing that runs
    inside may write to them.
    """
    snapshot = Snapshot(model, survey)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def _copy(value: Any) -> dict[Any, Any] | set[Any] | list[Any]:
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _restore(value: Any, saved: Any) -> None:
    """Refill a container in place, as others may hold a reference to it."""
    in_order = not isinstance(value, dict) or list(value) == list(saved)
    if in_order and not any(_differences(value, saved)):
        return
    if isinstance(value, dict | set):
        value.clear()
        value.update(saved)
    elif isinstance(value, deque):
        value.clear()
        value.extend(saved)
    else:
        value[:] = array.array(value.typecode, saved) if isinstance(value, array.array) else saved


def _differences(value: Any, saved: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds now and did not before, or no longer holds; by key where there are keys."""
    if isinstance(value, dict):
        for key in [*value, *(key for key in saved if key not in value)]:
            if not (key in value and key in saved and _same(value[key], saved[key])):
                yield str(key), value.get(key)
    elif isinstance(value, set):
        if value != saved:
            yield "", value - saved
    elif len(value) != len(saved) or not all(map(_same, value, saved)):
        known = {id(item) for item in saved}
        yield "", [item for item in value if id(item) not in known]


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str | bytes) and a == b)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _tensors_in(item)


def _equal(value: Tensor, saved: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(value.detach()), torch.nan_to_num(saved))


def _has_values(value: Tensor) -> bool:
    return value.device.type != "meta" and value.layout is torch.strided and not value.is_inference()


def set_state(generator: Generator, state: Any) -> None:
    """Put a generator into a state it was in.

    >>> generator = random.Random(0)
    >>> state = state_of(generator)
    >>> first = generator.random()
    >>> set_state(generator, state)
    >>> generator.random() == first
    True
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def global_generators() -> dict[str, Generator]:
    """The generators behind the functions of the modules, by the name of the module."""
    python: Any = random.random
    numpy: Any = np.random.rand
    return {"random": python.__self__, "numpy.random": numpy.__self__, "torch": torch.default_generator}
