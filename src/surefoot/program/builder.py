"""Writing a program node by node: shapes, constants and equal nodes are taken care of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from surefoot.program.ir import Node, Program
from surefoot.program.primitives import PRIMITIVES

_COMPARED = 2**16  # entries of a constant that is compared with others by value
_MOVES = {
    "reshape", "permute", "flip", "slice", "embed", "pad", "expand", "gather", "rows", "cat", "amax", "maximum",
    "sort",
}  # fmt: skip
"""Primitives that round nothing, whatever the entries are."""


class Builder:
    """A program under construction.

    Nodes are numbered from 0; ``emit`` returns the number of a node that computes what is asked for, which may be
    one that is there already.

    Args:
        program: what to go on from; its nodes keep their numbers.
        device: where constants that depend on no tensor are.

    >>> builder = Builder()
    >>> x = builder.input("x", (2, 3))
    >>> y = builder.emit("sum", builder.emit("mul", x, x), dims=(0, 1), keepdim=False)
    >>> program = builder.finish([y])
    >>> program.run({"x": torch.ones(2, 3)})[-1]
    tensor(6.)
    """

    def __init__(self, program: Program | None = None, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device) if program is None else program.device
        self.path, self.dtype = "", torch.float64  # of the nodes that are added next
        self.nodes: list[Node] = [*program.nodes] if program else []
        self.inputs: dict[str, int] = {**program.inputs} if program else {}
        self.parameters: list[str] = [*program.parameters] if program else []
        self.constants: dict[int, Tensor] = {**program.constants} if program else {}
        self._numbers: dict[Any, int] = {}
        for node in self.nodes:
            if node.primitive.kind not in ("input", "constant"):
                self._numbers.setdefault(_key(node.primitive.name, node.inputs, node.options), node.index)
            elif node.index in self.constants:
                self._numbers.setdefault(_identity(self.constants[node.index]), node.index)

    def shape(self, k: int) -> torch.Size:
        """The shape of a node."""
        return self.nodes[k].shape

    def input(
        self, name: str, shape: Iterable[int], dtype: torch.dtype = torch.float64, parameter: bool = False
    ) -> int:
        """Add an input."""
        self.inputs[name] = self._append("input", (), {}, torch.Size(shape), dtype)
        if parameter:
            self.parameters.append(name)
        return self.inputs[name]

    def constant(self, value: Tensor | float) -> int:
        """Add a constant; real ones are held in double precision."""
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dtype, value = value.dtype, value.detach()
        value = value.double() if value.is_floating_point() else value
        key = _identity(value)
        if key is not None and key in self._numbers:
            return self._numbers[key]
        k = self._append("constant", (), {}, value.shape, dtype)
        self.constants[k] = value
        if key is not None:
            self._numbers[key] = k
        return k

    def emit(self, name: str, *inputs: int, **options: Any) -> int:
        """Add a primitive, or give the node that computes the same already.

        Args:
            name: of the primitive.
            inputs: nodes.
            options: its static arguments; lists become tuples.

        Returns:
            The node of its result.
        """
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        name, inputs, options = self._simplified(name, inputs, options)
        if name == "same":
            return inputs[0]
        key = _key(name, inputs, options)
        if key in self._numbers:
            return self._numbers[key]
        fixed = bool(inputs) and all(k in self.constants for k in inputs)
        value = self._computed(name, inputs, options) if fixed else None
        if value is not None and self._is_exact(name, inputs, options):
            k = self.constant(value)
        else:
            shape = self._shape(name, inputs, options) if value is None else value.shape
            k = self._append(name, inputs, options, shape, self.dtype)
            if value is not None:
                self.constants[k] = value
        self._numbers[key] = k
        return k

    def finish(self, outputs: Iterable[int], costates: Mapping[int, int] | None = None) -> Program:
        """The program of these nodes and all that they need, its inputs included."""
        outputs, costates = tuple(outputs), dict(costates or {})
        needed = set(outputs) | set(self.inputs.values()) | set(costates) | set(costates.values())
        for node in reversed(self.nodes):
            if node.index in needed:
                needed.update(node.inputs)
        number = {k: place for place, k in enumerate(sorted(needed))}
        nodes = tuple(
            Node(
                number[n.index],
                n.primitive,
                tuple(number[k] for k in n.inputs),
                n.options,
                n.shape,
                n.dtype,
                n.path,
            )
            for n in (self.nodes[k] for k in number)
        )
        return Program(
            nodes,
            {name: number[k] for name, k in self.inputs.items()},
            tuple(self.parameters),
            {number[k]: value for k, value in self.constants.items() if k in number},
            tuple(number[k] for k in outputs),
            {number[k]: number[c] for k, c in costates.items()},
        )

    def _append(
        self, name: str, inputs: tuple[int, ...], options: dict[str, Any], shape: torch.Size, dtype: torch.dtype
    ) -> int:
        node = Node(len(self.nodes), PRIMITIVES[name], inputs, options, torch.Size(shape), dtype, self.path)
        self.nodes.append(node)
        return node.index

    def _shape(self, name: str, inputs: tuple[int, ...], options: dict[str, Any]) -> torch.Size:
        if name in ("add", "mul"):
            shapes = {self.nodes[k].shape for k in inputs}
            if len(shapes) > 1:
                raise ValueError(f"{name} of tensors of shapes {', '.join(str(tuple(s)) for s in shapes)}")
        if name in ("scalar", "scale", "add", "mul", "cumsum", "flip", "softmax", "softmax_back", "normalize"):
            return self.nodes[inputs[0]].shape
        kinds = tuple((self.nodes[k].shape, not self._is_real(k)) for k in inputs)
        return _shape_of(name, kinds, tuple(sorted(options.items())))

    def _is_real(self, k: int) -> bool:
        return k not in self.constants or self.constants[k].is_floating_point()

    def _computed(self, name: str, inputs: tuple[int, ...], options: dict[str, Any]) -> Tensor:
        values = [self.constants[k] for k in inputs]
        if any(value.is_meta for value in values):  # unknown entries make unknown ones
            values = [value.to("meta") for value in values]
        return PRIMITIVES[name].run(values, **options)

    def _is_exact(self, name: str, inputs: tuple[int, ...], options: dict[str, Any]) -> bool:
        """Whether a primitive of constants is computed without rounding."""
        if name in _MOVES or not all(map(self._is_real, inputs)):
            return True
        if name == "scale":
            return math.frexp(abs(options["factor"]))[0] == 0.5
        if name in ("sum", "scatter", "rows_back", "matmul", "add", "mul", "weigh", "cumsum"):
            values = [self.constants[k] for k in inputs]  # small integers, such as counts and masks
            small = [not v.is_meta and bool(((v == v.round()) & (v.abs() < 2**20)).all()) for v in values]
            return all(small) and max((v.numel() for v in values), default=0) < 2**12
        return False

    def _simplified(
        self, name: str, inputs: tuple[int, ...], options: dict[str, Any]
    ) -> tuple[str, tuple[int, ...], dict[str, Any]]:
        """The same in fewer or simpler primitives; the name ``same`` stands for the first input itself."""
        same: tuple[str, tuple[int, ...], dict[str, Any]] = ("same", inputs[:1], {})
        shape = self.nodes[inputs[0]].shape if inputs else torch.Size()
        operand = self.nodes[inputs[0]] if inputs else None
        match name:
            case "add":
                terms = tuple(k for k in inputs if not self.is_all(k, 0.0)) or inputs[:1]
                return (name, tuple(sorted(terms)) if len(terms) == 2 else terms, {}) if len(terms) > 1 else (
                    "same", terms, {})  # fmt: skip
            case "scale" if options["factor"] == 1:
                return same
            case "scale" if options["factor"] == 0:
                zero = torch.zeros((), dtype=torch.float64, device=self.device)
                return "same", (self.constant(zero.expand(shape)),), {}
            case "scale" if operand and operand.primitive.name == "scale":
                factors = options["factor"], operand.options["factor"]
                if any(math.frexp(abs(f))[0] == 0.5 for f in factors):  # by a power of two: nothing is rounded
                    return self._simplified("scale", operand.inputs, {"factor": math.prod(factors)})
            case "mul":
                left, right = sorted(inputs)
                if left in self.constants and right not in self.constants:
                    left, right = right, left
                if right in self.constants:
                    return self._simplified("weigh", (left, right), {})
                return name, (left, right), {}
            case "weigh" if self.is_all(inputs[1], 1.0):
                return same
            case "weigh" if self.nodes[inputs[1]].primitive.kind == "constant" and self.is_uniform(inputs[1]):
                factor = float(self.constants[inputs[1]].reshape(-1)[0])
                return self._simplified("scale", inputs[:1], {"factor": factor})
            case "reshape" | "expand" if tuple(shape) == tuple(options["shape"]):
                return same
            case "reshape" if operand and operand.primitive.name == "reshape":
                return self._simplified(name, operand.inputs, options)
            case "permute" if options["dims"] == tuple(range(len(shape))):
                return same
            case "permute" if operand and operand.primitive.name == "permute":
                dims = tuple(operand.options["dims"][d] for d in options["dims"])
                return self._simplified(name, operand.inputs, {"dims": dims})
            case "slice":
                size = shape[options["dim"]]
                if options["start"] == 0 and options["stop"] >= size and options["step"] == 1:
                    return same
            case "embed" if tuple(options["shape"]) == tuple(shape):
                return same
            case "sum" if not options["dims"]:
                return same
            case "pad" if not any(map(any, options["widths"])):
                return same
            case "cat" if len(inputs) == 1:
                return same
        return name, inputs, options

    def is_all(self, k: int, value: float) -> bool:
        """Whether all entries of a constant are this number."""
        return k in self.constants and self.is_uniform(k) and float(self.constants[k].reshape(-1)[0]) == value

    def is_uniform(self, k: int) -> bool:
        """Whether all entries of a constant are equal."""
        value = self.constants[k]
        return not value.is_meta and value.numel() > 0 and bool((value == value.reshape(-1)[0]).all())


def _key(name: str, inputs: tuple[int, ...], options: Mapping[str, Any]) -> Any:
    return name, inputs, tuple(sorted(options.items()))


def _identity(value: Tensor) -> Any:
    """What a constant is compared by, None if it is too large to be."""
    if value.is_meta or value.numel() > _COMPARED:
        return None
    data = value.detach().cpu().numpy().tobytes()
    return "constant", value.shape, value.dtype, value.device, data


@lru_cache(maxsize=2**14)
def _shape_of(name: str, kinds: tuple[tuple[torch.Size, bool], ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """The shape of what a primitive returns for tensors of these shapes, real or of integers."""
    empty = [
        torch.empty(shape, dtype=torch.int64 if integer else torch.float64, device="meta")
        for shape, integer in kinds
    ]
    return PRIMITIVES[name].run(empty, **dict(options)).shape
