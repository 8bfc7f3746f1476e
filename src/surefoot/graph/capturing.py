"""From a PyTorch model to a graph, once per model and shape."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from surefoot.graph.flatten import masks_of
from surefoot.graph.nodes import Source
from surefoot.graph.preserve import preserved
from surefoot.graph.read import Rewrite, dense, read
from surefoot.graph.refusals import (
    refuse_effects,
    refuse_masked_rows,
    refuse_other,
    refuse_other_derivative,
    refuse_severed,
    refuse_stored,
    refuse_unfaithful,
    refuse_wrong_ids,
)
from surefoot.graph.structure import Graph, HeldCopies
from surefoot.graph.survey import Survey
from surefoot.graph.trace import trace
from surefoot.program.checks import as_inputs, check_inputs, check_model, plainly

_KEPT = 16  # captures per model; one that changes an attribute at every call would fill the memory
_SMALL = 4096  # entries of a buffer whose every change makes a new graph, whatever reads it


@plainly
def capture_with(model: nn.Module, x: Any, rewrite: Rewrite) -> Graph:
    """Read a model as a graph of operations.

    The model is left exactly as it was: mode, attributes, hooks, gradient flags, buffers, random state.
    A capture depends on shapes, not on values, so it is cached per model and shape. Parameters that ask for no
    gradient are constants.

    Args:
        model: any module that ``torch.export`` can trace; it may live on the ``meta`` device.
        x: an example batch: a tensor, a tuple of tensors, or a dict of keyword tensors.
        rewrite: from the traced operations to those the graph shall have.

    Returns:
        The graph, whose buffers and constants refer to the model's. It is the same object as long as neither
        the model nor its buffers and constants change.

    >>> graph = sf.graph.capture_with(nn.ReLU(), torch.ones(2, 3), rewrite=lambda graph: graph)
    >>> graph.nodes[0].op
    'aten.relu'
    """
    check_model(model)
    args, kwargs = as_inputs(x)
    check_inputs(args, kwargs)
    survey = Survey(model, record=False)
    shapes = tuple(map(_describe, args)), tuple((key, _describe(value)) for key, value in kwargs.items())
    key = None if survey.description is None else (survey.description, shapes, masks_of(model), rewrite)
    entries = _entries_of(model)
    entry = entries.get(key)
    if entry is None:
        entry = _Entry(_capture(model, args, kwargs, rewrite))
    entry = entry.refreshed(model)
    if key is not None:
        entries[key] = entry
        entries.move_to_end(key)
        while len(entries) > _KEPT:
            entries.popitem(last=False)
    inputs = (*args, *kwargs.values())
    refuse_wrong_ids(entry.graph, inputs)
    refuse_masked_rows(entry.graph, inputs, dict(model.named_parameters()))
    return entry.graph


class _Entry:
    """A graph, and the values of what it holds at the time it was made."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        watched = {name for name, value in graph.held.items() if value.numel() <= _SMALL}
        self._copies = HeldCopies(graph.held, watched | graph.constant_sources)

    def refreshed(self, model: nn.Module) -> _Entry:
        """The same, or a new one if what the graph holds has changed: readings of it may rely on the values."""
        present = dict((*model.named_parameters(), *model.named_buffers(remove_duplicate=False)))
        held = {
            name: value
            if self.graph.leaves[name].source is Source.CONSTANT
            else dense(present[self.graph.leaves[name].path], value)
            for name, value in self.graph.held.items()
        }
        if all(held[name] is value for name, value in self.graph.held.items()) and not self._copies.outdated(held):
            return self
        return _Entry(dataclasses.replace(self.graph, held=held))


_caches: dict[int, tuple[weakref.ref[nn.Module], OrderedDict[Hashable, _Entry]]] = {}


def _entries_of(model: nn.Module) -> OrderedDict[Hashable, _Entry]:
    """The captures of a model, forgotten when the model is."""
    number = id(model)
    known = _caches.get(number)
    if known is None or known[0]() is not model:
        known = weakref.ref(model, lambda _: _caches.pop(number, None)), OrderedDict()
        _caches[number] = known
    return known[1]


def _capture(model: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], rewrite: Rewrite) -> Graph:
    survey = Survey(model)
    with preserved(model, survey) as before:
        for parameter in model.parameters():
            parameter.grad = None  # no part of the function; a view whose type model.float() changed stops tracing
        traced = trace(model, args, kwargs, survey)
        refuse_stored(traced.changes, model)
        refuse_effects(before.written_to(), before.drawn_from())
        graph = read(traced.program, model, rewrite)
        if not traced.differentiates:
            refuse_severed(traced.original)
            refuse_severed(traced.program)
        refuse_unfaithful(graph)
        if traced.custom or traced.differentiates:
            refuse_other_derivative(model, graph, args, kwargs, traced.custom, traced.lost)
        if traced.changes:  # harmless, if a second call in a row computes the same
            again = read(trace(model, args, kwargs, survey, calls=2).program, model, rewrite)
            refuse_other(graph, again, traced.changes, model)
    return graph


def _describe(value: Tensor) -> Hashable:
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
