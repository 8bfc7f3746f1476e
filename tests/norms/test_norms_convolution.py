"""Norms of convolutions against the matrix of the map, for any parameters PyTorch accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.norms import convolution, convolution_norm, patch_overlap, symbol
from surefoot.norms.hermitian import exponent, times_power

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
BACKWARD = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Case:
    """A convolution as PyTorch is called."""

    weight: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def walk(self) -> dict[str, Any]:
        """The convolution, or that of which it is the adjoint."""
        found = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        if not self.transposed:
            return {**found, "input_size": self.size, "output_size": None}
        parts = zip(self.size, self.stride, self.padding, self.dilation, self.weight.shape[2:], strict=True)
        extra = self.output_padding or (0,) * len(self.size)
        inputs = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in parts]
        size = tuple(n + more for n, more in zip(inputs, extra, strict=True))
        return {**found, "input_size": size, "output_size": self.size}

    def bound(self, **options: float) -> float:
        return convolution_norm(self.weight, groups=self.groups, **self.walk(), **options)

    def apply(self, x: Tensor) -> Tensor:
        dimensions, weight = len(self.size), self.weight.double()
        if self.transposed:
            arguments = (self.stride, self.padding, self.output_padding or 0, self.groups, self.dilation)
            return BACKWARD[dimensions](x, weight, None, *arguments)
        arguments = (self.stride, self.padding, self.dilation, self.groups)
        return FORWARD[dimensions](x, weight, None, *arguments)

    def matrix(self) -> Tensor:
        """The matrix of the map, one column per input entry."""
        channels = self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups
        count = channels * math.prod(self.size)
        basis = torch.eye(count, dtype=torch.float64).reshape(count, channels, *self.size)
        return self.apply(basis).reshape(count, -1).T

    def norm(self) -> float:
        matrix = self.matrix()
        return float(torch.linalg.svdvals(matrix)[0]) if matrix.numel() else 0.0

    def parts(self) -> dict[str, float]:
        """Each of the bounds that convolution_norm chooses from."""
        axes = convolution._axes(kernel=self.weight.shape[2:], **self.walk())
        weight = self.weight.double()
        for dimension, axis in enumerate(axes):
            weight = weight.index_select(2 + dimension, torch.from_numpy(axis.live_taps()))
        if not weight.numel() or not weight.abs().max():
            return {}
        power = exponent(float(weight.abs().max()))
        weight = times_power(weight, -power).unflatten(0, (self.groups, -1))
        lines = [symbol._line(axis) for axis in axes]
        rows, columns = sorted((weight.shape[1], weight.shape[2] * weight[0, 0, 0].numel()))
        price = symbol.symbol_cost(self.groups, rows, columns, weight[0, 0, 0].numel())
        full = price * math.prod(line.torus for line in lines) * 2
        bounds = {
            "dense": convolution._dense_norm(weight, axes, math.inf),
            "schur": convolution._schur_norm(weight),
            "patches": convolution._patch_norm(weight, axes, math.inf),
            "cheap patches": convolution._patch_norm(weight, axes, 1.0),
        }
        for share in (1.0, 0.5, 0.2, 0.1):
            bounds[f"symbol {share}"] = symbol.symbol_norm(weight, axes, full * share)
        return {name: math.ldexp(bound, power) for name, bound in bounds.items()}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dimensions = draw(st.integers(1, 3))
    largest = {1: 14, 2: 6, 3: 3}[dimensions]
    groups = draw(st.integers(1, 3))
    one = {1: st.integers(1, 3)}[1]
    rows, columns = groups * draw(one), draw(one)

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    transposed = draw(st.booleans())
    kernel, stride = each(1, {1: 9, 2: 4, 3: 3}[dimensions]), each(1, 3)
    dilation, size = each(1, 3), each(1, largest)
    padding = tuple(draw(st.integers(0, d * (k - 1) + 1)) for d, k in zip(dilation, kernel, strict=True))
    extra: tuple[int, ...] = ()
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        outputs = [
            (n - 1) * s - 2 * p + r + e for n, s, p, r, e in zip(size, stride, padding, reach, extra, strict=True)
        ]
        assume(min(outputs) >= 1)
    else:
        assume(all(n + 2 * p >= r for n, p, r in zip(size, padding, reach, strict=True)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, *kernel, generator=generator)
    if draw(st.booleans()):
        weight = weight.abs()
    return Case(weight, size, stride, padding, dilation, groups, transposed, extra)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(cases())
def test_every_bound_holds_for_the_matrix_of_the_map(case: Case) -> None:
    exact = case.norm()
    bound = case.bound()
    assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-9) + 1e-300
    for name, part in case.parts().items():
        assert exact * (1 - 1e-12) <= part, name


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def diagonal_wave(taps: int, angle: float) -> Tensor:
    """A filter whose symbol peaks where the two frequencies have opposite signs."""
    index = torch.arange(taps)
    return torch.cos(angle * (index[:, None] - index[None, :]))[None, None]


LARGER = [
    Case(diagonal_wave(4, math.pi / 2), (20, 20), (1, 1), (1, 1), (1, 1), 1),
    Case(diagonal_wave(4, 2.0), (20, 15), (1, 1), (1, 1), (1, 1), 1),
    Case(random(6, 3, 3, 3), (16, 17), (1, 1), (1, 1), (1, 1), 1),
    Case(random(3, 8, 5, 3), (15, 14), (2, 1), (2, 0), (1, 2), 1),
    Case(random(8, 1, 7, 7), (12, 12), (1, 1), (3, 3), (1, 1), 8),
    Case(random(6, 2, 3), (150,), (3,), (4,), (5,), 3),
    Case(random(4, 4, 3, 3).abs(), (14, 14), (1, 1), (1, 1), (1, 1), 1),
    Case(random(5, 4, 4, 4), (9, 8), (2, 3), (1, 1), (1, 1), 1, True, (1, 2)),
    Case(random(4, 2, 2, 3, 2), (6, 5, 7), (1, 2, 1), (1, 1, 0), (2, 1, 1), 2),
]


@pytest.mark.parametrize("case", LARGER)
def test_the_symbol_is_sharp_up_to_the_boundary(case: Case) -> None:
    """The price of the torus, and of visiting only some of its frequencies, on images of some size."""
    exact, parts = case.norm(), case.parts()
    for bound in parts.values():
        assert exact * (1 - 1e-12) <= bound
    assert parts["symbol 1.0"] <= 1.35 * exact
    assert parts["symbol 0.2"] <= 2.0 * parts["symbol 1.0"]


def test_the_symbol_is_exact_when_patches_do_not_overlap() -> None:
    for case in (
        Case(random(9, 3, 4, 4), (12, 8), (4, 4), (0, 0), (1, 1), 1),
        Case(random(9, 3, 1, 1), (5, 6), (1, 1), (0, 0), (1, 1), 1),
        Case(random(4, 3, 3), (17,), (5,), (1,), (1,), 2),
    ):
        assert math.isclose(case.parts()["symbol 1.0"], case.norm(), rel_tol=1e-10)
        assert math.isclose(case.parts()["patches"], case.norm(), rel_tol=1e-10)


def test_the_symbol_approaches_the_norm_of_long_signals() -> None:
    """On n points the filter (1, 1, 1) has norm 1 + 2 cos(π/(n+1)); its symbol has norm 3."""
    exact = 1 + 2 * math.cos(math.pi / 1001)
    bound = convolution_norm(torch.ones(1, 1, 3), 1000, padding=1)
    assert exact <= bound <= 3 * (1 + 1e-12)
    bound = convolution_norm(torch.ones(1, 1, 3, 3), (1000, 1000), padding=1)
    assert exact**2 <= bound <= 9 * (1 + 1e-12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_torus_has_no_wrap_around(
    inputs: int, kernel: int, stride: int, before: int, dilation: int, unused: int
) -> None:
    """On the torus, as on the line, an output meets an input through the same taps."""
    outputs = (inputs + 2 * before - dilation * (kernel - 1) - 1) // stride + 1 - unused
    assume(outputs >= 1)
    axis = symbol.Axis(inputs, outputs, kernel, stride, before, dilation)
    live = axis.live_taps()
    assume(len(live) > 0)
    line = symbol._line(axis)
    offset = dilation * live - before
    first = int((offset // stride).min())
    step = int((offset // stride - first).max()) // line.degree if line.degree else 1
    for output in range(outputs):
        for entry in range(inputs):
            on_line = output * stride + offset == entry
            distance = entry // stride - output - first
            same = (distance % step == 0) & (line.phase == entry % stride)
            on_torus = same & ((distance // step - line.shift) % line.torus == 0)
            assert line.degree == 0 or np.array_equal(on_line, on_torus)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.integers(0, 30), st.integers(0, 2**31))
def test_fewer_frequencies_cost_at_most_the_stated_factor(taps: int, extra: int, seed: int) -> None:
    """The inequality for the values between frequencies, on polynomials with the worst phase as well."""
    generator = np.random.default_rng(seed)
    coefficients = generator.standard_normal((taps, 3, 2)) + 1j * generator.standard_normal((taps, 3, 2))
    if seed % 2:  # two terms are the extreme case
        coefficients[1:-1] = 0
    degree, grid = taps - 1, math.ceil(1.25 * (taps - 1)) + extra

    def largest(angles: np.ndarray) -> float:
        waves = np.exp(1j * angles[:, None] * np.arange(taps)[None, :])
        return float(np.linalg.norm(np.einsum("ft,tab->fab", waves, coefficients), 2, axis=(1, 2)).max())

    line = symbol._Line(np.zeros(taps, dtype=int), np.arange(taps), 10**6)
    everywhere = largest(np.linspace(0, 2 * np.pi, 2001))
    assert degree == line.degree
    assert everywhere <= largest(2 * np.pi * np.arange(grid) / grid) * line.loss(grid) * (1 + 1e-12)


@pytest.mark.parametrize(("degree", "grid"), [(1, 2), (1, 4), (2, 8), (3, 12)])
def test_the_stated_factor_is_reached(degree: int, grid: int) -> None:
    """1 + e^{iM(ω - ω₀)} on N points that miss each of its maxima by as much as they can."""
    line = symbol._Line(np.zeros(2, dtype=int), np.array([0, degree]), 100)
    angles = 2 * np.pi * np.arange(grid) / grid - np.pi / grid
    visited = float(np.abs(1 + np.exp(1j * degree * angles)).max())
    assert math.isclose(2 / visited, line.loss(grid), rel_tol=1e-12)


@pytest.mark.parametrize("factor", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_weights_of_any_scale(factor: float) -> None:
    weight = random(3, 2, 3, 3).double()
    reference = convolution_norm(weight, (9, 9), padding=1)
    assert math.isclose(convolution_norm(weight * factor, (9, 9), padding=1), reference * factor, rel_tol=1e-12)


def test_weights_of_other_types() -> None:
    weight = random(3, 2, 3, 3)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        case = Case(weight.to(dtype), (6, 6), (1, 1), (1, 1), (1, 1), 1)
        assert case.norm() * (1 - 1e-12) <= case.bound() <= case.norm() * (1 + 1e-9)


def test_single_precision_is_sound_and_close() -> None:
    """A budget that only single precision can meet in full."""
    case = Case(random(24, 24, 3, 3), (5, 5), (1, 1), (1, 1), (1, 1), 1)
    price = symbol.symbol_cost(1, 24, 24, 9)
    axes = convolution._axes(kernel=(3, 3), **case.walk())
    lines = [symbol._line(axis) for axis in axes]
    budget = 0.8 * price * (6 * 6 / 2 + 1)
    plan = symbol._plan(lines, 1, 24, 24, 9, budget)
    assert plan == ([6, 6], torch.complex64)
    power = exponent(float(case.weight.abs().max()))
    weight = times_power(case.weight.double(), -power).unflatten(0, (1, -1))
    single = symbol.symbol_norm(weight, axes, budget)
    double = symbol.symbol_norm(weight, axes, 10 * budget)
    assert case.norm() * (1 - 1e-12) <= math.ldexp(double, power)
    assert double * (1 - 1e-12) <= single <= double * (1 + 1e-3)


@pytest.mark.parametrize("budget", [1.0, 1e4, 1e6, 1e8, 1e10])
def test_any_budget_gives_a_bound_and_more_is_not_worse(budget: float) -> None:
    case = Case(random(8, 8, 3, 3), (10, 10), (1, 1), (1, 1), (1, 1), 1)
    exact = case.norm()
    assert exact * (1 - 1e-12) <= case.bound(budget=budget) <= 3 * float(case.weight.norm())
    assert case.bound(budget=1e12) <= case.bound(budget=budget) * (1 + 1e-9)


def test_the_error_of_the_gram_matrices_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(random(3, 4, 3), (40,), (1,), (1,), (1,), 1)
    plain = case.parts()["symbol 1.0"]
    monkeypatch.setattr(symbol, "product_error", lambda inner, dtype: 0.01)
    assert case.parts()["symbol 1.0"] >= 1.01 * plain


def test_padding_by_name() -> None:
    for kernel, dilation in ((3, 1), (4, 1), (4, 3)):
        weight = random(2, 2, kernel)
        basis = torch.eye(22, dtype=torch.float64).reshape(22, 2, 11)
        # PyTorch pads an even kernel more behind than before
        total = dilation * (kernel - 1)
        padded = F.pad(basis, (total // 2, total - total // 2))
        exact = float(
            torch.linalg.svdvals(F.conv1d(padded, weight.double(), dilation=dilation).reshape(22, -1))[0]
        )
        bound = convolution_norm(weight, 11, padding=total // 2, dilation=dilation, output_size=11)
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-9)


def test_zero_infinite_undefined_and_refused() -> None:
    assert convolution_norm(torch.zeros(2, 2, 3), 5) == 0
    assert convolution_norm(torch.tensor([[[math.inf, 1.0]]]), 5) == math.inf
    dead = torch.tensor([[[math.inf, 1.0, math.inf]]])
    assert math.isclose(convolution_norm(dead, 1, padding=1), 1.0, rel_tol=1e-12)
    with pytest.raises(ValueError, match="NaN"):
        convolution_norm(torch.tensor([[[math.nan, 1.0]]]), 5)
    with pytest.raises(ValueError, match="does not fit"):
        convolution_norm(torch.zeros(1, 1, 7), 5)
    with pytest.raises(ValueError, match="groups"):
        convolution_norm(torch.zeros(3, 1, 3), 5, groups=2)
    with pytest.raises(ValueError, match="shape"):
        convolution_norm(torch.zeros(3, 3), 5)
    with pytest.raises(ValueError, match="expected one number or 2"):
        convolution_norm(torch.zeros(1, 1, 3, 3), (5, 5, 5))
    with pytest.raises(ValueError, match="positive"):
        convolution_norm(torch.zeros(1, 1, 3), 5, stride=0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_patch_overlap_is_what_unfolding_counts(data: st.DataObject) -> None:
    size, kernel, stride, dilation = ([data.draw(st.integers(1, top)) for _ in range(2)] for top in (9, 5, 4, 3))
    padding = [data.draw(st.integers(0, 4)) for _ in range(2)]
    assume(all(n + 2 * p > d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)))
    options = {"kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride}
    ones = torch.ones(1, 1, *size, dtype=torch.float64)
    counts = F.fold(F.unfold(ones, **options), size, **options)
    assert patch_overlap(size, kernel, stride, padding, dilation) == int(counts.max())


def test_patch_overlap_of_pooling_with_more_patches() -> None:
    """Five entries, kernel 3, stride 2: two patches, or with ceil_mode and padding 1 as many as it says."""
    assert patch_overlap(5, 3, 2) == 2
    assert patch_overlap(4, 3, 3, output_size=2) == 1
    assert patch_overlap(6, 3, 2) == patch_overlap(6, 3, 2, output_size=3) == 2
    assert patch_overlap((4, 4), 2, 2) == 1
    assert patch_overlap(3, 3, 1, output_size=2) == 2
    assert patch_overlap(3, 3, 1) == 1
