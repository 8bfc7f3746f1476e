"""A model on a batch, or an objective of it, as a function of its parameters or of its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.bounds.size import Sizes, forward, leaves
from surefoot.bounds.tensor_size import Size, unknown, within
from surefoot.domains import Box, Domain, DomainError, ProductBall, Region
from surefoot.magnitude import Magnitude
from surefoot.program import Program, differentiate
from surefoot.program.capturing import capture, values_of

Wrt = Literal["params", "input"]
_FACTS = ("nonnegative", "convex", "quadratic")


@dataclass(frozen=True, eq=False)
class Function:
    """What is certified: a program, the values of its inputs, and which of them vary.

    Attributes:
        program: the value: all outputs of the model, or one number.
        values: of the parameters and of the input, by name, as they were when the model was read.
        blocks: the names of what varies, by block.
        wrt: whether these are the parameters or the input.
        nonnegative: whether the value is known to be no less than 0.
        convex: whether it is a convex function of the outputs.
        quadratic: whether that function has a constant second derivative.
        parts: of a convex loss of outputs, gives the outputs as a function of the parameters and the loss as one
            of the outputs.
    """

    program: Program
    values: Mapping[str, Tensor]
    blocks: Mapping[str, tuple[str, ...]]
    wrt: Wrt = "params"
    nonnegative: bool = False
    convex: bool = False
    quadratic: bool = False
    parts: Callable[[], tuple[Function, Function]] | None = None

    @classmethod
    def of(cls, model: nn.Module, x: Any, objective: nn.Module | None = None, wrt: Wrt = "params") -> Function:
        """Read a model; see :func:`surefoot.program.capturing.capture`.

        Raises:
            CaptureError: if it cannot be read.
            DomainError: if nothing varies.
        """
        program = capture(model, x, objective)
        values = values_of(program, model, x)
        facts: dict[str, Any] = {name: bool(getattr(objective, name, False)) for name in _FACTS}
        copies = {name: value.detach().clone() for name, value in values.items()}
        if objective is not None and facts["convex"] and wrt == "params":
            facts["parts"] = lambda: cls._parts(model, x, objective)
        return cls(program, copies, blocks_of(program, model, values, wrt), wrt, **facts)

    @classmethod
    def _parts(cls, model: nn.Module, x: Any, objective: nn.Module) -> tuple[Function, Function]:
        network = cls.of(model, x)
        (output,) = network.program.outputs
        like = torch.zeros(network.program.nodes[output].shape, dtype=torch.float64)
        return network, cls.of(objective, like, wrt="input")

    @property
    def is_scalar(self) -> bool:
        """Whether the value is one number."""
        return len(self.program.outputs) == 1 and self.program.nodes[self.program.outputs[0]].shape.numel() == 1

    @property
    def has_values(self) -> bool:
        """Whether all values are at hand; on the meta device there are none."""
        return not any(value.is_meta for value in self.values.values())

    @cached_property
    def variables(self) -> tuple[str, ...]:
        return tuple(name for names in self.blocks.values() for name in names)

    @cached_property
    def gradient_program(self) -> Program:
        """Value and gradient in what varies."""
        return differentiate(self.program, self.variables)

    def over(self, domain: Domain, input_norm: float | None = None) -> Sizes:
        """Sizes of all tensors over a domain; of an objective, those of its gradient program.

        Raises:
            DomainError: if the domain does not fit.
        """
        region = Region.of(domain, self.blocks)
        program = self.gradient_program if self.is_scalar else self.program
        centres = {name: _centre(name, self.values[name], domain.center) for name in region.variables}
        none = Magnitude.zero((len(region.variables),))
        fixed: dict[str, Tensor | Size] = {}
        for name in program.inputs:
            if name in region.radii:
                continue
            if name not in program.parameters and input_norm is not None:
                fixed[name] = _of_norm(self.values[name], input_norm, none)
            elif self.values[name].is_meta:
                fixed[name] = _without_values(self.values[name], none, name in program.parameters)
            else:
                fixed[name] = self.values[name]
        return forward(program, region, leaves(program, region, centres, fixed))

    def from_size(self, size: Size) -> Sizes:
        """Sizes of all tensors of the gradient program from that of the one input."""
        (name,) = self.variables
        everywhere = Region((name,), (((0,), math.inf),), {"input": (0,)})
        return forward(
            self.gradient_program, everywhere, leaves(self.gradient_program, everywhere, {name: size}, {})
        )

    def balls_around(self, box: Box) -> ProductBall:
        """The balls that contain a box, one per block."""
        return box.around(self.blocks, {name: tuple(self.values[name].shape) for name in self.variables})

    def holds_present(self, domain: Domain | Box) -> bool | None:
        """Whether the present values of what varies lie in a domain; ``None`` if there are none.

        Distances are rounded by a few units, and so is the answer.
        """
        if not self.has_values:
            return None
        if isinstance(domain, Box):
            return all(domain.contains(name, self.values[name]) for name in self.variables)
        if domain.center == "present":
            return True
        region = Region.of(domain, self.blocks)
        away = []
        for name in region.variables:
            present, centre = self.values[name], _centre(name, self.values[name], domain.center)
            assert centre is not None
            away.append(float(torch.linalg.vector_norm(present.double() - centre)))
        return all(
            math.hypot(*(away[k] for k in members)) <= radius * (1 + 1e-12) for members, radius in region.groups
        )


def blocks_of(
    program: Program, model: nn.Module, values: Mapping[str, Tensor], wrt: Wrt
) -> dict[str, tuple[str, ...]]:
    """The names of what varies by the module that owns it, in order of first use; the input is a block of its own.

    Raises:
        DomainError: if nothing varies.
    """
    if wrt == "input":
        names = [name for name in program.inputs if name not in program.parameters]
        real = tuple(name for name in names if values[name].is_floating_point())
        if not real:
            raise DomainError("the input is made of integers: there is no derivative with respect to it")
        return {"input": real}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    users, blocks = program.users(), dict[str, list[str]]()
    first = {name: min(users[program.inputs[name]], default=len(users)) for name in program.parameters}
    for name in sorted(program.parameters, key=lambda name: first[name]):
        if name in trained:
            blocks.setdefault(name.rpartition(".")[0], []).append(name)
    if not blocks:
        raise DomainError("no parameter asks for gradients: nothing varies. Call model.requires_grad_(True)")
    return {path: tuple(names) for path, names in blocks.items()}


def _centre(name: str, present: Tensor, center: Any) -> Tensor | None:
    """The centre of a variable in double precision; ``None`` for the origin on the meta device."""
    if center == "origin":
        return None if present.is_meta else torch.zeros_like(present, dtype=torch.float64)
    if center == "present":
        if present.is_meta:
            raise DomainError(
                f"'{name}' is on the meta device and has no value to be the centre: use ProductBall(radius), "
                "whose centre is the origin"
            )
        return present.detach().double()
    if name not in center:
        raise DomainError(f"the centre has no entry for '{name}'")
    value: Tensor = center[name]
    if value.shape != present.shape:
        raise DomainError(f"the centre of '{name}' has shape {tuple(value.shape)}, not {tuple(present.shape)}")
    return value.detach().to(device="cpu" if present.is_meta else present.device, dtype=torch.float64)


def _of_norm(value: Tensor, norm: float, lipschitz: Magnitude) -> Size:
    """The size of an input of which only a bound on its norm is used."""
    return within(value.shape, Magnitude.of(float(norm)), lipschitz)


def _without_values(value: Tensor, lipschitz: Magnitude, parameter: bool) -> Size:
    if parameter:
        return unknown(value.shape, lipschitz)
    raise DomainError(
        "the input is on the meta device and has no norm: pass input_norm, a bound on the norm of the stacked "
        "batch"
    )
