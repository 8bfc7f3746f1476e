"""A model as a function of one vector on a set of vectors, read from its modules and not from a captured graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.domains import Ball, ProductBall

Domain = Ball | ProductBall

# Rounding must not carry a point out of the set.
INSIDE = 1 - 2.0**-40


class ExactHardsigmoid(nn.Module):
    """What ``nn.Hardsigmoid`` is; the backward kernel of torch holds 1/6 in single precision."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(x + 3) / 6


def in_double(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy in double precision that computes the same function and keeps no statistics.

    Args:
        model: left alone.
        dtype: what it computes in.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:  # its default depends on the type
            module.eps = torch.finfo(dtype).eps
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm) and (
            module.training
        ):
            module.running_mean = module.running_var = module.num_batches_tracked = None
            module.track_running_stats = False
        for name, child in module.named_children():
            if isinstance(child, nn.Hardsigmoid):
                setattr(module, name, ExactHardsigmoid())
    return twin.double()


@dataclass(frozen=True, eq=False)
class Target:
    """The stacked outputs of a model as a function of its parameters or its input, on a domain.

    Attributes:
        model: in double precision.
        inputs: positional inputs, in double precision where they are real.
        names: the variables: paths of parameters, or positions of inputs.
        center: all variables at the centre in one vector.
        groups: positions in ``names`` that share a radius, with that radius.
        wrt: what varies.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    names: tuple[Any, ...]
    shapes: tuple[torch.Size, ...]
    center: Tensor
    groups: tuple[tuple[tuple[int, ...], float], ...]
    wrt: str

    @classmethod
    def of(cls, model: nn.Module, x: Any, domain: Domain, wrt: str = "params") -> Target:
        given = x if isinstance(x, tuple) else (x,)
        reals = [value.dtype for value in (*given, *model.parameters()) if value.is_floating_point()]
        twin = in_double(model, reals[0])
        inputs = tuple(value.double() if value.is_floating_point() else value for value in given)
        return cls.on(twin, inputs, domain, wrt)

    @classmethod
    def on(cls, twin: nn.Module, inputs: tuple[Tensor, ...], domain: Domain, wrt: str) -> Target:
        """The same, from a model and inputs that are in double precision already."""
        if wrt == "input":
            values: dict[Any, Tensor] = {k: v for k, v in enumerate(inputs) if v.is_floating_point()}
            owners = dict.fromkeys(values, "input")
        else:
            values = {path: p.detach() for path, p in twin.named_parameters() if p.requires_grad}
            owners = {path: path.rpartition(".")[0] for path in values}
        names = tuple(values)
        centers = [_center(domain, name, value) for name, value in values.items()]
        flat = torch.cat([c.reshape(-1) for c in centers])
        groups = _groups(domain, names, owners)
        return cls(twin, inputs, names, tuple(c.shape for c in centers), flat, groups, wrt)

    def split(self, point: Tensor) -> list[Tensor]:
        """The variables, in their order and shapes."""
        parts = point.split([shape.numel() for shape in self.shapes])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def __call__(self, point: Tensor) -> Tensor:
        values = dict(zip(self.names, self.split(point), strict=True))
        with sdpa_kernel(SDPBackend.MATH):
            if self.wrt == "input":
                output = self.model(*(values.get(k, value) for k, value in enumerate(self.inputs)))
            else:
                output = functional_call(self.model, values, self.inputs)
        outputs = output if isinstance(output, tuple | list) else (output,)
        return torch.cat([value.reshape(-1) for value in outputs])

    def value(self, point: Tensor) -> Tensor:
        with torch.no_grad():
            return self(point)

    def gradient(self, point: Tensor, w: Tensor) -> Tensor:
        """The gradient of ⟨w, f⟩."""
        leaf = point.detach().requires_grad_()
        output = self(leaf)
        if not output.requires_grad:
            return torch.zeros_like(point)
        (found,) = torch.autograd.grad(output, leaf, w, allow_unused=True)
        return torch.zeros_like(point) if found is None else found.detach()

    def bend(self, point: Tensor, w: Tensor, v: Tensor) -> Tensor:
        """The second derivative of ⟨w, f⟩ times v; zero where autograd knows of none."""
        leaf = point.detach().requires_grad_()
        output = self(leaf)
        if not output.requires_grad:
            return torch.zeros_like(point)
        (slope,) = torch.autograd.grad(output, leaf, w, create_graph=True, allow_unused=True)
        if slope is None or not slope.requires_grad:
            return torch.zeros_like(point)
        try:
            (found,) = torch.autograd.grad(slope, leaf, v, allow_unused=True)
        except RuntimeError as error:  # some backward kernels have no derivative of their own
            if "is not implemented" not in str(error):
                raise
            return torch.zeros_like(point)
        return torch.zeros_like(point) if found is None else found.detach()

    @property
    def radius(self) -> float:
        return max(radius for _, radius in self.groups)

    def farthest(self, direction: Tensor) -> Tensor:
        """The point of the set that is farthest in a direction: every group on its sphere."""
        return self.center + self.scaled(direction, INSIDE)

    def scaled(self, direction: Tensor, fraction: float) -> Tensor:
        """The direction with its part in every group a fraction of that group's radius long."""
        parts = list(direction.split([shape.numel() for shape in self.shapes]))
        for members, radius in self.groups:
            size = math.hypot(*(float(parts[k].norm()) for k in members))
            for k in members:
                parts[k] = parts[k] * (fraction * radius / size if size > 0 else 0.0)
        return torch.cat(parts)


def _center(domain: Domain, name: Any, present: Tensor) -> Tensor:
    if domain.center == "origin":
        return torch.zeros_like(present)
    if domain.center == "present":
        return present
    return domain.center[name].double()


def _groups(
    domain: Domain, names: Sequence[Any], owners: Mapping[Any, str]
) -> tuple[tuple[tuple[int, ...], float], ...]:
    if isinstance(domain, Ball):
        return ((tuple(range(len(names))), float(domain.radius)),)
    blocks: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        blocks.setdefault(owners[name], []).append(position)
    radii = domain.radius if isinstance(domain.radius, Mapping) else dict.fromkeys(blocks, domain.radius)
    return tuple((tuple(members), float(radii[path])) for path, members in blocks.items())
