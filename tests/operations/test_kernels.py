"""Values at the centre against exact arithmetic: what is computed is within the error that is claimed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import surefoot as sf
from operations.case import Case, Fixed, operation, traced
from operations.harness import enclosed
from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import times_power
from surefoot.operations.groups import centred, scaled
from surefoot.scalar import ScalarFunction

aten: Any = torch.ops.aten
mpmath.mp.prec = 400
Number = mpmath.mpf

MEANS = (0.0, 1e5, 1e8, 1e12)
SCALES = (1.0, 1e160, 1e200, 1e-160, 1e-200, 1e-290)
EPSILONS = (1e-5, 1e-300)


def _computed(case: Case) -> tuple[Tensor, Magnitude, Magnitude]:
    """The value at the centre, its error and its bound, as the calculus has them."""
    _, result = enclosed(case, 0.0, torch.Generator().manual_seed(0))
    e = result.enclosures[case.graph.outputs[0]]
    return e.value, e.error, e.bound


def _distance(value: Tensor, exact: list[Number]) -> Number:
    pairs = zip(value.reshape(-1).tolist(), exact, strict=True)
    return mpmath.sqrt(sum((Number(a) - b) ** 2 for a, b in pairs))


def _check(case: Case, exact: list[Number], factor: float | None = 1e-10) -> None:
    """The error is claimed, and the claim is at most ``factor`` times the size of the result."""
    value, error, bound = _computed(case)
    assert bool(value.isfinite().all())
    size = mpmath.sqrt(sum(b**2 for b in exact))
    log2 = mpmath.log(max(_distance(value, exact), Number(2) ** -20000), 2)
    assert log2 <= error.log2
    assert bound.log2 >= mpmath.log(size, 2) - 1e-12 if size else True
    if factor is not None:
        assert error <= Magnitude(float(mpmath.log(size * factor, 2)))


def _normalised(x: list[float], eps: float, *, centre: bool = True) -> list[Number]:
    numbers = [Number(a) for a in x]
    mean = sum(numbers) / len(numbers) if centre else Number(0)
    numbers = [a - mean for a in numbers]
    root = mpmath.sqrt(sum(a * a for a in numbers) / len(numbers) + Number(eps))
    return [a / root for a in numbers]


def _by_rows(groups: Tensor, eps: float, *, centre: bool = True) -> list[Number]:
    return [z for group in groups.tolist() for z in _normalised(group, eps, centre=centre)]


def _data(*shape: int, mean: float = 0.0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(*shape, dtype=torch.float64, generator=generator) + mean) * scale


@pytest.mark.parametrize(("mean", "scale", "eps"), [
    (mean, scale, eps)
    for mean, scale, eps in itertools.product(MEANS, SCALES, EPSILONS)
    if mean == 0 or scale == 1
])  # fmt: skip
def test_normalisations_are_right_at_any_offset_and_scale(mean: float, scale: float, eps: float) -> None:
    image = _data(2, 4, 3, 2, mean=mean, scale=scale).contiguous(memory_format=torch.channels_last)
    flat = image.reshape(2, -1)
    turned = image.transpose(0, 1)
    case = operation(aten.group_norm.default, image, 2, None, None, eps, False)
    _check(case, _by_rows(flat.reshape(4, -1), eps))
    case = operation(aten.layer_norm.default, flat, [24], None, None, eps, False)
    _check(case, _by_rows(flat, eps))
    case = operation(aten.instance_norm.default, image, None, None, None, None, True, 0.0, eps, False)
    _check(case, _by_rows(flat.reshape(8, -1), eps))
    case = operation(aten.batch_norm.default, turned, None, None, None, None, True, 0.0, eps, False)
    exact = torch.arange(48).reshape(2, 4, 6)  # channels of the transposed image are its samples
    order = exact.transpose(0, 1).reshape(-1).tolist()
    rows = _by_rows(flat, eps)
    _check(case, [rows[k] for k in order])
    case = operation(aten.rms_norm.default, flat, [24], None, eps)
    _check(case, _by_rows(flat, eps, centre=False))


def test_a_group_of_equal_numbers_is_within_its_error() -> None:
    for number, eps in itertools.product((0.1, 1e200, 1e-200, 0.0), (1e-5, 1e-300)):
        x = torch.full((1, 7), number, dtype=torch.float64)
        _check(operation(aten.layer_norm.default, x, [7], None, None, eps, False), [Number(0)] * 7, factor=None)


def test_running_statistics_at_the_ends_of_the_range() -> None:
    x, mean = _data(3, 2, scale=1e200), torch.tensor([1e199, -1e-200], dtype=torch.float64)
    for var in ([1e-300, 1e300], [0.0, 1.0]):
        variance = torch.tensor(var, dtype=torch.float64)
        case = operation(
            aten.batch_norm.default, x, None, None, Fixed(mean), Fixed(variance), False, 0.0, 1e-300, False
        )
        exact = [
            (Number(a) - Number(float(mean[k]))) / mpmath.sqrt(Number(var[k]) + Number(1e-300))
            for row in x.tolist()
            for k, a in enumerate(row)
        ]
        value, error, bound = _computed(case)
        if value is not None:  # else it overflows
            assert mpmath.log(max(_distance(value, exact), Number(2) ** -5000), 2) <= error.log2
        assert bound.log2 >= mpmath.log(mpmath.sqrt(sum(b**2 for b in exact)), 2) - 1e-9


@pytest.mark.parametrize("scale", SCALES)
def test_lengths_and_variances(scale: float) -> None:
    x = _data(3, 5, scale=scale)
    rows = [[Number(a) for a in row] for row in x.tolist()]
    lengths = [mpmath.sqrt(sum(a * a for a in row)) for row in rows]
    centred_rows = [[a - sum(row) / 5 for a in row] for row in rows]
    variances = [sum(a * a for a in row) / 4 for row in centred_rows]
    _check(operation(aten.linalg_vector_norm.default, x, 2, [1]), lengths)
    _check(operation(aten.std.correction, x, [1], correction=1), [mpmath.sqrt(v) for v in variances])
    if scale == 1.0:
        _check(operation(aten.var.correction, x, [1], correction=1), variances)
    elif scale < 1:  # what underflows is within the error
        _check(operation(aten.var.correction, x, [1], correction=1), variances, factor=None)
    directions = [a / length for row, length in zip(rows, lengths, strict=True) for a in row]
    _check(traced(lambda t: functional.normalize(t, dim=1, eps=1e-305), x), directions)
    g = _data(3, 1)
    weights = [a * Number(float(g[k])) / lengths[k] for k, row in enumerate(rows) for a in row]
    _check(operation(aten._weight_norm.default, x, g, 0), weights)


@pytest.mark.parametrize("mean", MEANS)
def test_variances_of_numbers_with_a_large_mean(mean: float) -> None:
    x = _data(3, 6, mean=mean)
    rows = [[Number(a) for a in row] for row in x.tolist()]
    exact = [sum((a - sum(row) / 6) ** 2 for a in row) / 5 for row in rows]
    _check(operation(aten.var.correction, x, [1], correction=1), exact)
    _check(operation(aten.std.correction, x, [1], correction=1), [mpmath.sqrt(v) for v in exact])


def test_scaling_is_exact_and_centring_within_its_error() -> None:
    x = _data(4, 9, mean=1e9) * torch.tensor([[1e-300], [1.0], [1e290], [1e-315]], dtype=torch.float64)
    groups = centred(scaled(x))
    for row, numbers, exponent, error in zip(
        x.tolist(), groups.numbers.tolist(), groups.exponents.reshape(-1).tolist(), groups.errors, strict=True
    ):
        unit = Fraction(2) ** exponent
        exact = [Fraction(a) / unit for a in row]
        mean = sum(exact) / len(exact)
        distance = sum((Fraction(c) - a + mean) ** 2 for c, a in zip(numbers, exact, strict=True))
        assert distance <= Fraction(float(error)) ** 2
    assert torch.equal(times_power(scaled(x).numbers, scaled(x).exponents), x)


def _integers(*shape: int, largest: int = 2**18) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-largest, largest + 1, shape, generator=generator).double()


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 9), (4, 3, 3, 3), {}),
    ((1, 16, 12, 12), (16, 16, 3, 3), {"padding": 1}),
    ((1, 4, 20, 20), (4, 4, 5, 5), {"padding": 2}),
    ((1, 8, 9, 9), (8, 1, 3, 3), {"groups": 8}),
    ((1, 4, 11, 11), (6, 4, 3, 3), {"stride": 2, "dilation": 2}),
    ((1, 2, 16, 16), (2, 2, 15, 15), {}),
]


@pytest.mark.parametrize(("data", "weight", "options"), CONVOLUTIONS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions_of_whole_numbers_are_exact(data: Any, weight: Any, options: Any, layout: Any) -> None:
    """They sum products: methods that transform (Winograd, Fourier) would round, as these divide."""
    x, w = _integers(*data).contiguous(memory_format=layout), _integers(*weight)
    computed = functional.conv2d(x, w, **options)
    exact = functional.conv2d(x.long(), w.long(), **options)
    assert torch.equal(computed, exact.double())


@pytest.mark.parametrize("name", ["matmul", "linear", "einsum", "bmm", "cumsum", "mean", "sum"])
def test_sums_of_products_are_within_their_error(name: str) -> None:
    a, b = _data(3, 40) * 10.0 ** _integers(3, 40, largest=8), _data(40, 4) * 10.0 ** _integers(40, 4, largest=8)
    left, right = ([[Fraction(v) for v in row] for row in t.tolist()] for t in (a, b))
    product = [sum(x * row[j] for x, row in zip(line, right, strict=True)) for line in left for j in range(4)]
    cases: dict[str, tuple[Case, list[Fraction]]] = {
        "matmul": (operation(aten.matmul.default, a, b), product),
        "linear": (operation(aten.linear.default, a, b.T.contiguous()), product),
        "einsum": (traced(lambda a, b: torch.einsum("ij,jk->ik", a, b), a, b), product),
        "bmm": (operation(aten.bmm.default, a[None], b[None]), product),
        "cumsum": (operation(aten.cumsum.default, a, 1), [s for row in left for s in itertools.accumulate(row)]),
        "mean": (operation(aten.mean.dim, a, [1]), [sum(row) / 40 for row in left]),
        "sum": (operation(aten.sum.dim_IntList, a, [1]), [sum(row) for row in left]),
    }
    case, exact = cases[name]
    _check(case, [Number(z.numerator) / Number(z.denominator) for z in exact], factor=None)


@pytest.mark.parametrize("product", [
    lambda: operation(aten.mul.Tensor, _data(3), _data(3)),
    lambda: operation(aten.linear.default, _data(2, 3), _data(2, 3)),
    lambda: traced(lambda a, b: torch.einsum("ij,kj->ik", a, b), _data(2, 3), _data(2, 3)),
    lambda: operation(aten.conv1d.default, _data(1, 1, 3), _data(1, 1, 2)),
])  # fmt: skip
def test_products_that_underflow_are_within_their_error(product: Callable[[], Case]) -> None:
    case = product()
    tiny = {name: value * 1e-200 for name, value in case.values.items()}
    value, error, _ = _computed(Case(case.graph, tiny, case.variables))
    large, _, _ = _computed(case)
    assert not bool(value.any())
    assert error.log2 >= float(mpmath.log(Number(float(large.norm())) * Number(1e-200) ** 2, 2)) - 1e-9


def test_a_product_that_underflows_before_it_is_scaled_up() -> None:
    a, b = (torch.full((1, 1), s, dtype=torch.float64) for s in (1e-200, 1e-200))
    weight = torch.full((1, 1, 1), 1e300, dtype=torch.float64)
    value, error, _ = _computed(operation(aten.bilinear.default, a, b, weight))
    assert abs(Number(float(value)) - Number(1e-100)) <= Number(2) ** Number(error.log2)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 1e200, 1e-200])
def test_softmax_and_logarithms_are_within_their_error(scale: float) -> None:
    x = _data(3, 6) * scale
    rows = [[Number(a) for a in row] for row in x.tolist()]
    tops = [max(row) for row in rows]
    sums = [sum(mpmath.exp(a - t) for a in row) for row, t in zip(rows, tops, strict=True)]
    logs = [a - t - mpmath.log(s) for row, t, s in zip(rows, tops, sums, strict=True) for a in row]
    _check(operation(aten.softmax.int, x, 1), [mpmath.exp(z) for z in logs], factor=None)
    _check(operation(aten.log_softmax.int, x, 1), logs, factor=None)
    totals = [t + mpmath.log(s) for t, s in zip(tops, sums, strict=True)]
    _check(operation(aten.logsumexp.default, x, [1]), totals, factor=None)


@pytest.mark.parametrize(("function", "exact"), [
    (lambda t: t - torch.tanh(t), lambda a: a - mpmath.tanh(a)),
    (lambda t: (torch.tanh(t) + 1e7) - 1e7, mpmath.tanh),
    (lambda t: torch.exp(t) - 1 - t, lambda a: mpmath.exp(a) - 1 - a),
    (lambda t: torch.sqrt(t * t), abs),
    (torch.exp, mpmath.exp),
])  # fmt: skip
def test_scalar_functions_that_cancel_are_within_their_error(function: Any, exact: Any) -> None:
    x = torch.tensor([1e-9, 1e-5, 0.3, -2.0, -700.0, 0.0, 1e-200, -740.0], dtype=torch.float64)
    _check(traced(function, x), [exact(Number(a)) for a in x.tolist()], factor=None)


def test_scalar_errors_of_huge_arguments_do_not_vanish() -> None:
    x = torch.tensor([1e200, 1e-5], dtype=torch.float64)
    _, error, _ = _computed(traced(ScalarFunction.named("tanhshrink"), x))
    assert math.isfinite(error.log2)
    assert error >= 1e184


class _Shift(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


def _loss(outputs: Tensor, objective: Any) -> Magnitude:
    """The certified bound of a loss at exactly these outputs."""
    model = _Shift(outputs.double())
    return sf.certify(model, torch.zeros_like(outputs).double(), objective=objective, domain=sf.Ball(0.0)).bound


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("margin", [1.0, 20.0, 36.0, 40.0, 100.0, 700.0, 800.0])
def test_losses_of_confident_outputs(classes: int, margin: float) -> None:
    """Torch computes log(1 + e^-40) as zero."""
    outputs = torch.zeros(1, classes)
    outputs[0, 0] = margin
    rest = mpmath.exp(-Number(margin))
    bound = _loss(outputs, sf.CrossEntropy(torch.tensor([0])))
    exact = mpmath.log(1 + (classes - 1) * rest)
    assert bound.log2 >= mpmath.log(exact, 2)
    assert float(bound) <= float(exact) * (1 + 1e-9) + 1e-15
    one = torch.ones(1, 1, dtype=torch.float64)
    bound = _loss(one * margin, sf.objectives.BinaryCrossEntropy(one))
    assert bound.log2 >= mpmath.log(mpmath.log(1 + rest), 2)


def test_a_loss_whose_terms_cancel() -> None:
    """At exp(x) = t the slope of the Poisson loss is zero, and at x = 1 its value, but for round-off."""
    for step in range(-3, 4):
        x = torch.full((1, 1), 1.0 + step * 2.0**-52, dtype=torch.float64)
        target = torch.full((1, 1), math.e, dtype=torch.float64)
        exact = mpmath.exp(Number(float(x))) - Number(math.e) * Number(float(x))
        assert Number(2) ** Number(_loss(x, sf.objectives.Poisson(target)).log2) >= abs(exact)
