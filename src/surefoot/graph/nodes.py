"""The parts of a graph: tensors from outside, operations on them and how these are run, parameter blocks."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from surefoot.enclosure import Spec
from surefoot.torch_private import FORMULAS, schema_of

PREFIX = "model"  # the name under which the traced module holds the user's
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph, by name, in the arguments of a node.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> graph.nodes[0].args[0]
    Ref(name='args_0')
    """

    name: str


class Source(Enum):
    """Where the value of a leaf comes from.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> graph.parameters[0].source
    <Source.PARAMETER: 'parameter'>
    """

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

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> [leaf.path for leaf in graph.parameters]
    ['weight', 'bias']
    """

    name: str  # its name in the graph
    path: str  # its name in the model: ``features.0.weight``
    source: Source  # where it comes from. A parameter that asks for no gradient is frozen: it does not vary.
    spec: Spec  # its shape and type

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

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> graph.nodes[0].op, graph.nodes[0].module, str(graph.nodes[0].spec)
    ('aten.linear', '', '5×3')
    """

    name: str  # the name of its result
    op: str  # the operation without its overload: ``aten.conv2d``
    target: Callable[..., Any]  # the function that computes it
    args: tuple[Any, ...]  # positional arguments, with :class:`Ref` in place of tensors
    kwargs: Mapping[str, Any]  # keyword arguments, likewise
    module: str  # path of the module that called it; ``""`` is the model itself
    spec: Spec | tuple[Spec, ...]  # shape and type of the result, a tuple of them if there are several

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
            default = argument.default_value if argument.has_default_value() else None
            given = position < len(self.args)
            bound[argument.name] = self.args[position] if given else self.kwargs.get(argument.name, default)
        return bound

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of its results, one or several."""
        return self.spec if isinstance(self.spec, tuple) else (self.spec,)

    @property
    def numel(self) -> int:
        """How many numbers the result holds."""
        return sum(spec.numel for spec in self.specs)

    @property
    def is_real(self) -> bool:
        """Whether all its results hold real numbers."""
        return all(spec.dtype.is_floating_point for spec in self.specs)

    def run(self, values: Mapping[str, Any]) -> Any:
        """Compute it from the values of its inputs."""
        args, kwargs = self._with_refs(lambda ref: values[ref.name])
        own = schema_of(self.target) is None  # a formula that took the place of the kernel
        return (self.target if own else FORMULAS.get(self.op, self.target))(*args, **kwargs)

    def by(self, target: Any, **changes: Any) -> Node:
        """The same computed by another operation of torch."""
        return replace(self, op=str(target.overloadpacket), target=target, **changes)

    def renamed(self, names: Mapping[str, str], **changes: Any) -> Node:
        """The same with other names of the tensors it reads; a name that is not in the mapping stays."""
        args, kwargs = self._with_refs(lambda ref: Ref(names.get(ref.name, ref.name)))
        return replace(self, args=args, kwargs=kwargs, **changes)

    def _with_refs(self, change: Callable[[Ref], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every reference replaced."""
        args = tuple(_mapped(argument, change) for argument in self.args)
        return args, {key: _mapped(argument, change) for key, argument in self.kwargs.items()}


def roles_of(leaves: Mapping[str, Leaf], nodes: Iterable[Node]) -> dict[str, Role]:
    """What each tensor depends on."""
    roles = {name: leaf.role for name, leaf in leaves.items()}
    for node in nodes:
        roles[node.name] = functools.reduce(operator.or_, (roles[name] for name in node.inputs), Role.CONSTANT)
    return roles


@dataclass(frozen=True)
class Block:
    """What one module directly owns: weight and bias together, the paper's :math:`u_t`.

    >>> graph = sf.Chain(nn.Linear(4, 3), torch.ones(5, 4)).graph
    >>> graph.blocks
    {'': Block(path='', parameters=('p_model_weight', 'p_model_bias'))}
    """

    path: str  # path of the owning module
    parameters: tuple[str, ...]  # names of its leaves in the graph


def _refs(argument: Any) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, Mapping | list | tuple):
        for item in argument.values() if isinstance(argument, Mapping) else argument:
            yield from _refs(item)


def _mapped(argument: Any, change: Callable[[Ref], Any]) -> Any:
    if isinstance(argument, Ref):
        return change(argument)
    if isinstance(argument, list | tuple):
        return type(argument)(_mapped(item, change) for item in argument)
    return argument


def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except ValueError:  # builtins such as operator.getitem
        return ("self", "index")


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that called the operation; ``""`` is the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path).removeprefix(PREFIX).removeprefix(".")


def operation(target: Any) -> str:
    """``aten.conv2d`` for ``aten.conv2d.default``; the plain name of a Python function."""
    packet = getattr(target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(target, "__name__", str(target))


def fresh(name: str, taken: set[str]) -> str:
    """The name, with a number behind it if it is taken; it is taken from now on.

    >>> fresh("linear", {"linear"})
    'linear_1'
    """
    candidate, k = name, 1
    while candidate in taken:
        candidate, k = f"{name}_{k}", k + 1
    taken.add(candidate)
    return candidate


def run_widened(node: Node, values: Mapping[str, Any], formula: Callable[..., Any] | None = None) -> Any:
    """The operation on these values in double precision, by its kernel or by a formula of the same signature."""
    wide = widened(node, formula)
    with double_by_default():
        value = wide.run(values)
    return in_double(value) if isinstance(value, Tensor) else tuple(map(in_double, value))


def widened(node: Node, formula: Callable[..., Any] | None = None) -> Node:
    """The operation for arguments in double precision, by its kernel or by a formula of the same signature.

    Casts to a narrower type are the identity in real arithmetic. What a model makes on the meta device from
    numbers alone is made where it has entries.
    """
    args = tuple(_widened(argument) for argument in node.args)
    kwargs = {key: _widened(argument, key) for key, argument in node.kwargs.items()}
    return replace(node, target=node.target if formula is None else formula, args=args, kwargs=kwargs)


def in_double(value: Tensor) -> Tensor:
    """Real numbers in double precision; integers and truth values as they are."""
    kind = value.dtype
    return value if kind is torch.float64 or not kind.is_floating_point else value.to(torch.float64)


@contextmanager
def double_by_default() -> Iterator[None]:
    """Whole numbers times 0.1 are of the default type: double precision here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _widened(argument: Any, key: str = "") -> Any:
    if isinstance(argument, torch.dtype) and argument in _NARROW:
        return torch.float64
    if key == "device" and argument is not None and torch.device(argument).type == "meta":
        return torch.device("cpu")
    return argument
