"""Sparsities against tensors of derivatives, formed entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.complexity.layers import sparsity
from surefoot.operations.captured import capture
from surefoot.operations.sparsity import Sparsity


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def _random(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def _found(function: Callable[..., Any], *tensors: Tensor) -> Sparsity:
    """The sparsity of the last operation of a function."""
    graph = capture(_Function(function), tensors)
    return sparsity(graph, graph.nodes[-1])


def _jacobian(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], argument: int) -> int:
    derivative = torch.autograd.functional.jacobian(function, tensors)[argument]
    return int((derivative != 0).sum())


def _mixed(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> int:
    """Non-zero entries of the tensor that is bilinear in the first two: its value on all pairs of unit vectors."""
    first, second, *others = tensors
    rest = [torch.zeros_like(other) for other in others]
    return sum(
        int(function(x, u, *rest).count_nonzero())
        for x in torch.eye(first.numel()).double().reshape(-1, *first.shape)
        for u in torch.eye(second.numel()).double().reshape(-1, *second.shape)
    )


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(3, 4), (2, 4)]),
    "linear-bias": (F.linear, [(3, 4), (2, 4), (2,)]),
    "linear-sequence": (F.linear, [(2, 3, 4), (5, 4), (5,)]),
    "linear-vector": (F.linear, [(4,), (2, 4)]),
    "conv1d-bias": (F.conv1d, [(2, 2, 7), (3, 2, 3), (3,)]),
    "conv2d": (F.conv2d, [(2, 2, 5, 4), (3, 2, 3, 2)]),
    "conv2d-one-image": (F.conv2d, [(2, 5, 4), (3, 2, 3, 2)]),
    "conv2d-stride": (lambda x, w: F.conv2d(x, w, stride=(2, 1)), [(1, 2, 6, 5), (2, 2, 3, 3)]),
    "conv2d-dilation": (lambda x, w: F.conv2d(x, w, dilation=2), [(1, 2, 6, 5), (2, 2, 2, 2)]),
    "conv2d-groups": (lambda x, w: F.conv2d(x, w, groups=2), [(1, 4, 4, 4), (6, 2, 2, 2)]),
    "conv2d-depthwise": (lambda x, w: F.conv2d(x, w, groups=3), [(2, 3, 4, 4), (3, 1, 3, 3)]),
    "conv3d": (F.conv3d, [(1, 1, 3, 3, 3), (2, 1, 2, 2, 2)]),
    "transposed1d": (F.conv_transpose1d, [(2, 2, 4), (2, 3, 3), (3,)]),
    "transposed2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(1, 2, 3, 2), (2, 3, 3, 2)]),
    "transposed2d-groups": (lambda x, w: F.conv_transpose2d(x, w, groups=2), [(1, 4, 3, 2), (4, 2, 2, 2)]),
    "matmul": (torch.matmul, [(3, 4), (4, 2)]),
    "matmul-stack": (torch.matmul, [(2, 1, 3, 4), (5, 4, 2)]),
    "matmul-vector": (torch.matmul, [(2, 3, 4), (4,)]),
    "mm": (torch.mm, [(3, 4), (4, 2)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 2)]),
    "mv": (torch.mv, [(3, 4), (4,)]),
    "dot": (torch.dot, [(4,), (4,)]),
    "outer": (torch.outer, [(4,), (3,)]),
    "mul": (torch.mul, [(3, 4), (4,)]),
    "einsum": (lambda x, w: torch.einsum("bij,jk->bik", x, w), [(2, 3, 4), (4, 5)]),
    "einsum-ellipsis": (lambda x, w: torch.einsum("...j,kj", x, w), [(2, 3, 4), (5, 4)]),
    "einsum-entries": (lambda x, w: torch.einsum("ij,ij->ij", x, w), [(3, 4), (3, 4)]),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_product_is_nonzeros_of_bilinear_tensor(case: str) -> None:
    function, shapes = PRODUCTS[case]
    tensors = _random(*shapes)
    found = _found(function, *tensors)
    assert found.product == _mixed(function, tensors)
    assert len(found.factors) == 2
    if len(tensors) == 3:
        assert found.terms[0][1] == _jacobian(function, tensors, 2)


def test_padding_is_not_subtracted() -> None:
    tensors = _random((1, 1, 4, 4), (2, 1, 3, 3))

    def padded(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1)

    found = _found(padded, *tensors)
    assert found.product == 16 * 2 * 9
    assert _mixed(padded, tensors) == 2 * 10 * 10  # 3 + 3 + 2 + 2 entries on each axis are inside


def test_three_factors() -> None:
    x, y, w = _random((3, 2), (3, 4), (5, 2, 4))
    found = _found(F.bilinear, x, y, w)
    assert found.product == _mixed(lambda a, b: F.bilinear(a, b, torch.ones_like(w)), (x, y))
    assert len(found.factors) == 3


def test_einsum_of_three_goes_in_pairs() -> None:
    found = _found(lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), *_random((2, 3), (3, 4), (4, 5)))
    assert [c.multiplications for c in found.contractions] == [2 * 3 * 4, 2 * 4 * 5]


def test_einsum_sums_lonely_indices_first() -> None:
    found = _found(lambda a, b: torch.einsum("ij,k->k", a, b), *_random((2, 3), (4,)))
    assert found.product == 4


def test_einsum_of_one_is_linear() -> None:
    (x,) = _random((3, 3))
    assert _found(lambda a: torch.einsum("ij->j", a), x).terms[0][1] == 9
    assert _found(lambda a: torch.einsum("ii->i", a), x).terms[0][1] == 3


LINEAR: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "sum": (lambda x: x.sum(1), (3, 4)),
    "mean": (lambda x: x.mean(), (3, 4)),
    "cumsum": (lambda x: x.cumsum(1), (3, 4)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), (2, 2, 7)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (2, 2, 6, 5)),
    "avg_pool2d-padding": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (1, 2, 6, 5)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, (2, 1, 2)), (1, 1, 4, 2, 3)),
    "adaptive1d": (lambda x: F.adaptive_avg_pool1d(x, 3), (2, 2, 7)),
    "adaptive2d": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (2, 2, 5, 4)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (1, 2, 3, 3)),
    "neg": (lambda x: -x, (3, 4)),
    "batch_norm-eval": (
        lambda x: F.batch_norm(x, torch.zeros(2).double(), torch.ones(2).double()),
        (3, 2, 2),
    ),
}


@pytest.mark.parametrize("case", LINEAR)
def test_terms_are_nonzeros_of_matrix(case: str) -> None:
    function, shape = LINEAR[case]
    tensors = _random(shape)
    ((_, nonzeros),) = _found(function, *tensors).terms
    assert nonzeros == _jacobian(function, tensors, 0)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_is_bounded(mode: str) -> None:
    def function(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(7, 5), mode=mode)

    tensors = _random((1, 1, 4, 4))
    ((_, nonzeros),) = _found(function, *tensors).terms
    assert nonzeros >= _jacobian(function, tensors, 0) > nonzeros / 4


NONAFFINE: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "tanh": (torch.tanh, [(3, 4)]),
    "pow": (lambda x: x**3, [(3, 4)]),
    "div": (torch.div, [(3, 4), (3, 4)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), [(2, 2, 6, 5)]),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2, 1, dilation=2), [(2, 2, 6)]),
    "amax": (lambda x: x.amax(1), [(3, 4)]),
    "logsumexp": (lambda x: x.logsumexp(1), [(3, 4)]),
    "var": (lambda x: x.var(1), [(3, 4)]),
    "glu": (F.glu, [(3, 4)]),
    "softmax": (lambda x: x.softmax(1), [(3, 4, 2)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(3, 4)]),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), [(3, 2, 2, 2)]),
    "instance_norm": (F.instance_norm, [(2, 3, 2, 2)]),
    "layer_norm": (lambda x: F.layer_norm(x, (2, 4)), [(3, 2, 4)]),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), [(3, 4)]),
    "group_norm": (lambda x: F.group_norm(x, 2), [(2, 4, 3)]),
    "attention": (F.scaled_dot_product_attention, [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 2)]),
}


@pytest.mark.parametrize("case", NONAFFINE)
def test_jacobian_is_nonzeros_of_derivative(case: str) -> None:
    function, shapes = NONAFFINE[case]
    tensors = _random(*shapes)
    found = _found(function, *tensors)
    assert found.jacobian == sum(_jacobian(function, tensors, k) for k in range(len(tensors)))
    assert 0 < found.application <= found.jacobian


def test_moving_numbers_is_free() -> None:
    for function in (lambda x: x.reshape(-1), lambda x: x.transpose(0, 1), lambda x: F.pad(x, (1, 1))):
        assert _found(function, *_random((3, 4))) == Sparsity()


def test_lookup_is_free() -> None:
    graph = capture(nn.Embedding(7, 3), torch.tensor([[1, 2], [3, 4]]))
    assert sparsity(graph, graph.nodes[-1]) == Sparsity()


def test_unknown_operation_costs_its_entries() -> None:
    found = _found(torch.special.bessel_j0, *_random((3, 4)))
    assert (found.evaluation, found.derivative, found.jacobian, found.application) == (12, 12, 12, 12)


def test_numbers_are_no_factors() -> None:
    found = _found(lambda x: 2.0 * x, *_random((3, 4)))
    assert found.product == 12
    assert len(found.factors) == 1
