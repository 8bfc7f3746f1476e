r"""The norm of a convolution from its symbol: one small matrix per frequency.

Let :math:`y_o = \sum_t W_t x_{o + m_t}` be a convolution on the line with finite supports, channels
included in :math:`W_t`, shifts :math:`0 \le m_t \le M`, and :math:`S(\omega) = \sum_t W_t e^{i m_t\omega}`
its symbol.

*Torus.* If inputs live on :math:`[i_0, i_1]`, outputs on :math:`[j_0, j_1]`, and
:math:`N > \max(M + j_1 - i_0,\; i_1 - j_0)`, then modulo :math:`N` no shift but the right one leads from
an output to an input: :math:`m \equiv i - j` and :math:`|m - (i - j)| < N` give :math:`m = i - j`. So the
map is a part (some rows, some columns) of the circular convolution on :math:`N` points, which the unitary
Fourier transform makes block diagonal: its norm is at most :math:`\max_{k<N} \|S(2\pi k/N)\|_2`.

*Fewer frequencies.* For any :math:`N > M`,
:math:`\sup_\omega\|S(\omega)\| \le \max_{k<N}\|S(2\pi k/N)\| / \cos(\pi M/(2N))`. Proof: let the supremum
:math:`s` be reached at :math:`\omega_0` by unit vectors :math:`a, b` with
:math:`a^*S(\omega_0)b = s`. Up to a phase that keeps the absolute value,
:math:`f(\omega) = \mathrm{Re}\,(e^{-iM(\omega-\omega_0)/2}a^*S(\omega)b)` has frequencies within
:math:`\pm M/2`, and :math:`|f| \le s`. By R. Duffin and A. C. Schaeffer (*Some properties of functions of
exponential type*, Bull. AMS 44, 1938) :math:`f'^2 + (M/2)^2 f^2 \le (M/2)^2 s^2`, hence
:math:`f(\omega) \ge s\cos(M(\omega-\omega_0)/2)` for :math:`|\omega - \omega_0| \le \pi/M`; a grid point is
within :math:`\pi/N`. In several dimensions, one after the other.

*Stride* :math:`s`. Inputs split into :math:`s` phases, :math:`x_{si+r}`, that become channels; tap
:math:`t` at offset :math:`\delta t - p = sq + r` acts on phase :math:`r` with shift :math:`q`.
*Dilation.* If all shifts are :math:`q_0 + cm_t`, the residues modulo :math:`c` do not mix and each is a
convolution with shifts :math:`m_t`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.norms.hermitian import gamma, product_error, raise_level, singles_are_exact, unit_roundoff, up
from surefoot.norms.matrix import batched_spectral_norm, spectral_norm

_CHUNK = 2**16  # entries of symbols at a time: they should stay in the cache


@dataclass(frozen=True)
class Axis:
    """One dimension: output ``o`` and tap ``t`` meet input ``o * stride + dilation * t - before``.

    ``inputs``, ``outputs`` and ``kernel`` are numbers of positions and taps, ``before`` is the padding before the
    first input.
    """

    inputs: int
    outputs: int
    kernel: int
    stride: int
    before: int
    dilation: int

    def positions(self) -> np.ndarray:
        """The input of each output and tap, outside [0, inputs) for padding; shape (outputs, kernel)."""
        outputs = self.stride * np.arange(self.outputs)
        return outputs[:, None] + self.dilation * np.arange(self.kernel)[None, :] - self.before

    def meetings(self) -> np.ndarray:
        """Which output and tap meet an input rather than padding; boolean, shape (outputs, kernel)."""
        positions = self.positions()
        return (positions >= 0) & (positions < self.inputs)

    def live_taps(self) -> np.ndarray:
        """The taps that meet an input at least once."""
        return np.flatnonzero(self.meetings().any(axis=0))


@dataclass(frozen=True)
class _Line:
    """An axis as phases and shifts: of each live tap, and the smallest torus without wrap-around."""

    phase: np.ndarray
    shift: np.ndarray
    torus: int

    @property
    def degree(self) -> int:
        """M, the largest shift."""
        return int(self.shift.max())

    def grid(self, density: float) -> int:
        """Frequencies to visit for so many per oscillation: never more than the torus has."""
        wanted = density * self.degree / 2 if self.degree else 1.0
        return self.torus if wanted >= self.torus else math.ceil(wanted)

    def loss(self, grid: int) -> float:
        """The factor that the frequencies left out cost, rounded upwards."""
        if grid == self.torus or self.degree == 0:
            return 1.0
        if 4 * grid < 5 * self.degree:  # up to angles of 1.3 the cosine is accurate to a few units
            return math.inf
        return up(1 / math.cos(math.pi * self.degree / (2 * grid)), 64)


def _line(axis: Axis) -> _Line:
    """Phases, shifts and torus of an axis; see the module's text."""
    offset = axis.dilation * axis.live_taps() - axis.before
    shift, phase = offset // axis.stride, offset % axis.stride
    first = int(shift.min())
    common = int(np.gcd.reduce(shift - first)) or 1
    inputs, torus = -(-axis.inputs // axis.stride), 1
    degree = int((shift - first).max()) // common
    for residue in range(common):  # input c*i + r and output c*j + r - first belong together
        input_high = (inputs - 1 - residue) // common
        output_low = -((residue - first) // common)
        output_high = (first + axis.outputs - 1 - residue) // common
        if input_high >= 0 and output_low <= output_high:
            torus = max(torus, degree + output_high + 1, input_high - output_low + 1)
    return _Line(phase, (shift - first) // common, torus if degree else 1)


def symbol_norm(weight: Tensor, axes: list[Axis], budget: float) -> float:
    r"""An upper bound of the norm of a convolution, from as many frequencies as the budget allows.

    The computed symbol has an error of at most :math:`\kappa\sum_t|W_t|` in each entry, where
    :math:`\kappa` collects: cosines and sines of angles computed as a sum of at most three quotients
    (an error of at most 256u), the inner products, all in double precision, and the conversion to the
    working precision. So the norm is at most
    :math:`\max\|\hat S\| + \kappa\|\sum_t|W_t|\|_F`. The largest :math:`\|\hat S\|^2` comes from Gram
    matrices, as in :func:`~surefoot.norms.matrix.spectral_norm`. Single precision is used where it allows
    so many more frequencies that the bound improves and :func:`~surefoot.norms.hermitian.singles_are_exact`;
    the round-off is accounted for in either case.

    The weight has shape (groups, A, B, taps...), with the live taps only, double precision, its largest entry near
    1. Infinity is returned if the budget of multiplications is not enough for any bound.
    """
    lines = [_line(axis) for axis in axes]
    groups, rows, columns = weight.shape[:3]
    taps = weight.flatten(3).permute(3, 0, 1, 2)  # (taps, groups, A, B)
    phases = np.stack([a.ravel() for a in np.meshgrid(*(line.phase for line in lines), indexing="ij")])
    _, label = np.unique(phases, axis=1, return_inverse=True)
    members = [np.flatnonzero(label.ravel() == phase) for phase in range(int(label.max()) + 1)]
    if all(line.degree == 0 for line in lines):  # one tap in each phase: the symbol is the weight itself
        matrices = weight.flatten(2)
        if groups * min(matrices.shape[1:]) ** 2 * max(matrices.shape[1:]) > budget:
            return math.inf
        return spectral_norm(matrices[0]) if groups == 1 else float(batched_spectral_norm(matrices).max())
    small, large = sorted((rows, len(members) * columns))
    plan = _plan(lines, groups, small, large, len(taps), budget, single=singles_are_exact(weight.device))
    if plan is None:
        return math.inf
    grid, dtype = plan
    total, level = 0.0, 0.25  # some symbol has an entry of at least 1/2, by Parseval
    chunk = max(1, _CHUNK // (groups * small * large))
    error = product_error(large, dtype)
    for waves in _waves(lines, grid, chunk):
        symbols = _symbols(torch.from_numpy(waves).to(weight.device), taps, members).to(dtype)
        symbols = symbols if symbols.shape[1] == small else symbols.mT
        gram = symbols @ symbols.mH
        trace = gram.diagonal(dim1=-2, dim2=-1).real.double().sum(-1)
        extra = trace * (error * (1 + 2 * (error + gamma(small))) * (1 + 2.0**-48))
        level, bound = raise_level(gram, extra, level)
        total = max(total, bound)
    kappa = product_error(len(taps), torch.complex128) + 256 * 2.0**-53 + 2 * unit_roundoff(dtype)
    entries = torch.linalg.vector_norm(weight.abs().flatten(3).sum(-1), dim=(1, 2))
    slack = kappa * float(entries.max()) * (1 + gamma(len(taps) + rows * columns + 16))
    loss = math.prod(map(_Line.loss, lines, grid))
    return up((up(math.sqrt(total)) + slack) * loss, 8)


def _plan(
    lines: list[_Line], groups: int, small: int, large: int, taps: int, budget: float, single: bool = True
) -> tuple[list[int], torch.dtype] | None:
    """The grid and the precision that promise the smallest bound within the budget, if any is allowed."""
    best: tuple[float, list[int], torch.dtype] | None = None
    for dtype, speed in ((torch.complex128, 1.0), (torch.complex64, 2.0))[: 1 + single]:
        inflation = (product_error(large, dtype) / 4 + product_error(small, dtype)) * small / 2
        for density in (math.inf, *np.geomspace(400.0, 2.5, 60)):
            grid = [line.grid(density) for line in lines]
            loss = math.prod(map(_Line.loss, lines, grid)) * (1 + inflation)
            if best is not None and loss >= best[0]:
                break
            frequencies = math.prod(grid) / 2 + 1
            if frequencies * symbol_cost(groups, small, large, taps) <= budget * speed:
                best = (loss, grid, dtype)
                break
    return best[1:] if best is not None and best[0] < math.inf else None


def symbol_cost(groups: int, small: int, large: int, taps: int) -> float:
    """The cost of one frequency, in multiplications of a large matrix product in double precision."""
    products = 4.0 * small**2 * large + 4.0 * small**3 + 2.0 * taps * small * large
    return groups * (products + 800.0 * small * large + 1000.0)  # memory and overhead, measured


def _waves(lines: list[_Line], grid: list[int], chunk: int) -> Iterator[np.ndarray]:
    """Matrices exp(i m_t ω) of at most ``chunk`` frequencies by all taps, in double precision.

    A real weight has conjugate symbols at opposite frequencies, so half of one dimension is enough. In a
    scrambled order, because neighbours are similar and the level should rise early.
    """
    halved = int(np.argmax(grid))
    sizes = [size // 2 + 1 if index == halved else size for index, size in enumerate(grid)]
    order = np.random.default_rng(0).permutation(math.prod(sizes))
    shifts = np.meshgrid(*(line.shift for line in lines), indexing="ij")
    for start in range(0, len(order), chunk):
        indices = np.unravel_index(order[start : start + chunk], sizes)
        turns = np.zeros((len(indices[0]), shifts[0].size))
        for index, shift, size in zip(indices, shifts, grid, strict=True):
            turns += (index[:, None] * shift.ravel()[None, :] % size) / size
        yield np.exp(2j * math.pi * turns)


def _symbols(waves: Tensor, taps: Tensor, members: list[np.ndarray]) -> Tensor:
    """The symbols at the given frequencies, shape (frequencies * groups, A, phases * B)."""
    count, groups, rows, columns = len(waves), *taps.shape[1:]
    parts = []
    for tap_indices in members:
        chosen = torch.from_numpy(tap_indices).to(taps.device)
        flat, wave = taps[chosen].flatten(1), waves[:, chosen]
        parts.append(torch.complex(wave.real @ flat, wave.imag @ flat).view(count, groups, rows, columns))
    return torch.cat(parts, dim=-1).flatten(0, 1)
