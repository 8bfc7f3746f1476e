r"""A preconditioner of the Gauss-Newton system: Kronecker factors of linear layers and convolutions.

The part of :math:`J^\top RR^\top J` that belongs to a layer :math:`z_i = Wx_i + b` on rows i is
:math:`\sum_{ii'}\tilde x_i\tilde x_{i'}^\top \otimes g_ig_{i'}^\top`, with :math:`\tilde x = (x, 1)` and the
slopes g of the columns of R in z. It is replaced by

.. math:: A \otimes G, \qquad A = \frac1N\sum_i\tilde x_i\tilde x_i^\top, \qquad G = \sum_ig_ig_i^\top

over the N rows (Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
2015; Grosse and Martens for convolutions, whose rows are patches, 2016). It is exact for one row, and where the
slopes do not depend on the row and different rows do not meet in one output. The slopes are those of a random
combination of columns with signs ±1, whose square has the right mean: one pull-back.

With :math:`M = D \otimes I` the damping is included exactly: if :math:`D^{-1/2}AD^{-1/2} = U\Lambda U^\top` and
:math:`G = VNV^\top` with orthonormal columns, perhaps fewer than there are dimensions,

.. math:: (A \otimes G + D \otimes I)^{-1} = (D^{-1/2} \otimes I)\Big(I - (U \otimes V)
    \frac{\Lambda \otimes N}{I + \Lambda \otimes N}(U \otimes V)^\top\Big)(D^{-1/2} \otimes I).

All other parameters are divided by the diagonal of their part: the square of the same pull-back, which has the
right mean, evened out with its average. Whatever the factors are, the result is symmetric and positive definite,
so conjugate gradients converge to the same solution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.graph import Graph
from surefoot.graph.nodes import Ref
from surefoot.operations.call import Use
from surefoot.operations.gram import convolution_rows, linear_rows, unfolded
from surefoot.operations.record import record_of
from surefoot.oracles.factor import factor_of
from surefoot.oracles.gram import Pass, Tap
from surefoot.oracles.gram_layers import arguments_of
from surefoot.oracles.problem import Problem
from surefoot.program.checks import differentiable_attention

_EVEN = 0.5  # weight of the average in a diagonal
_PIECE = 1 << 17  # numbers of rows that are made at a time, if one sample has no more


class Kronecker:
    """Approximate inverses of JᵀRRᵀJ + M, for as many κ as one likes.

    Args:
        problem: the objective around a point.
    """

    def __init__(self, problem: Problem) -> None:
        self._weights, dtype = {path: problem.weight(path) for path in problem.parameters}, problem.output.dtype
        factor = factor_of(problem, dtype, slope=False)
        shape, generator = (factor.samples, factor.columns), torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8)
        with differentiable_attention():
            run = Pass(problem, layers_of(problem.chain.graph))
            slope = factor.forth(signs.mul_(2).sub_(1).to(run.output.device, dtype))
            targets = [run.values[tap.node.name] for tap in run.taps]
            found = run.pull([*targets, *run.parameters.values()], slope, last=True)
            del targets
        run.keep_inputs()
        squares = [part.square() for part in found[len(run.taps) :]]
        self._diagonals = {
            path: torch.lerp(square, square.mean(), _EVEN)
            for path, square in zip(run.parameters, squares, strict=True)
        }
        self._blocks = [
            _block(tap, arguments_of(tap.node, run.values), found.pop(0))  # which frees it after its layer
            for tap in run.taps
        ]

    def inverse(self, kappa: float, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The approximate inverse applied to parameters by path."""
        metric = {path: kappa + weight for path, weight in self._weights.items()}
        result = {
            path: parts[path] / (diagonal + metric[path]).to(parts[path])
            for path, diagonal in self._diagonals.items()
        }
        for block in self._blocks:
            result |= block.inverse(metric, parts)
        return result


