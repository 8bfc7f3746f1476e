r"""Norms through a program: how large, how steep and how curved its outputs are over a domain.

One pass forwards with the rules of :mod:`surefoot.bounds.size_rules`,

.. math:: \ell_z = \sum_i J_i\,\ell_{x_i}, \qquad
    s_z = \min\Big(\sum_i J_i s_{x_i},\ \mathrm{reach}(\ell_z)\Big) + \epsilon_z,

where :math:`\ell` is a vector over the variables, s how far a tensor may be from its value at the centre (the
mean-value inequality, from the arguments or from the variables) and :math:`\epsilon` what rounding adds. The
recursion of second derivatives, :math:`L_z = \sum_i J_i L_{x_i} + \sum_{ij} C_{ij}\,\ell_{x_i}\ell_{x_j}^\top`,
is linear in L, so that of the outputs is a sum over operations,

.. math:: H = \sum_z w_z \sum_{ij} C_{ij}\,\ell_{x_i}\ell_{x_j}^\top, \qquad
    w_{\mathrm{out}} = 1, \quad w_{x_i} = \sum_{\text{readers } z} w_z J_i,

with weights from one pass backwards over numbers, or with second derivatives contracted with costates, and
:math:`\|D^2f\| \le \|H\|_2`, the norm of a non-negative matrix. This is the paper's recursion (Prop.
smoothdeep), variable by variable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from surefoot.bounds.claims import Claim
from surefoot.bounds.size_rules import RULES, contracted, moved
from surefoot.bounds.tensor_size import Size, around, consistent, measured, unknown, within
from surefoot.domains import Region
from surefoot.errors import UnsupportedOperation
from surefoot.magnitude import Magnitude, minimum, stack
from surefoot.norms import frobenius_norm, nonnegative_norm
from surefoot.program.ir import Node, Program

_ZERO = Magnitude.zero()


@dataclass(frozen=True)
class Step:
    """One operation that varies: what its rule claims, and the tensor in each position."""

    node: Node
    claim: Claim
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """The outcome of a pass: sizes by node, the operations that vary, in order, and which nodes depend on
    variables, also where their slopes are zero.
    """

    program: Program
    region: Region
    sizes: Mapping[int, Size]
    steps: tuple[Step, ...]
    depends: Sequence[bool]

    @property
    def outputs(self) -> list[Size]:
        return [self.sizes[index] for index in self.program.outputs]


@dataclass(frozen=True)
class Term:
    """One summand of H: weight · (left rightᵀ, made symmetric)."""

    step: Step
    weight: Magnitude
    left: Magnitude
    right: Magnitude

    @property
    def size(self) -> Magnitude:
        """Its norm."""
        return self.weight * self.left.norm() * self.right.norm()


def leaves(
    program: Program,
    region: Region,
    centres: Mapping[str, Tensor | Size | None],
    fixed: Mapping[str, Tensor | Size],
) -> dict[int, Size]:
    """The sizes of the inputs of a program.

    Args:
        program: with its constants.
        region: the domain; its variables are inputs of the program.
        centres: the centre of each variable, or its size; ``None`` for the origin where the program is not run.
        fixed: the other inputs: their values, or what is known of their size.
    """
    none = Magnitude.zero((len(region.variables),))
    sizes = {
        index: measured(value, none)
        if value.is_floating_point()
        else replace(unknown(value.shape, none), value=value)
        for index, value in program.constants.items()
        if program.nodes[index].primitive.kind == "constant"  # others are computed from these, with rounding
    }
    for name, index in program.inputs.items():
        shape = program.nodes[index].shape
        if name in region.radii:
            own = none.log2.copy()
            own[region.variables.index(name)] = 0.0
            lipschitz, radius, centre = Magnitude(own), Magnitude.of(region.radii[name]), centres[name]
            move = within(shape, radius, lipschitz)
            if isinstance(centre, Size):
                sizes[index] = replace(centre, lipschitz=lipschitz)
            elif centre is None:
                sizes[index] = move
            else:
                sizes[index] = around(unknown(shape, lipschitz), measured(centre, lipschitz), move, _ZERO)
        else:
            value = fixed[name]
            sizes[index] = replace(value, lipschitz=none) if isinstance(value, Size) else measured(value, none)
    return sizes


def forward(program: Program, region: Region, inputs: Mapping[int, Size]) -> Sizes:
    """Sizes of all tensors of a program, from those of its inputs and constants.

    Raises:
        UnsupportedOperation: if a primitive has no rule.
    """
    sizes, steps = dict(inputs), []
    values, depends = _values_at_centre(program, sizes), program.depends(region.variables)
    for node in program.nodes:
        if node.index in sizes:
            continue
        arguments = _arguments(program, node)
        own = [sizes[index] for index in arguments]
        rule = RULES.get(node.primitive.name)
        if rule is None:
            raise UnsupportedOperation(
                f"norms of '{node.primitive.name}' are not bounded (in '{node.path or 'model'}')"
            )
        claim = rule(node, own)
        lipschitz = claim.combined([each.lipschitz for each in own], own[0].lipschitz.shape)
        size = replace(claim.size, lipschitz=lipschitz)
        value = program.constants.get(node.index) if values is None else values[node.index]
        if value is not None and bool(torch.isfinite(value).all()):
            size = _around_centre(size, node, claim, own, value, region)
        sizes[node.index] = size
        if depends[node.index]:
            steps.append(Step(node, claim, arguments))
    return Sizes(program, region, sizes, tuple(steps), depends)


def _values_at_centre(program: Program, sizes: Mapping[int, Size]) -> Sequence[Tensor] | None:
    """All tensors as computed in double precision at the centre, if all inputs have a value there."""
    inputs = {name: sizes[index].value for name, index in program.inputs.items()}
    known = {
        name: value.double() if value.is_floating_point() else value
        for name, value in inputs.items()
        if value is not None
    }
    return program.run(known) if len(known) == len(inputs) else None


def _arguments(program: Program, node: Node) -> tuple[int, ...]:
    """The tensors that an operation reads; a factor that is repeated is taken as it was before."""
    if node.primitive.name != "mul":
        return node.inputs
    return tuple(
        program.nodes[index].inputs[0] if _keeps_dimensions(program, program.nodes[index]) else index
        for index in node.inputs
    )


def _keeps_dimensions(program: Program, node: Node) -> bool:
    return node.primitive.name == "expand" and bool(node.inputs)


def _around_centre(
    size: Size, node: Node, claim: Claim, own: Sequence[Size], value: Tensor, region: Region
) -> Size:
    """The sizes of a result that was computed at the centre."""
    centre = measured(value, size.lipschitz)
    error = claim.combined([each.error for each in own]) + claim.rounding
    move = moved(node, claim, own)
    # what jumps may be elsewhere however short the way: 0·∞ is not 0 here
    reach = region.reach(size.lipschitz) if size.lipschitz.max().is_finite else Magnitude.infinity()
    spread = minimum(move.bound + claim.rounding, reach + error, centre.bound + size.bound)
    slices = tuple(each + claim.rounding for each in move.slices)
    move = replace(
        move,
        bound=spread,
        total=Magnitude.infinity(),
        slices=slices,
        peak=move.peak + claim.rounding,
        operator=spread,
        low=-math.inf,
        high=math.inf,
    )
    return around(size, centre, consistent(move), error)


def weights(result: Sizes) -> dict[int, Magnitude]:
    """How much a second derivative of each tensor counts at the outputs."""
    total: dict[int, Magnitude] = {}
    for index in result.program.outputs:
        total[index] = total.get(index, _ZERO) + 1.0
    for step in reversed(result.steps):
        weight = total.get(step.node.index)
        if weight is None:
            continue
        for k, slope in step.claim.slopes.items():
            index = step.arguments[k]
            total[index] = total.get(index, _ZERO) + weight * slope
    return total


def terms(result: Sizes) -> list[Term]:
    r"""The summands of H that are not zero.

    Of a program that was differentiated, second derivatives are contracted with the costates, which are tensors of
    the program and have sizes like all others: :math:`H = \sum_z\langle\lambda_z, D^2f_z\rangle`.
    """
    costates, summands = result.program.costates, []
    weight = {} if costates else weights(result)
    for step in result.steps:
        node, own = step.node, [result.sizes[index] for index in step.arguments]
        if costates:
            costate = costates.get(node.index)
            bends = {} if costate is None else contracted(node, step.claim, own, result.sizes[costate])
        else:
            bends = {pair: bend * weight.get(node.index, _ZERO) for pair, bend in step.claim.bends.items()}
        for (i, j), bend in bends.items():
            amount = bend * (1.0 if i == j else 2.0)
            if not (amount.is_zero or own[i].lipschitz.is_zero or own[j].lipschitz.is_zero):
                summands.append(Term(step, amount, own[i].lipschitz, own[j].lipschitz))
    return summands


def assemble(summands: Sequence[Term], variables: int) -> Magnitude:
    r"""The matrix H, entry by entry an upper bound.

    Row :math:`s` is scaled by :math:`2^{r_s}`, the largest finite factor met there, so the sum is one product of
    matrices of ordinary doubles in [0, 1]. What underflows in it is below :math:`2^{-1020}` per summand relative
    to :math:`2^{r_s + r_{s'}}` and is added back; round-off of the product is at most a relative
    :math:`(K + 8) 2^{-52}`. Infinite summands only mark the entries they reach.
    """
    if not summands:
        return Magnitude.zero((variables, variables))
    half = np.array([0.5 * term.weight.log2 for term in summands])[:, None]
    left = _weighted(np.stack([np.asarray(term.left.log2) for term in summands]), half)
    right = _weighted(np.stack([np.asarray(term.right.log2) for term in summands]), half)
    infinite = np.zeros((1, 1), dtype=bool)
    if np.isposinf(left).any() or np.isposinf(right).any():
        infinite = _reached(np.isposinf(left), right > -np.inf) | _reached(left > -np.inf, np.isposinf(right))
        left, right = (np.where(np.isposinf(side), -np.inf, side) for side in (left, right))
    scale = np.maximum(left.max(axis=0), right.max(axis=0))
    safe = np.where(np.isfinite(scale), scale, 0.0)
    product = np.exp2(left - safe).T @ np.exp2(right - safe)
    count = len(summands)
    product = 0.5 * (product + product.T) * (1 + (count + 16) * 2.0**-51) + count * 2.0**-1000
    log2 = np.log2(product) + safe[:, None] + safe[None, :]
    present = np.isfinite(scale)[:, None] & np.isfinite(scale)[None, :]
    log2 = np.where(present, log2 + (np.abs(log2) + 2.0) * 2.0**-49, -np.inf)
    return Magnitude(np.where(infinite | infinite.T, np.inf, log2))


def _weighted(log2: np.ndarray, half: np.ndarray) -> np.ndarray:
    """log2 + half, with zero times infinity equal to zero."""
    with np.errstate(invalid="ignore"):
        return np.where(log2 == -np.inf, -np.inf, log2 + half)


def _reached(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which pairs occur together in some summand."""
    return (left.astype(np.float32).T @ right.astype(np.float32)) > 0


