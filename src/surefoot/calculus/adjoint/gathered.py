"""Norms of matrices that come in column by column: sums of squares, and Gram matrices of rows by sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.calculus.adjoint.samples import require_moderate
from surefoot.calculus.forward import Pass
from surefoot.magnitude import Magnitude
from surefoot.norms.hermitian import eigenvalue_bounds, gamma, singles_are_exact

_GRAMS = 2.5e8  # numbers in all Gram matrices
_WIDE = 256  # samples with more entries have theirs in single precision


@dataclass(frozen=True)
class Sizes:
    """Norms of a matrix with one row for each entry of a tensor."""

    whole: Magnitude  # of all of it
    # of the rows of each sample; ``None`` if entries are not told apart by samples
    samples: Magnitude | None = None
    entries: Tensor | None = None  # of every row, in the shape of the tensor; ``None`` if they are not known


class Gathered:
    """Sums of squares and Gram matrices of the derivatives of some tensors and costates, as they come in."""

    def __init__(
        self, result: Pass, labels: Mapping[str, Tensor], count: int, read: list[str], written: list[str]
    ) -> None:
        self.read, self.written, self.count = read, written, count
        self.squares: dict[tuple[str, str], Tensor] = {}
        self.grams: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        room = _GRAMS
        keys = [("first", name) for name in read] + [("second", name) for name in written]
        values = {name: result.enclosures[name].value for _, name in keys}
        self.shapes = {name: value.shape for name, value in values.items()}
        self.order: dict[str, Tensor] = {}
        for name, value in values.items():
            found = labels.get(name)
            if found is None and value.shape[:1] == (count,):
                found = (
                    torch.arange(count, device=value.device)
                    .reshape(-1, *[1] * (value.dim() - 1))
                    .expand(value.shape)
                )
            if found is not None and value.numel() % count == 0:
                flat = found.flatten()
                order = flat.argsort(stable=True)
                if bool(
                    (flat[order].reshape(count, -1) == torch.arange(count, device=value.device)[:, None]).all()
                ):
                    self.order[name] = order
        for key in sorted(keys, key=lambda key: values[key[1]].numel()):
            value = values[key[1]]
            self.squares[key] = torch.zeros(value.numel(), dtype=torch.float64, device=value.device)
            width = value.numel() // count if key[1] in self.order else 0
            if width and count * width**2 <= room:
                room -= count * width**2
                narrow = width > _WIDE and singles_are_exact(value.device)
                dtype = torch.float32 if narrow else torch.float64
                self.grams[key] = self.order[key[1]], value.new_zeros(count, width, width, dtype=dtype)

    def add(self, kind: str, name: str, moved: Tensor) -> None:
        """Take in the derivatives along some directions: directions × the shape of the tensor."""
        require_moderate(moved)
        flat = moved.unsqueeze(-1).flatten(1)
        self.squares[kind, name] += flat.square().sum(0)
        if (kind, name) in self.grams:
            order, gram = self.grams[kind, name]
            rows = flat[:, order].to(gram.dtype).reshape(len(flat), self.count, -1).permute(1, 2, 0)
            gram.baddbmm_(rows, rows.mT)

    def whole(self, kind: str, name: str) -> Magnitude:
        """The Frobenius norm of what was computed."""
        return Magnitude.of(math.sqrt(float(self.squares[kind, name].sum())) * (1 + 2.0**-20)) + 2.0**-400

    def sizes(self, kind: str, name: str, error: Magnitude, directions: int) -> Sizes:
        """Bounds from them, with an error of the whole matrix added.

        Sums of n products of numbers are off by γ_n of the sum of their absolute values, that of a Gram matrix in
        norm by as much of its trace; no square underflows by more than is added.
        """
        rounding = 2 * gamma(directions + 64)
        squares = self.squares[kind, name] * (1 + rounding) + 2.0**-900
        entries = squares.sqrt()
        wrong = float(error)
        samples = None
        if name in self.order:
            per = squares[self.order[name]].reshape(self.count, -1)
            total = per.sum(1) * (1 + 2 * gamma(per.shape[1] + 16))
            if (kind, name) in self.grams:
                _, gram = self.grams[kind, name]
                sharp = eigenvalue_bounds(gram) + 2 * gamma(directions + 64, gram.dtype) * total
                total = torch.minimum(total, sharp)
            samples = Magnitude.of(total.sqrt() * (1 + 2.0**-40)) + error
            whole = samples.norm()
        else:
            whole = Magnitude.of(math.sqrt(float(squares.sum())) * (1 + 2.0**-20)) + error
        return Sizes(whole, samples, (entries * (1 + 2.0**-40) + wrong).reshape(self.shapes[name]))
