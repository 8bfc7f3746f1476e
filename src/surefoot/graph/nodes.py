"""The parts of a graph: tensors that come from outside, operations on them, parameter blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cached_property
from typing import Any

from surefoot.spec import Spec
from surefoot.torch_private import schema_of


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph, by name, in the arguments of a node."""

    name: str


class Source(Enum):
    """Where the value of a leaf comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    FROZEN = "frozen parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    TARGET = "target of the objective"


class Role(Flag):
    """What the value of a tensor depends on: nothing, the parameters, the input, or both."""

    CONSTANT = 0
    PARAMETERS = auto()
    INPUT = auto()


@dataclass(frozen=True)
class Leaf:
    """A tensor that comes from outside: an input, a parameter, a buffer or a constant.

    Attributes:
        name: its name in the graph.
        path: its name in the model: ``features.0.weight``.
        source: where it comes from. A parameter that asks for no gradient is frozen: it does not vary.
        spec: its shape and type.
    """

    name: str
    path: str
    source: Source
    spec: Spec

    @property
    def trainable(self) -> bool:
        """Whether it is a parameter that asks for gradients."""
        return self.source is Source.PARAMETER

    @property
    def role(self) -> Role:
        """What it depends on: itself, if it varies."""
        return _ROLE_OF.get(self.source, Role.CONSTANT)


_ROLE_OF = {Source.INPUT: Role.INPUT, Source.PARAMETER: Role.PARAMETERS}


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        name: the name of its result.
        op: the operation without its overload: ``aten.conv2d``.
        target: the function that computes it.
        args: positional arguments, with :class:`Ref` in place of tensors.
        kwargs: keyword arguments, likewise.
        module: path of the module that called it; ``""`` is the model itself.
        spec: shape and type of the result, a tuple of them if there are several.
    """

    name: str
    op: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str
    spec: Spec | tuple[Spec, ...]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors it reads, each once, in order of appearance."""
        names = [ref.name for ref in _refs((self.args, dict(self.kwargs)))]
        return tuple(dict.fromkeys(names))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the name the operation's signature gives them, defaults filled in."""
        schema = schema_of(self.target)
        if schema is None:
            return {**dict(zip(_parameter_names(self.target), self.args, strict=False)), **self.kwargs}
        bound: dict[str, Any] = {}
        for position, argument in enumerate(schema.arguments):
            if position < len(self.args):
                bound[argument.name] = self.args[position]
            elif argument.name in self.kwargs:
                bound[argument.name] = self.kwargs[argument.name]
            else:
                bound[argument.name] = argument.default_value if argument.has_default_value() else None
        return bound

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of its results, one or several."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,)

    @property
    def numel(self) -> int:
        """How many numbers the result holds."""
        return sum(spec.numel for spec in self.specs)

    def run(self, values: Mapping[str, Any]) -> Any:
        """Compute it from the values of its inputs."""
        args = [_fill(argument, values) for argument in self.args]
        kwargs = {key: _fill(argument, values) for key, argument in self.kwargs.items()}
        return self.target(*args, **kwargs)


@dataclass(frozen=True)
class Block:
    """What one module directly owns: weight and bias together, the paper's :math:`u_t`.

    Attributes:
        path: path of the owning module.
        parameters: names of its leaves in the graph.
    """

    path: str
    parameters: tuple[str, ...]


def renamed(argument: Any, names: Mapping[str, str]) -> Any:
    """An argument of a node with its tensors renamed; a name that is not in the mapping stays."""
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    if isinstance(argument, list | tuple):
        return type(argument)(renamed(item, names) for item in argument)
    return argument


def _refs(argument: Any) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from _refs(item)
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _refs(item)


def _fill(argument: Any, values: Mapping[str, Any]) -> Any:
    """The argument with references replaced by values."""
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, list | tuple):
        return type(argument)(_fill(item, values) for item in argument)
    return argument


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # builtins such as operator.getitem
        return ("self", "index")
