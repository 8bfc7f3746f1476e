r"""The paper's algorithm on a PyTorch model: printed constants, flagged where they are no upper bounds.

The computation depends on the domain:

* ``ProductBall(R)``: Algorithm 4 (Prop. smoothdeep), :math:`\|u_t\|_2 \le R_t`.
* ``ProductBall(R, center=...)``: the same after the corollary at the end of section 4,
  :math:`\|u_t - u_t^*\|_2 \le R_t`.
* ``Ball(r)``: it lies in the product of balls of radius :math:`r`, and that is what is read.
* ``wrt="input"``: Corollary smooth_state with the present parameters on :math:`\|x\|_2 \le R`; a ball of radius
  :math:`r` around :math:`x^*` lies in that of radius :math:`\|x^*\| + r` around zero.

Parameters that ask for no gradients do not vary: a frozen weight :math:`w` makes :math:`\beta(\cdot, w)` part of
:math:`\beta^x`, so :math:`l^x = L_b\|w\|_2` and :math:`L_b = 0`; a frozen intercept :math:`c` makes
:math:`\beta^u(c)` part of :math:`\beta^0`, so :math:`\|b(0,0)\| = l^u\|c\|_2` and :math:`l^u = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from surefoot.certificate import Certificate, Row
from surefoot.chain import Chain
from surefoot.domains import Ball, Domain, DomainError, ProductBall, Region
from surefoot.enclosure import norm
from surefoot.graph.structure import Graph, Leaf, Source
from surefoot.magnitude import Magnitude, stack
from surefoot.paper.algorithm import VALUE_AT_ZERO_DROPPED, LayerTrace, algorithm_4, around_point
from surefoot.paper.chains import compositions, fix_parameters, smooth_state
from surefoot.paper.constants import ZERO, Computation, Result, Smooth, merge_flags
from surefoot.paper.walk import Layer, layers_of


def read(chain: Chain) -> tuple[Computation, ...]:
    """The layers of a chain with the constants the paper prints for them, to give to ``algorithm_4``.

    Raises:
        UnsupportedOperation: where the paper prints none, naming operation and module.

    >>> chain = Chain(nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)), torch.ones(5, 3))
    >>> print(algorithm_4(read(chain), radii=1.0, input_norm=1.0))
    layer    m_{t,0}        m_t        ℓ_t        L_t
        0  4.237e+00  7.336e+00  3.237e+00  2.619e+00
        2  1.691e+01  1.691e+01  1.281e+01  9.091e+00
    """
    return tuple(layer.computation for layer in layers_of(chain.graph))


def certify_as_printed(
    model: nn.Module,
    x: Any,
    *,
    domain: Domain,
    wrt: Literal["params", "input"] = "params",
    input_norm: float | None = None,
    keep_value_at_zero: bool = True,
    corrected: bool = False,
) -> Certificate:
    r"""Bound, Lipschitz constant and smoothness by the paper's algorithm and constants, as printed.

    Args:
        model: a network made of the layers the paper lists; on the ``meta`` device nothing is allocated.
        x: the batch.
        domain: where the variables may be; see the module for how each domain is read.
        wrt: what varies: the parameters, or the input for the present parameters.
        input_norm: use this for the norm of the stacked batch; required on ``meta``.
        keep_value_at_zero: whether :math:`\|a(0)\|` enters, as printed; without it the numbers of the paper's
            application come out, which are no bounds and are flagged (ERRATA 4).
        corrected: apply ERRATA 5 and 7 to Algorithm 4. Corollary smooth_state has no such lines.

    Returns:
        A certificate without numbers for single blocks: the algorithm has one number for all of them. Its
        ``flags`` name every constant used that is not an upper bound.

    Raises:
        UnsupportedOperation: if the paper has no constants for an operation.
        DomainError: if the domain does not fit.
    """
    if not isinstance(domain, ProductBall | Ball):
        raise DomainError(
            f"the paper's algorithm is for balls, not for {type(domain).__name__}: use ProductBall, Ball, or "
            'constants="certified"'
        )
    chain = Chain(model, x)
    values = _Values(chain, dict(model.named_parameters()))
    layers = layers_of(chain.graph)
    if wrt == "input":
        return _in_the_input(layers, values, domain, input_norm, keep_value_at_zero)
    return _in_the_parameters(layers, values, domain, input_norm, keep_value_at_zero, corrected)


class _Values:
    """The present values of a chain's leaves, and their norms."""

    def __init__(self, chain: Chain, parameters: Mapping[str, Tensor]) -> None:
        self.graph: Graph = chain.graph
        self.parameters = parameters
        by_name = dict(zip((leaf.name for leaf in self.graph.inputs), chain.inputs, strict=True))
        self.inputs = {name: by_name[name] for name in self.graph.live[0]}  # those that are read

    def present(self, leaf: Leaf) -> Tensor:
        if leaf.source is Source.INPUT:
            return self.inputs[leaf.name]
        return self.graph.held[leaf.name] if leaf.name in self.graph.held else self.parameters[leaf.path]

    def norm(self, names: Iterable[str], center: Mapping[str, Tensor] | str = "present") -> Magnitude:
        """The norm of several leaves together at a centre."""
        if center == "origin":
            return ZERO
        values = []
        for leaf in map(self.graph.leaves.__getitem__, names):
            value = self.present(leaf) if isinstance(center, str) else center.get(leaf.path)
            if value is None:
                raise DomainError(f"the centre has no entry for '{leaf.path}'")
            if (shape := tuple(value.shape)) != leaf.spec.shape:
                raise DomainError(f"the centre of '{leaf.path}' has shape {shape}, not {leaf.spec.shape}")
            if value.device.type == "meta":
                raise DomainError(
                    f"'{leaf.path}' is on the meta device and has no value: use ProductBall(radius), whose centre "
                    'is the origin, and wrt="params"'
                )
            values.append(value.detach())
        return norm(values)

    def input_norm(self, bound: float | None) -> Magnitude:
        """The norm of the stacked batch, or the given bound on it."""
        if bound is not None:
            return Magnitude.of(float(bound))
        if any(value.device.type == "meta" for value in self.inputs.values()):
            raise DomainError(
                "the input is on the meta device and has no norm: pass input_norm, a bound on the norm of the "
                "stacked batch"
            )
        return norm([value.detach() for value in self.inputs.values()])


