"""What is the same as at the last step: the data, the weights, the function."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph import Graph, Source
from surefoot.graph.guard import Guard
from surefoot.program.checks import as_inputs, as_targets
from surefoot.torch_private import writes_of

Tensors = dict[str, Tensor]
State = tuple[Any, Tensors, Tensors]
_REBUILT = 4  # guards in a row that were of no use; then no more are made


class Fingerprint:
    """Names batches by their content.

    The very tensors of the last call are compared with copies, which is faster than to name them again. How often
    they were written to would not do: torch does not count what is written through ``.data``, or by numpy into
    memory that both share.

    >>> name = Fingerprint()
    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    >>> name(x, y) == name(x.clone(), y.clone()), name(x, y) == name(x + 1, y)
    (True, False)
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, ...] = ()
        self._copies: tuple[Tensor, ...] = ()
        self._name = ""

    def __call__(self, x: Any, y: Any = None) -> str:
        """The fingerprint: 16 hexadecimal digits."""
        args, kwargs = as_inputs(x)
        tensors = (*args, *kwargs.values(), *(() if y is None else (as_targets(y),)))
        if not _identical(tensors, self._seen) or not all(map(torch.equal, tensors, self._copies)):
            self._name, self._seen = _digest(tensors), tensors
            self._copies = tuple(tensor.detach().clone() for tensor in tensors)
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
        self._written: Tensors | None = None  # what a step wrote into parameters, and nobody changes
        self._digest: str | None = None  # of the same, where a run is resumed
        self._seen: tuple[str, Graph, str] | None = None  # the kind of input, its graph, the name of the function
        self._inputs: tuple[tuple[Tensor, ...], tuple[int, ...] | None] = ((), None)  # of that graph, and writes
        self._buffers: Tensors = {}  # that the graph reads, as they were
        self._functions: dict[str, str] = {}  # by kind of input
        self._guard: Guard | None = None
        self._failures = 0
        self.parameters: dict[
            str, nn.Parameter
        ] = {}  # of the model, as objects, at the last look that was not quick
        self.buffers: list[Tensor] = []  # likewise

    def undisturbed(self, options: str) -> bool:
        """Whether a quick look finds the model and the options as the last step left them."""
        if self._guard is None or self._left is None or options != self._left[0][-1]:
            return False
        _, varying, fixed = self._left
        return (
            self._guard.holds()
            and all(torch.equal(self.parameters[name], kept) for name, kept in (*varying.items(), *fixed.items()))
            and same_tensors(self._held(), self._buffers)
        )

    def guard(self, model: nn.Module) -> None:
        """Prepare for a quick look at the next step, which is about the model as it is now."""
        self._failures += 1
        self._guard = Guard(model) if self._failures <= _REBUILT else None
        self.parameters, self.buffers = dict(model.named_parameters()), list(model.buffers())

    def unguard(self) -> None:
        """No quick look at the next step."""
        self._guard = None

    @property
    def weights(self) -> Tensors:
        """All parameters as the last step left them."""
        assert self._left is not None
        return {**self._left[1], **self._left[2]}

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

    def same_graph(self, x: Any) -> Graph | None:
        """The graph of the last step, if its inputs were these very tensors, unchanged."""
        args, kwargs = as_inputs(x)
        tensors, (seen, versions) = (*args, *kwargs.values()), self._inputs
        same = versions is not None and _identical(tensors, seen) and _writes(tensors) == versions
        return self._seen[1] if same and self._seen is not None else None

    def other_graph(self, x: Any, graph: Graph) -> bool:
        """Whether the model computes another function of such inputs than at the last step that saw such ones."""
        args, kwargs = as_inputs(x)
        kind = str([(key, tuple(v.shape), v.dtype) for key, v in (*enumerate(args), *kwargs.items())])
        tensors = (*args, *kwargs.values())
        self._inputs = tensors, _writes(tensors)
        if self._seen is None or self._seen[1] is not graph:
            self._seen = kind, graph, _name_of(graph)
        return self._functions.get(kind, self._seen[2]) != self._seen[2]

    def written(self, values: Tensors) -> None:
        """A step wrote these values, of the types of the parameters, which are theirs alone."""
        self._written = values

    def leave(self, model: nn.Module, anew: bool, options: str = "", *, quiet: bool = False) -> None:
        """Remember the model and the options of its objective.

        Args:
            model: the model.
            anew: whether the function is not the one before.
            options: of the objective.
            quiet: whether a quick look found all undisturbed before the step.
        """
        if anew:
            self._functions = {}
        if self._seen is not None:
            kind, graph, name = self._seen
            self._seen = kind, graph, _name_of(graph) if anew else name
            self._functions[kind] = self._seen[2]
        if quiet and self._left is not None:
            settings, moving, rest = self._left
            if self._written is None:
                self._written = _copies({name: self.parameters[name].detach() for name in moving})
            self._left, self._failures = (settings, {**moving, **self._written}, rest), 0
        else:
            settings, moving, rest = _state(model, options)
            self._left = settings, _copies(moving), _copies(rest)
        self._written = None
        self._buffers = _copies(self._held())

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        digest = self._digest
        if self._left is not None:
            digest = _digest_of(self._left)
        return {"left": digest, "functions": dict(self._functions)}

    def load(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self._left, self._seen, self._buffers, self._guard = None, None, {}, None
        self._digest, self._functions = state["left"], dict(state["functions"])

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the graph."""
        rest: dict[str, Any] = {"_seen": None, "_buffers": {}, "_guard": None, "_inputs": ((), None)}
        rest |= {"parameters": {}, "buffers": []}
        return {**self.__dict__, **rest}

    def _held(self) -> Tensors:
        if self._seen is None:
            return {}
        graph = self._seen[1]
        return {name: v.detach() for name, v in graph.held.items() if graph.leaves[name].source is Source.BUFFER}


def _writes(tensors: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    """How often each was written to; ``None`` if one does not count that."""
    return None if any(tensor.is_inference() for tensor in tensors) else tuple(map(writes_of, tensors))


def _identical(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


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