def in_blocks(summands: Sequence[Term], region: Region) -> list[Term]:
    r"""The summands over blocks instead of variables: :math:`\sum_{s\in b}\ell_s\|v_s\| \le \ell_b\|v_b\|` with
    :math:`\ell_b^2 = \sum_{s\in b}\ell_s^2`.
    """
    members = region.filled_up(region.blocks.values())

    def joined(slopes: Magnitude) -> Magnitude:
        return Magnitude(np.append(slopes.log2, -np.inf))[members].norm(axis=1)

    return [replace(term, left=joined(term.left), right=joined(term.right)) for term in summands]


def smoothness(matrix: Magnitude) -> Magnitude:
    """The spectral norm of H, as an upper bound."""
    return nonnegative_norm(matrix)


def by_block(matrix: Magnitude, blocks: Sequence[Sequence[int]]) -> Magnitude:
    """The matrix over pairs of blocks: the Frobenius norm of each part, a bound on its spectral norm."""
    if not blocks:
        return Magnitude.zero((0, 0))
    starts = np.array([members[0] for members in blocks])  # variables are ordered by blocks
    sizes = np.array([len(members) for members in blocks])
    log2 = matrix.log2
    top = np.maximum.reduceat(np.maximum.reduceat(log2, starts, axis=0), starts, axis=1)
    scale = np.where(np.isfinite(top), top, 0.0)
    spread_out = scale.repeat(sizes, axis=0).repeat(sizes, axis=1)
    squares = np.exp2(2 * np.minimum(log2 - spread_out, 0.0))  # positive only where the part is infinite anyway
    total = np.add.reduceat(np.add.reduceat(squares, starts, axis=0), starts, axis=1)
    norm = 0.5 * np.log2(np.maximum(total, 2.0**-1000)) + scale
    return Magnitude(np.where(np.isfinite(top), norm + (np.abs(norm) + 8.0) * 2.0**-48, top))


