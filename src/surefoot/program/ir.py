"""The list of tensors that a function consists of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from surefoot.program.primitives import Primitive


@dataclass(frozen=True, eq=False)
class Node:
    """One tensor of a program: a primitive applied to earlier tensors.

    Attributes:
        index: its place in ``Program.nodes``.
        primitive: what computes it; inputs and constants are primitives too.
        inputs: the indices of the nodes that it is computed from.
        options: static arguments of the primitive by name, all hashable.
        shape: its shape.
        dtype: the element type in which the model computes it.
        path: the path of the module that computes it, ``"objective"`` for that.
    """

    index: int
    primitive: Primitive
    inputs: tuple[int, ...]
    options: dict[str, Any]
    shape: torch.Size
    dtype: torch.dtype
    path: str = ""

    def __str__(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self.options.items())
        operands = ", ".join(f"%{k}" for k in self.inputs)
        return f"%{self.index}: {tuple(self.shape)} = {self.primitive.name}({operands}{options})"


@dataclass(frozen=True, eq=False)
class Program:
    """Tensors in the order in which they are computed.

    Attributes:
        nodes: the tensors.
        inputs: the node of each input by name: weights by their own names (tied ones once), data as ``x``, or
            ``x.0``, ``x.1``, … or by keyword.
        parameters: the inputs that are weights.
        constants: the values, in double precision if real, of all nodes that depend on no input. Those that are
            computed without rounding are nodes of the primitive ``constant``; others keep their operation, so
            that whoever counts rounding errors sees it, and have their value listed beside it.
        outputs: the nodes that are results: ``(value,)``, or ``(value, gradient of the first parameter, …)``.
        costates: of a differentiated program, the node that is the derivative of the value in a node.
    """

    nodes: tuple[Node, ...]
    inputs: dict[str, int]
    parameters: tuple[str, ...]
    constants: dict[int, Tensor]
    outputs: tuple[int, ...]
    costates: dict[int, int] = field(default_factory=dict)

    def run(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the tensors of all nodes, in the element type of the values.

        Args:
            values: a tensor for each input.

        Returns:
            One tensor per node.
        """
        like = next(iter(values.values()), torch.empty(0, dtype=torch.float64))
        dtype, device = like.dtype, like.device
        names = {index: name for name, index in self.inputs.items()}
        tensors: list[Tensor] = []
        for node in self.nodes:
            if node.index in names:
                tensors.append(values[names[node.index]])
            elif node.primitive.kind == "constant":
                constant = self.constants[node.index]
                tensors.append(constant.to(device, dtype if constant.is_floating_point() else constant.dtype))
            else:
                tensors.append(node.primitive.run([tensors[k] for k in node.inputs], **node.options))
        return tensors

    def results(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Compute the outputs only, from the same arguments as :meth:`run`."""
        tensors = self.run(values)
        return [tensors[k] for k in self.outputs]

    @property
    def device(self) -> torch.device:
        """Where its constants are; the CPU if it has none."""
        return next((value.device for value in self.constants.values() if not value.is_meta), torch.device("cpu"))

    def users(self) -> list[list[int]]:
        """The nodes that read each node."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for k in dict.fromkeys(node.inputs):
                readers[k].append(node.index)
        return readers

    def depends(self, names: Iterable[str]) -> list[bool]:
        """Which nodes depend on any of these inputs."""
        sources = {self.inputs[name] for name in names}
        dependent: list[bool] = []
        for node in self.nodes:
            dependent.append(node.index in sources or any(dependent[k] for k in node.inputs))
        return dependent

    def __str__(self) -> str:
        return "\n".join(map(str, self.nodes)) + f"\nreturn {', '.join(f'%{k}' for k in self.outputs)}"
