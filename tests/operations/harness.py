r"""Attacks on single rules.

:func:`study` encloses the real arguments of a :class:`~rules.case.Case` in one of several ways, runs the calculus,
and looks for points of the enclosures where something exceeds what a rule claims: norms of Jacobian blocks, of
blocks of second derivatives, values, distances from the centre, whole and row by row. What it finds is returned
as ratios attained/claimed, so that tightness can be asked for as well.

Derivatives are dense, in double precision, by automatic differentiation; the search is by conditional gradients,
which only have to be good enough to come near the extremes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import surefoot.operations.captured  # noqa: F401  registers the rules
from operations.case import Case
from operations.derivatives import gradients, jacobian, second_derivative, spectral, tensor_norm
from surefoot.calculus.forward import Pass, Step, forward
from surefoot.domains import Region
from surefoot.enclosure import Enclosure, constant, largest, norm
from surefoot.graph.nodes import Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.operations import Bounds

RADII = {"point": 0.0, "small": 0.03, "large": 1.5, "rows": 0.4, "mixed": 0.2}
SETTINGS = ("point", "small", "large", "rows", "unknown", "mixed")
_EVALUATION = 1e-9  # what automatic differentiation in double precision is trusted with


@dataclass(frozen=True)
class Enclosed:
    """One variable: a ball around its centre, or around zero and cut off at a largest entry when it has none."""

    centre: Tensor
    radius: float
    rows: Tensor | None = None
    peak: float = math.inf

    def farthest(self, direction: Tensor) -> Tensor:
        """A point of the set, as far in a direction as is easily found."""
        if not bool(direction.any()) or not bool(direction.isfinite().all()) or self.radius == 0:
            return self.centre
        if self.rows is None:
            step = direction * (self.radius / float(direction.norm()))
        else:
            flat = direction.reshape(direction.shape[0], -1)
            sizes = flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
            step = (flat / sizes * self.rows[:, None] * (flat.norm(dim=1, keepdim=True) > 0)).reshape(
                direction.shape
            )
            step = step * min(1.0, self.radius / max(float(step.norm()), 1e-300))
        return (self.centre + step).clamp(-self.peak, self.peak)


@dataclass
class Study:
    """What was found: the largest ratio attained/claimed by operation and quantity."""

    ratios: dict[tuple[str, str], float] = field(default_factory=dict)
    claims: dict[tuple[str, str], float] = field(default_factory=dict)

    def meet(self, op: str, what: str, attained: float, claimed: float, note: str) -> None:
        attained = max(0.0, attained)
        assert not math.isnan(claimed), f"{op} {what}: claims NaN ({note})"
        assert attained <= claimed * (1 + _EVALUATION) + 1e-13, (
            f"{op} {what}: {attained:.12g} is attained, {claimed:.12g} is claimed ({note})"
        )
        ratio = 1.0 if claimed == 0 else attained / claimed
        self.ratios[op, what] = max(self.ratios.get((op, what), 0.0), ratio)
        self.claims[op, what] = max(self.claims.get((op, what), 0.0), claimed)


def enclose(
    case: Case, setting: str | float, generator: torch.Generator
) -> tuple[dict[str, Enclosed], dict[str, Enclosure], Region]:
    """The variables in one of the settings, or in balls of a radius, as sets and as the calculus sees them."""
    sets: dict[str, Enclosed] = {}
    leaves: dict[str, Enclosure] = {}
    count = len(case.variables)
    for name, value in case.values.items():
        if name not in case.variables:
            leaves[name] = constant(value, count)
            continue
        position = case.variables.index(name)
        unit = Magnitude.of(np.eye(count)[position])
        spec = case.graph.leaves[name].spec
        if setting == "unknown" or (setting == "mixed" and position == count - 1):
            bound = Magnitude.of(float(value.double().norm()) * 1.25 + 0.25)
            peak = bound if torch.rand((), generator=generator) < 0.5 else bound * 0.5
            infinite = Magnitude.infinity()
            leaves[name] = Enclosure(spec, None, bound, peak, infinite, None, infinite, unit)
            sets[name] = Enclosed(torch.zeros(value.shape, dtype=torch.float64), float(bound), None, float(peak))
            continue
        number = value.double()
        radius = RADII[setting] if isinstance(setting, str) else setting
        rows = None
        if setting == "rows" and number.dim() and number.numel():
            rows = radius * torch.rand(number.shape[0], generator=generator, dtype=torch.float64)
        spread = Magnitude.of(radius)
        leaves[name] = Enclosure(
            spec,
            number,
            norm(number) + spread,
            largest(number) + spread,
            spread,
            None if rows is None else Magnitude.of(rows),
            Magnitude.zero(),
            unit,
        )
        sets[name] = Enclosed(number, radius, rows)
    groups = tuple(((k,), sets[name].radius) for k, name in enumerate(case.variables))
    return sets, leaves, Region(case.variables, groups)


def study(case: Case, setting: str, *, seed: int = 0, starts: int = 2, thorough: bool = False) -> Study:
    """Attack every operation of a case in a setting; curvatures at one point of some settings, unless thorough."""
    generator = torch.Generator().manual_seed(seed)
    found = Study()
    sets, result = enclosed(case, setting, generator)
    attack = _Attack(case, result, sets, setting, found, generator)
    for start in range(starts if setting != "point" else 1):
        curved = setting == "point" or (start == 1 and setting in ("large", "unknown"))
        attack.from_point(attack.random_point(start), curved or thorough)
    attack.compare()
    return found


def enclosed(
    case: Case, setting: str | float, generator: torch.Generator | None = None
) -> tuple[dict[str, Enclosed], Pass]:
    """The forward pass of a case in a setting, with the centres of all tensors kept."""
    sets, leaves, region = enclose(case, setting, generator or torch.Generator().manual_seed(0))
    everything = replace(case.graph, outputs=tuple(node.name for node in case.graph.nodes))
    return sets, forward(everything, leaves, region)


def claims(case: Case, setting: str | float) -> Bounds:
    """What the rule of the last operation claims."""
    return enclosed(case, setting)[1].steps[-1].bounds


class _Attack:
    def __init__(
        self,
        case: Case,
        result: Pass,
        sets: Mapping[str, Enclosed],
        setting: str,
        found: Study,
        generator: torch.Generator,
    ) -> None:
        self.case, self.result, self.sets, self.setting = case, result, sets, setting
        self.found, self.generator = found, generator
        self.jacobians: dict[str, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {}
        self.single = len(result.steps) == 1

    def random_point(self, start: int) -> dict[str, Tensor]:
        """The centre first, then dense and sparse directions to the boundary, then inside."""
        point = {}
        for name, enclosed in self.sets.items():
            direction = torch.randn(enclosed.centre.shape, generator=self.generator, dtype=torch.float64)
            if start % 3 == 2:
                direction = direction * (torch.rand(direction.shape, generator=self.generator) < 0.3)
            share = (0.0, 1.0, 1.0, 0.5)[start % 4]
            point[name] = enclosed.centre + share * (enclosed.farthest(direction) - enclosed.centre)
        return point

    def values(self, point: Mapping[str, Tensor]) -> dict[str, Any]:
        values: dict[str, Any] = {
            n: v.double() if v.is_floating_point() else v for n, v in self.case.values.items()
        }
        values |= point
        for node in self.case.graph.nodes:
            values[node.name] = node.run(values)
        return values

    def from_point(self, point: dict[str, Tensor], curved: bool) -> None:
        """Measure everything at a point, and from there climb each quantity in turn."""
        self.measure_values(point)
        for step in self.result.steps:
            self.measure(step, point, curved)
        if self.single and self.setting != "point":
            for climb in self.climbs(self.result.steps[0], point):
                there = {name: enclosed.farthest(climb[name]) for name, enclosed in self.sets.items()}
                self.measure_values(there)
                self.measure(self.result.steps[0], there, curved=False)

    def measure_values(self, point: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            values = self.values(point)
        for node in self.case.graph.nodes:
            enclosure = self.result.enclosures[node.name]
            if enclosure.is_constant:
                continue
            outcome = _flat(values[node.name])
            note = f"{node.arguments}, {self.setting}"
            self.found.meet(node.op, "bound", float(outcome.norm()), float(enclosure.bound), note)
            if outcome.numel():
                self.found.meet(node.op, "peak", float(outcome.abs().max()), float(enclosure.peak), note)
            if enclosure.value is None:
                continue
            distance = outcome - _flat(enclosure.value)
            self.found.meet(node.op, "spread", float(distance.norm()), float(enclosure.spread), note)
            if enclosure.rows is None:
                continue
            single = values[node.name] if isinstance(values[node.name], Tensor) else None
            assert enclosure.rows.shape == (node.specs[0].shape[0],), (node.op, enclosure.rows.shape, note)
            moved = _row_distances(values[node.name], enclosure.value)
            assert single is None or len(moved) == len(enclosure.rows)
            for moves, claim in zip(moved, enclosure.rows.numpy(), strict=True):
                self.found.meet(node.op, "rows", float(moves), float(claim), note)

    def measure(self, step: Step, point: Mapping[str, Tensor], curved: bool) -> None:
        with torch.no_grad():
            values = self.values(point)
        slots = {slot: values[name] for slot, name in step.names.items()}
        if any(not isinstance(value, Tensor) for value in slots.values()):
            return  # one of several results: nothing to differentiate
        if not all(step.bounds.jacobian[slot].is_finite for slot in slots):
            return  # nothing is claimed, and there may be no derivative
        affine = all(c.is_zero for c in step.bounds.curvature.values())
        if affine and len(self.jacobians.get(step.node.name, [])) > 1:
            return  # two points have shown that the Jacobian is constant
        function = _function(step.node, values)
        note = f"{step.node.arguments}, {self.setting}"
        blocks = dict(zip(slots, jacobian(function, slots), strict=True))
        for slot, block in blocks.items():
            claim = float(step.bounds.jacobian[slot])
            self.found.meet(step.node.op, slot, spectral(block), claim, note)
        self.jacobians.setdefault(step.node.name, []).append((slots, blocks))
        if curved and self.case.curved and not affine:
            for pair, claim_ in step.bounds.curvature.items():
                if pair[0] in slots and pair[1] in slots and 0 < float(claim_) < math.inf:
                    size = self.curvature(function, slots, pair)
                    self.found.meet(step.node.op, ",".join(pair), size, float(claim_), note)

    def curvature(
        self, function: Callable[..., Tensor], slots: Mapping[str, Tensor], pair: tuple[str, str]
    ) -> float:
        tensor = second_derivative(function, slots, pair)
        return tensor_norm(tensor, self.generator)

    def climbs(self, step: Step, point: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Directions in which the value, the distance from the centre and the slopes grow."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in point.items()}
        outcome = _flat(self.values(leaves)[step.node.name])
        centre = self.result.enclosures[step.node.name].value
        goals = [outcome.square().sum()]
        if centre is not None:
            away = outcome - _flat(centre)
            goals.append((away * torch.randn(away.shape, generator=self.generator, dtype=away.dtype)).sum())
        for goal in goals:
            yield gradients(goal, leaves)
        if all(c.is_zero for c in step.bounds.curvature.values()):
            return
        values = self.values(leaves)
        slots = {slot: values[name] for slot, name in step.names.items()}
        function = _function(step.node, values)
        met = self.jacobians.get(step.node.name, [])
        for slot, block in met[-1][1].items() if met else ():
            if 0 in block.shape or not bool(block.isfinite().all()):
                continue
            u, _, vt = torch.linalg.svd(block, full_matrices=False)
            dual = u[:, 0].clone().requires_grad_()
            slope = torch.autograd.grad(
                function(**slots), slots[slot], dual, create_graph=True, allow_unused=True
            )[0]
            if slope is not None and slope.requires_grad:
                yield gradients((slope.reshape(-1) * vt[0]).sum(), leaves)

    def compare(self) -> None:
        """Jacobians at any two points differ by no more than the curvatures allow: kinks and jumps show here."""
        for step in self.result.steps:
            met = self.jacobians.get(step.node.name, [])
            for (slots, blocks), (others, other_blocks) in zip(met, met[1:] + met[:1], strict=True):
                for slot in slots:
                    allowed = 0.0
                    for partner in slots:
                        pair = (slot, partner) if (slot, partner) in step.bounds.curvature else (partner, slot)
                        claim = step.bounds.curvature.get(pair, Magnitude.zero())
                        distance = float((slots[partner] - others[partner]).norm())
                        allowed += float(claim) * distance if distance else 0.0
                    change = spectral(blocks[slot] - other_blocks[slot])
                    note = f"{step.node.arguments}, {self.setting}"
                    self.found.meet(step.node.op, f"change {slot}", change - 1e-10, allowed, note)


def _function(node: Node, values: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The operation as a function of its slots, each on its own even if two hold the same tensor."""
    keys = list(node.arguments)
    holds: dict[str, Any] = {}

    def split(argument: Any, slot: str) -> Any:
        if isinstance(argument, Ref):
            holds[slot] = values[argument.name]
            return Ref(slot)
        if isinstance(argument, list | tuple):
            return type(argument)(split(item, f"{slot}.{k}") for k, item in enumerate(argument))
        return argument

    args = tuple(split(argument, keys[k]) for k, argument in enumerate(node.args))
    apart = replace(node, args=args, kwargs={key: split(a, key) for key, a in node.kwargs.items()})

    def run(**slots: Tensor) -> Tensor:
        return _flat(apart.run({**holds, **slots}))

    return run


def _flat(value: Any) -> Tensor:
    """All real results in one vector."""
    items = value if isinstance(value, tuple | list) else (value,)
    return torch.cat([item.double().reshape(-1) for item in items if item.is_floating_point()])


def _row_distances(value: Any, centre: Any) -> Tensor:
    values = value if isinstance(value, tuple | list) else (value,)
    centres = centre if isinstance(centre, tuple | list) else (centre,)
    parts = [
        (v.double() - c).reshape(v.shape[0], math.prod(v.shape[1:])).norm(dim=1)
        for v, c in zip(values, centres, strict=True)
        if v.is_floating_point()
    ]
    return torch.stack(parts).norm(dim=0)
