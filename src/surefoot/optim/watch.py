"""What is the same as at the last step: the data, the weights, the function."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph import Graph, Source
from surefoot.graph.checks import as_inputs
from surefoot.torch_private import writes_of

Tensors = dict[str, Tensor]
State = tuple[Any, Tensors, Tensors]


class Fingerprint:
    """Names batches by their content.

    The very tensors of the last call, unchanged, are recognised without reading them. (torch does not see what
    numpy writes into memory that both share: pass a new tensor then.)

    >>> name = Fingerprint()
    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> name(x, y) == name(x.clone(), y.clone()), name(x, y) == name(x + 1, y)
    (True, False)
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._name = ""

    def __call__(self, x: Any, y: Any = None) -> str:
        """The fingerprint: 16 hexadecimal digits."""
        args, kwargs = as_inputs(x)
        tensors = (*args, *kwargs.values(), *(() if y is None else (torch.as_tensor(y),)))
        if any(tensor.is_inference() for tensor in tensors):  # these do not count their changes
            self._seen = ()
            return _digest(tensors)
        versions = tuple(writes_of(tensor) for tensor in tensors)
        same = len(tensors) == len(self._seen) and all(a is b for a, b in zip(tensors, self._seen, strict=True))
        if not same or versions != self._versions:
            self._name = _digest(tensors)
            self._seen, self._versions = tensors, versions
        return self._name


class Watch:
    """Notices what was changed between two steps, by whomever.

    A promise speaks of one function at one point. So an optimizer may go on with what it kept only if the weights
    are those that its last step left, and the model still computes the same function of them: flags, modes, frozen
    weights, buffers, and whatever else ``forward`` reads (:func:`surefoot.graph.capture_with` returns the same
    graph as long as all of that is unchanged). Weights and buffers are compared by value.
    """

    def __init__(self) -> None:
        self._left: State | None = None
        self._digest: str | None = None  # of the same, where a run is resumed
        self._seen: tuple[str, Graph, str] | None = None  # the kind of input, its graph, the name of the function
        self._buffers: Tensors = {}  # that the graph reads, as they were
        self._functions: dict[str, str] = {}  # by kind of input

    def function_changed(self, model: nn.Module, options: str = "") -> bool:
        """Whether flags, modes, options, frozen weights or buffers are not what the last step left."""
        present = _state(model, options)
        if self._left is None:
            return self._digest is not None and self._digest != _digest_of(present)
        fixed = present[0] == self._left[0] and same_tensors(present[2], self._left[2])
        return not fixed or not same_tensors(self._held(), self._buffers)

    def weights_changed(self, model: nn.Module) -> bool:
        """Whether the weights that vary are not what the last step left."""
        return self._left is not None and not same_tensors(_state(model)[1], self._left[1])

    def other_graph(self, x: Any, graph: Graph) -> bool:
        """Whether the model computes another function of such inputs than at the last step that saw such ones."""
        args, kwargs = as_inputs(x)
        kind = str([(key, tuple(v.shape), v.dtype) for key, v in (*enumerate(args), *kwargs.items())])
        if self._seen is None or self._seen[1] is not graph:
            self._seen = kind, graph, _name_of(graph)
        return self._functions.get(kind, self._seen[2]) != self._seen[2]

    def leave(self, model: nn.Module, anew: bool, options: str = "") -> None:
        """Remember the model and the options of its objective; ``anew``: the function is not the one before."""
        if anew:
            self._functions = {}
        if self._seen is not None:
            kind, graph, name = self._seen
            self._seen = kind, graph, _name_of(graph) if anew else name
            self._functions[kind] = self._seen[2]
        settings, varying, fixed = _state(model, options)
        self._left = settings, _copies(varying), _copies(fixed)
        self._buffers = _copies(self._held())

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        digest = self._digest if self._left is None else _digest_of(self._left)
        return {"left": digest, "functions": dict(self._functions)}

    def load(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._left, self._seen, self._buffers = None, None, {}
        self._digest, self._functions = state["left"], dict(state["functions"])

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the graph."""
        return {**self.__dict__, "_seen": None, "_buffers": {}}

    def _held(self) -> Tensors:
        if self._seen is None:
            return {}
        graph = self._seen[1]
        return {name: v.detach() for name, v in graph.held.items() if graph.leaves[name].source is Source.BUFFER}


def _state(model: nn.Module, options: str = "") -> State:
    """Modes, flags and options, what varies, what is frozen."""
    named = dict(model.named_parameters())
    settings = [(name, module.training) for name, module in model.named_modules()]
    flags = [(name, value.requires_grad) for name, value in named.items()]
    varying = {name: value.detach() for name, value in named.items() if value.requires_grad}
    fixed = {name: value.detach() for name, value in named.items() if not value.requires_grad}
    return (settings, flags, options), varying, fixed


def _copies(tensors: Tensors) -> Tensors:
    return {name: value.clone() for name, value in tensors.items()}


def same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors hold the same numbers, names, types and places."""

    def same(a: Tensor, b: Tensor) -> bool:
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b)

    return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())


def _name_of(graph: Graph) -> str:
    """Another name for another function of the parameters: operations, their options, constants, buffers."""
    nodes = [(node.name, node.op, node.args, sorted(node.kwargs.items())) for node in graph.nodes]
    return hashlib.blake2b(
        f"{nodes}{graph.outputs}{_digest(graph.held.values())}".encode(), digest_size=8
    ).hexdigest()


def _digest_of(state: State) -> str:
    settings, varying, fixed = state
    text = f"{settings}{_digest(varying.values())}{_digest(fixed.values())}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()  # processors compute it themselves, twice as fast as others
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


__all__ = ["Fingerprint", "Watch", "same_tensors"]