@dataclass(frozen=True)
class Objective:
    r"""The constants of a real-valued function, from a pass through its gradient program.

    With :math:`g_s \ge \sup\|\nabla_sF\|` and the matrix H, what follows from the centre is taken where it is
    sharper (Fact refined_smooth): :math:`\|\nabla_sF(u)\| \le \|\nabla_sF(u_0)\| + \sum_tH_{st}r_t` and
    :math:`|F(u)| \le |F(u_0)| + \sup\sum_sg_s\|u_s - u_{0s}\|`.

    Attributes:
        bound: of the absolute value.
        gradients: for each variable, of the norm of the gradient.
        at_centre: the same at the centre; ``None`` where the program was not run.
        matrix: H, over pairs of variables.
        summands: of H.
    """

    bound: Magnitude
    gradients: Magnitude
    at_centre: Magnitude | None
    matrix: Magnitude
    summands: tuple[Term, ...]


def objective(result: Sizes) -> Objective:
    """The constants of the function of which this is the gradient program."""
    region, (value, *parts) = result.region, result.outputs
    summands = tuple(terms(result))
    matrix = assemble(summands, len(region.variables))
    gradients, bound = stack([part.bound for part in parts]), value.bound
    at_centre = None
    centres = [part.value for part in parts if part.value is not None]
    if value.value is not None and len(centres) == len(parts):
        norms = stack([Magnitude.of(frobenius_norm(centre)) for centre in centres])
        at_centre = norms + stack([part.error for part in parts])
        if smoothness(matrix).is_finite:
            gradients = minimum(gradients, at_centre + stack([region.reach(row) for row in matrix]))
        start = Magnitude.of(abs(float(value.value))) + value.error
        bound = minimum(bound, start + region.reach(gradients))
    return Objective(bound, gradients, at_centre, matrix, summands)