@dataclass
class _Block:
    """One layer.

    Attributes:
        paths: of its weight and its bias, by slot.
        x: rows × inputs, with a column of ones where the bias varies, over √N; or fewer rows with the same A.
        left: the eigenvalues of G and its eigenvectors.
    """

    paths: dict[str, str]
    x: Tensor
    left: tuple[Tensor, Tensor]

    def __post_init__(self) -> None:
        self._right: tuple[tuple[float, ...], Tensor, Tensor] | None = None

    def inverse(self, metric: Mapping[str, float], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of its part of the matrix."""
        shapes = {slot: parts[path].shape for slot, path in self.paths.items()}
        columns = {slot: parts[path].reshape(shapes[slot][0], -1) for slot, path in self.paths.items()}
        weights = [metric[self.paths[slot]] for slot in columns]
        several = zip(columns.values(), weights, strict=True)
        root = torch.cat([self.x.new_full(column.shape[1:], w**-0.5) for column, w in several])
        ratios = tuple(w / weights[0] for w in weights)  # the basis depends on them alone
        if self._right is None or self._right[0] != ratios:
            self._right = ratios, *_spectrum(self.x * (root / root[0]))
        (nu, V), (lam, U) = self.left, self._right[1:]
        dtype = next(iter(columns.values())).dtype
        joined = torch.cat(list(columns.values()), dim=1).to(self.x.dtype) * root
        product = torch.outer(nu, lam * root[0] ** 2)
        inside = (V.T @ joined @ U).mul_(product / (1 + product))
        joined = (joined - V @ inside @ U.T).mul_(root).to(dtype)
        split = joined.split([column.shape[1] for column in columns.values()], dim=1)
        return {self.paths[slot]: part.reshape(shapes[slot]) for slot, part in zip(columns, split, strict=True)}


def _block(tap: Tap, arguments: dict[str, Any], slopes: Tensor) -> _Block:
    gram = record_of(tap.node).gram
    is_image = gram is not None and gram.pieces is convolution_rows

    def read(x: Tensor) -> Tensor:
        rows = unfolded({**arguments, "input": x})[:, 0].transpose(1, 2) if is_image else x
        rows = rows.flatten(0, -2)
        columns = [rows if "weight" in tap.paths else rows[:, :0]]
        columns += [rows.new_ones(len(rows), 1)] if "bias" in tap.paths else []
        return torch.cat(columns, dim=1)

    def pulled(g: Tensor) -> Tensor:
        return (g.flatten(2).transpose(1, 2) if is_image else g).flatten(0, -2)

    values, vectors = _spectrum(arguments["input"], read)
    count = slopes.numel() // max(slopes.shape[1 if is_image else -1], 1)
    paths: dict[str, str] = {slot: tap.paths[slot] for slot in ("weight", "bias") if slot in tap.paths}
    return _Block(paths, (vectors * (values / max(count, 1)).sqrt()).T, _spectrum(slopes, pulled))


def _spectrum(samples: Tensor, rows: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
    """The eigenvalues that are not negligible of XᵀX for the rows X of samples, and their eigenvectors.

    Patches are many times as large as the images that they are of: where the rows are more than the columns, they
    are made for a few samples at a time.
    """
    first = rows(samples[:1])
    wide = len(samples) * first.shape[0] < first.shape[1]
    if wide:
        X = rows(samples)
        square = X @ X.T
    else:
        square = first.new_zeros(first.shape[1], first.shape[1])
        for X in map(rows, samples.split(max(1, _PIECE // max(1, first.numel())))):
            square.addmm_(X.T, X)
    values, vectors = torch.linalg.eigh(square)
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1:].clamp(min=0)
    values, vectors = values[kept], vectors[:, kept]
    return values, X.T @ (vectors / values.sqrt()) if wide else vectors


def layers_of(graph: Graph) -> list[Tap]:
    """The linear layers and convolutions in one group whose parameters are used once."""
    names = {leaf.name: leaf.path for leaf in graph.parameters if leaf.name not in graph.outputs}
    found = []
    for node in graph.nodes:
        gram = record_of(node).gram
        if (
            gram is None
            or gram.pieces not in (linear_rows, convolution_rows)
            or not gram.covers(Use(node, graph.spec))
        ):
            continue
        if node.arguments.get("groups", 1) != 1:
            continue
        refs = {slot: node.arguments[slot] for slot in ("weight", "bias")}
        paths = {
            slot: names[ref.name]
            for slot, ref in refs.items()
            if isinstance(ref, Ref) and ref.name in names and len(graph.consumers[ref.name]) == 1
        }
        if paths:
            found.append(Tap(node, paths))
    return found