def _in_the_parameters(
    layers: Sequence[Layer],
    values: _Values,
    domain: Domain,
    input_norm: float | None,
    keep_value_at_zero: bool,
    corrected: bool,
) -> Certificate:
    graph = values.graph
    if not graph.blocks:
        raise DomainError("no parameter asks for gradients: nothing varies. Call model.requires_grad_(True)")
    region = Region.of(domain, {path: block.parameters for path, block in graph.blocks.items()})
    computations, radii, centres = [], [], []
    for layer in layers:
        varying = [name for name in layer.leaves if name in region.variables]
        computations.append(_frozen(layer, values, varying))
        # parameters of one block move together, by at most its radius
        blocks = {graph.owners[name]: Magnitude.of(region.radii[name]) for name in varying}
        radii.append(stack(list(blocks.values())).norm() if len(blocks) > 1 else next(iter(blocks.values()), ZERO))
        centres.append(values.norm(varying, domain.center))
    if domain.center != "origin":
        computations = list(around_point(computations, centres))
    trace = algorithm_4(computations, radii, values.input_norm(input_norm), keep_value_at_zero, corrected)
    text = str(domain)
    if isinstance(domain, Ball):
        text += ", read as each layer within that distance"
    return _certificate(trace.result, layers, trace.layers, text, "params")


def _frozen(layer: Layer, values: _Values, varying: Sequence[str]) -> Computation:
    """The constants of a layer when only some of its tensors vary; see the module."""
    biaffine = layer.computation.biaffine
    if frozen := [name for name in layer.weights if name not in varying]:
        added = biaffine.lipschitz_state + biaffine.smoothness * values.norm(frozen)
        left = biaffine.smoothness if len(frozen) < len(layer.weights) else ZERO
        biaffine = replace(biaffine, smoothness=left, lipschitz_state=added)
    if frozen := [name for name in layer.biases if name not in varying]:
        added = biaffine.value_at_zero + biaffine.lipschitz_parameters * values.norm(frozen)
        left = biaffine.lipschitz_parameters if len(frozen) < len(layer.biases) else ZERO
        biaffine = replace(biaffine, lipschitz_parameters=left, value_at_zero=added)
    return replace(layer.computation, biaffine=biaffine)


def _in_the_input(
    layers: Sequence[Layer], values: _Values, domain: Domain, input_norm: float | None, keep_value_at_zero: bool
) -> Certificate:
    names = tuple(values.inputs)
    radius = Magnitude.of(Region.of(domain, {"input": names}).radii[names[0]])
    text = str(domain)
    if domain.center != "origin":
        present = domain.center == "present" and input_norm is not None
        radius = radius + (values.input_norm(input_norm) if present else values.norm(names, domain.center))
        text += f", read as within {radius} of the origin"
    parts: list[Smooth] = []
    ends = []  # how many functions there are up to the end of each layer
    for layer in layers:
        affine, *functions = fix_parameters(layer.computation, values.norm(layer.leaves))
        parts += [affine, *(functions if keep_value_at_zero else map(_without_value, functions))]
        ends.append(len(parts))
    after = list(compositions(parts, radius))
    return _certificate(smooth_state(parts, radius), layers, [after[end] for end in ends], text, "input")


def _without_value(function: Smooth) -> Smooth:
    if function.value_at_zero.is_zero:
        return function
    return replace(function, value_at_zero=ZERO, unsound=merge_flags(function.unsound, (VALUE_AT_ZERO_DROPPED,)))


def _certificate(
    result: Result, layers: Sequence[Layer], after: Sequence[Result | LayerTrace], domain: str, wrt: str
) -> Certificate:
    """The certificate, with one row for what holds after each layer."""
    rows = [
        Row(layer.computation.name, layer.label, layer.shape, one.bound, one.lipschitz, one.smoothness, share=0.0)
        for layer, one in zip(layers, after, strict=True)
    ]
    return Certificate(
        bound=result.bound,
        lipschitz=result.lipschitz,
        smoothness=result.smoothness,
        block_lipschitz={},
        block_smoothness=Magnitude.zero((0, 0)),
        make_rows=lambda: rows,
        reasons=() if result.smoothness.is_finite else tuple(_reasons(layers)),
        domain=domain,
        wrt=wrt,
        constants="paper",
        flags=result.flags,
        scalar=math.prod(layers[-1].shape) == 1,
    )


def _reasons(layers: Sequence[Layer]) -> Iterable[str]:
    """The functions for which the paper defines no smoothness."""
    for layer in layers:
        for node, function in zip(layer.functions, layer.computation.nonlinear, strict=True):
            if not function.smoothness.is_finite:
                place = f"{node.module or 'model'} ({node.op.rpartition('.')[2]})"
                yield f"{place}: the paper defines no smoothness for it, since it has kinks: use surefoot.smooth"
