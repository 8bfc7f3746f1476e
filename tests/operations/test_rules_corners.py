"""Corners of the rules: what must be refused, what is not known, round-off, limits that are only approached."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from judges import assert_upper_bound
from operations.case import Case, Fixed, operation, pieces
from operations.derivatives import spectral, tensor_norm
from operations.harness import claims, enclose, enclosed
from operations.modules import MODULES, example
from operations.tensors import away, real, whole, yes_or_no
from surefoot.calculus.forward import forward
from surefoot.calculus.prepare import scalar
from surefoot.certifying import certify
from surefoot.domains import ProductBall
from surefoot.enclosure import unknown_constant
from surefoot.errors import UnsupportedOperation
from surefoot.operations import Bounds
from surefoot.scalar import ScalarFunction

aten = torch.ops.aten

REFUSED = {
    "division that rounds": lambda: operation(aten.div.Tensor_mode, real(2), 2.0, rounding_mode="floor"),
    "division by zero": lambda: operation(aten.div.Scalar, real(2), 0),
    "cast to integers": lambda: operation(aten.to.dtype, real(2), torch.int64),
    "bits of another type": lambda: operation(aten.view.dtype, real(2), torch.int64),
    "random dropout": lambda: operation(aten.dropout.default, real(2), 0.5, True),
    "places of maxima": lambda: pieces(aten.max_pool1d_with_indices.default, real(1, 4), [2], item=1),
    "filling with what varies": lambda: operation(aten.masked_fill.Tensor, real(2), yes_or_no(2), real()),
    "largest of two tensors": lambda: operation(aten.max.other, real(2), real(2, seed=1)),
    "other norms": lambda: operation(aten.linalg_vector_norm.default, real(2), 1),
    "variance of one number": lambda: operation(aten.var.correction, real(2, 1), [1]),
    "weighted bags": lambda: pieces(
        aten.embedding_bag.default, real(3, 2), whole(3, 4), torch.tensor([0, 2]), False, 0, False, real(4)
    ),
    "largest of a bag": lambda: pieces(
        aten.embedding_bag.default, real(3, 2), whole(3, 4), torch.tensor([0, 2]), False, 2
    ),
    "no eps": lambda: operation(aten.rms_norm.default, real(2, 2), [2], None, 0.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperation, match=r"'[\w.]+' in the model itself: \w+"):
        enclosed(REFUSED[name](), 0.1)


def test_a_condition_that_varies_is_refused() -> None:
    case = operation(aten.where.self, yes_or_no(2), real(2), real(2, seed=1))
    _, leaves, region = enclose(case, 0.1, torch.Generator())
    condition = next(name for name in leaves if name not in case.variables)
    leaves[condition] = replace(leaves[condition], is_constant=False)
    with pytest.raises(UnsupportedOperation, match="condition varies"):
        forward(case.graph, leaves, region)


def _without_values(case: Case) -> Bounds:
    """What a rule claims when the constants among its arguments are not known."""
    _, leaves, region = enclose(case, "unknown", torch.Generator().manual_seed(0))
    for name in case.values:
        if name not in case.variables:
            leaves[name] = unknown_constant(case.graph.leaves[name].spec, len(case.variables))
    return forward(case.graph, leaves, region).steps[0].bounds


def _with_statistics(mean: Tensor, var: Tensor) -> Case:
    return operation(
        aten.batch_norm.default, real(3, 2), None, None, Fixed(mean), Fixed(var), False, 0.0, 0.1, False
    )


UNKNOWN = {
    "embedding": lambda k: operation(aten.embedding.default, real(3, 2), whole(3, 2, 2, seed=k)),
    "index_select": lambda k: operation(aten.index_select.default, real(3, 2), 0, whole(3, 3, seed=k)),
    "index": lambda k: operation(aten.index.Tensor, real(3, 2), [whole(3, 2, seed=k), whole(2, 2, seed=k)]),
    "gather": lambda k: operation(aten.gather.default, real(3, 2), 0, whole(3, 2, 2, seed=k)),
    "take_along_dim": lambda k: operation(aten.take_along_dim.default, real(1, 3), whole(3, 2, 2, seed=k), 1),
    "take": lambda k: operation(aten.take_along_dim.default, real(2, 2), whole(4, 3, seed=k)),
    "where": lambda k: operation(aten.where.self, yes_or_no(2, 3, seed=k), real(1, 3), real(2, 1)),
    "masked_fill": lambda k: operation(aten.masked_fill.Scalar, real(1, 3), yes_or_no(2, 1, seed=k), 0.0),
    "embedding_bag": lambda k: pieces(
        aten.embedding_bag.default, real(3, 2), whole(3, 4, seed=k), torch.tensor([0, 1 + k % 3])
    ),
    "batch_norm": lambda k: _with_statistics(real(2, seed=k), real(2, seed=k).square()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_claims_hold_for_all_constants_that_are_not_known(name: str) -> None:
    blind = _without_values(UNKNOWN[name](0))
    for k in range(8):
        exact = enclosed(UNKNOWN[name](k), "unknown")[1].steps[0].bounds
        for slot, slope in exact.jacobian.items():
            assert slope <= blind.jacobian[slot] * (1 + 1e-9)


_ON_META = [
    "Linear", "Bilinear", "Embedding", "Conv 2d", "Conv same even 1d", "ConvTranspose 2d", "BatchNorm 2d",
    "InstanceNorm 1d", "LayerNorm", "RMSNorm", "GroupNorm", "PReLU", "MultiheadAttention", "LSTM", "GRUCell",
    "TransformerEncoderLayer",
]  # fmt: skip


@pytest.mark.parametrize("name", _ON_META)
def test_on_meta_the_certificate_holds_for_every_input_of_that_norm(name: str) -> None:
    model, x = example(name)
    with torch.device("meta"):
        shadow = MODULES[name][0]()
    domain = ProductBall(0.8)
    certificate = (
        certify(shadow, torch.empty_like(x, device="meta"), domain=domain, input_norm=float(x.norm()) * 1.001)
        if x.is_floating_point()
        else certify(shadow, torch.empty_like(x, device="meta"), domain=domain)
    )
    assert math.isfinite(float(certificate.bound))
    assert_upper_bound(certificate, model, x, domain, starts=2, steps=2)


def test_round_off_of_cancelling_expressions_is_accounted_for() -> None:
    """(x + c)(x - c) + c² is x², but not in double precision."""
    x, c = ScalarFunction.variable(), 1e6
    value = real(5)
    case = operation(scalar, value, (x + c) * (x - c) + c * c, op="surefoot.scalar")
    outcome = enclosed(case, 0.0)[1].enclosures["result"]
    exact = [Fraction(float(v)) ** 2 for v in value]
    away_from_it = [abs(Fraction(float(z)) - e) for z, e in zip(outcome.value, exact, strict=True)]
    assert max(away_from_it) > 1e-6
    assert math.sqrt(sum(float(d) ** 2 for d in away_from_it)) <= float(outcome.spread) < 1.0


@pytest.mark.parametrize("name", ["tanh", "gelu", "silu", "softplus", "sigmoid", "mish", "elu"])
def test_scalar_suprema_are_attained(name: str) -> None:
    """Over one interval for all entries, where some entry is at the maximiser."""
    function = ScalarFunction.named(name)
    bounds = claims(operation(scalar, real(4), function, op="surefoot.scalar"), "unknown")
    reach = float(real(4).norm()) * 1.25 + 0.25
    grid = torch.linspace(-reach, reach, 200001, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(function(grid).sum(), grid, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), grid)
    assert float(slope.detach().abs().max()) >= (1 - 1e-6) * float(bounds.jacobian["x"])
    assert float(bend.abs().max()) >= (1 - 1e-6) * float(bounds.curvature["x", "x"])


@pytest.mark.parametrize("length", [4, 8, 16])
def test_overlapping_convolutions_approach_their_constant(length: int) -> None:
    """As the docstring says: √c ((n - k + 1)/n)^(1/2) for equal taps and entries."""
    kernel = 2
    case = operation(aten.conv1d.default, real(1, 1, length), real(1, 1, kernel))
    (constant,) = claims(case, "unknown").curvature.values()
    x = torch.full((1, 1, length), length**-0.5, dtype=torch.float64)
    w = torch.full((1, 1, kernel), kernel**-0.5, dtype=torch.float64)
    attained = float(torch.conv1d(x, w).norm())
    assert attained == pytest.approx(float(constant) * math.sqrt((length - kernel + 1) / length))


def test_log_softmax_approaches_its_constant() -> None:
    x = torch.tensor([[40.0, 0.0, 0.0]], dtype=torch.float64)
    bounds = claims(operation(aten.log_softmax.int, x, 1), "unknown")
    jacobian = torch.autograd.functional.jacobian(lambda v: torch.log_softmax(v, 1), x).reshape(3, 3)
    assert spectral(jacobian) == pytest.approx(float(bounds.jacobian["self"]), rel=1e-6)


def test_diffuse_and_certain_softmax_are_flatter_than_one_half() -> None:
    """A soft-max over many equal classes, or with one clear winner, has a small slope."""
    diffuse = claims(operation(aten.softmax.int, torch.zeros(1, 50).double(), 1), 0.01)
    certain = claims(operation(aten.softmax.int, torch.tensor([[12.0, 0.0, 0.0]]).double(), 1), 0.01)
    assert float(diffuse.jacobian["self"]) < 0.021
    assert float(certain.jacobian["self"]) < 1e-4


@pytest.mark.parametrize("overload", [aten.softmax.int, aten.log_softmax.int, aten.logsumexp.default])
def test_a_saturated_softmax_is_not_flat_over_a_wide_domain(overload: torch._ops.OpOverload) -> None:
    """At the centre the smaller probability is zero in double precision; within reach it is one half."""
    x = torch.tensor([[60.0, 0.0]], dtype=torch.float64)
    bounds = claims(operation(overload, x, [1] if "logsumexp" in str(overload) else 1), 60.0)
    middle = torch.full((1, 2), 30.0, dtype=torch.float64)  # at a distance of 42.4
    function = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}
    name = str(overload).split(".")[1]
    jacobian = torch.autograd.functional.jacobian(lambda v: function[name](v, 1), middle).reshape(-1, 2)
    assert spectral(jacobian) <= float(bounds.jacobian["self"])
    assert float(bounds.curvature["self", "self"]) >= (0.0 if name == "softmax" else 0.5)


def test_saturating_functions_stay_bounded_on_large_domains() -> None:
    case = operation(scalar, real(3, 4), ScalarFunction.named("tanh"), op="surefoot.scalar")
    outcome = enclosed(case, 50.0)[1].enclosures["result"]
    assert float(outcome.peak) <= 1.0 + 1e-6
    assert float(outcome.spread) <= 2.0 * math.sqrt(12)


def test_the_tensor_norm_of_the_judge() -> None:
    """Against a tensor whose norm is known: a product of unit vectors, and its sum with a shorter one."""
    a, b, c = (away(3, seed=k) / away(3, seed=k).norm() for k in range(3))
    tensor: Tensor = torch.einsum("a,b,c->abc", a, b, c)
    assert tensor_norm(tensor, torch.Generator()) == pytest.approx(1.0)
    diagonal = torch.zeros(2, 2, 2, dtype=torch.float64)
    diagonal[0, 0, 0], diagonal[1, 1, 1] = 3.0, 2.0
    assert tensor_norm(diagonal, torch.Generator()) == pytest.approx(3.0)
