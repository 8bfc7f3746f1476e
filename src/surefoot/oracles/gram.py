r"""The Gram matrix :math:`R^\top JM^{-1}J^\top R` of a problem, assembled layer by layer.

The layers' results are reached by pull-backs of whole batches, one per column of the blocks of R, where samples
are apart: by the operations (:func:`surefoot.operations.rows.separate`) or, at this point, by slopes that are
random in some samples and zero in the others. Two samples differ in a binary digit of their number, so for each
digit two such slopes find every dependence of one sample's output on another one's intermediate result, but for
a cancellation of random numbers. What is left - parameters used more than once, operations without a formula,
samples that meet - gets its rows by one pull-back each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.graph import Graph, Leaf, Node
from surefoot.graph.nodes import Ref
from surefoot.operations.rows import separate
from surefoot.oracles.factor import Factor
from surefoot.oracles.gram_layers import Outer, Outers, pieces, slots_of
from surefoot.oracles.problem import Problem
from surefoot.oracles.vectors import gradients

_MOST_ROWS = 1 << 27  # numbers of rows that are held at a time
_MOST_DUAL = 1 << 14  # size of a Gram matrix
_FEW = 1 << 17  # numbers in the layers' results up to which pull-backs are faster together than one by one


@dataclass
class Gram:
    """The matrix as a sum.

    Attributes:
        outers: the linear layers on one vector per sample, kept as factors; ``None`` if there are none.
        dense: for each weight of the regulariser, the sum over all other parameters with that weight.
    """

    outers: Outers | None
    dense: Mapping[float, Tensor]


@dataclass(frozen=True)
class _Tap:
    """A layer: its node, and the paths of the parameters found there by slot."""

    node: Node
    paths: dict[str, str]

    @property
    def is_outer(self) -> bool:
        """Whether it is a linear layer on one vector per sample."""
        return self.node.op == "aten.linear" and len(self.node.specs[0].shape) == 2

    def outer(self, values: Mapping[str, Any]) -> Outer:
        """It as such a layer."""
        x = values[self.node.arguments["input"].name].detach()
        return Outer(x, self.node.specs[0].shape[1], self.paths.get("weight"), self.paths.get("bias"))


def assemble(problem: Problem, factor: Factor) -> Gram | None:
    """The Gram matrix in the precision of the model; ``None`` where it would be too large."""
    size = factor.samples * factor.columns
    if size > _MOST_DUAL:
        return None
    graph = problem.chain.graph
    taps = _taps(graph, factor.samples)
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        pass_ = _Pass(problem, taps)
        kept = pass_.apart(taps, factor)
        if len(kept) < len(taps):
            taps, pass_ = kept, _Pass(problem, kept)
        covered = {path for tap in taps for path in tap.paths.values()}
        rest = [leaf for leaf in graph.parameters if leaf.path not in covered]
        held = sum(leaf.spec.numel for leaf in rest) + sum(tap.node.numel // factor.samples for tap in taps)
        if size * held > _MOST_ROWS:
            return None
        sums: dict[float, Tensor] = defaultdict(lambda: problem.output.new_zeros(size, size))
        plain = [tap for tap in taps if tap.is_outer]
        others = [tap for tap in taps if not tap.is_outer]
        slopes = pass_.slopes(plain + others, factor)
        for tap, found in zip(others, slopes[len(plain) :], strict=True):
            values = {name: pass_.values[name].detach() for name in tap.node.inputs}
            for slot, rows in pieces(tap.node, values, found.transpose(0, 1).contiguous(), frozenset(tap.paths)):
                sums[problem.weight(tap.paths[slot])].addmm_(rows, rows.T)
        if rest:
            for path, rows in pass_.rows(rest, factor).items():
                sums[problem.weight(path)].addmm_(rows, rows.T)
        outers = None
        if plain:
            layers = tuple(tap.outer(pass_.values) for tap in plain)
            outers = Outers(layers, torch.cat([found.transpose(0, 1) for found in slopes[: len(plain)]], dim=2))
    return Gram(outers, dict(sums))


def _taps(graph: Graph, samples: int) -> list[_Tap]:
    """The layers whose parameters are used nowhere else."""
    once = {
        leaf.name: leaf.path
        for leaf in graph.parameters
        if len(graph.consumers[leaf.name]) == 1 and leaf.name not in graph.outputs
    }
    taps = []
    for node in graph.nodes:
        slots = slots_of(graph, node) if node.specs[0].shape[:1] == (samples,) else frozenset()
        arguments = node.arguments if slots else {}
        refs = {slot: arguments[slot] for slot in slots if isinstance(arguments[slot], Ref)}
        counts = [value.name for value in arguments.values() if isinstance(value, Ref)]
        paths = {s: once[r.name] for s, r in refs.items() if r.name in once and counts.count(r.name) == 1}
        if paths:
            taps.append(_Tap(node, paths))
    return taps


class _Pass:
    """One forward pass, and pull-backs to the results of layers and to the parameters of no layer."""

    def __init__(self, problem: Problem, taps: list[_Tap]) -> None:
        graph = problem.chain.graph
        self.problem = problem
        covered = {path for tap in taps for path in tap.paths.values()}
        leaves = {path: value.detach() for path, value in problem.point.items()}
        self.parameters = {
            leaf.path: leaves[leaf.path].clone().requires_grad_()
            for leaf in graph.parameters
            if leaf.path not in covered
        }
        names = {tap.node.name for tap in taps}
        self.values = graph.bind({**leaves, **self.parameters}, [value.detach() for value in problem.chain.inputs])
        for node in graph.nodes:
            if node.name not in graph.constant_names:
                value = self.values[node.name] = node.run(self.values)
                if node.name in names and not value.requires_grad:
                    value.requires_grad_()
        self.output: Tensor = self.values[graph.outputs[0]]

    def pull(self, targets: list[Tensor], slope: Tensor) -> list[Tensor]:
        """The gradients of the output along a slope; each counts as a call of the oracle."""
        self.problem.autodiff.calls += 1
        if not self.output.requires_grad:
            return [torch.zeros_like(target) for target in targets]
        found = torch.autograd.grad(self.output, targets, slope, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(t) if f is None else f for t, f in zip(targets, found, strict=True)]

    def slopes(self, taps: list[_Tap], factor: Factor) -> list[Tensor]:
        """For each layer the slopes of all columns: columns × the shape of its result."""
        targets = [self.values[tap.node.name] for tap in taps]
        columns = factor.slopes(self.output.dtype, self.output.device)
        if not targets or not columns or not self.output.requires_grad:
            return [target.detach().new_zeros(len(columns), *target.shape) for target in targets]
        if sum(target.numel() for target in targets) <= _FEW:
            self.problem.autodiff.calls += len(columns)
            return gradients(self.output, targets, torch.stack(columns))
        single = [self.pull(targets, column) for column in columns]
        return [torch.stack(column) for column in zip(*single, strict=True)]

    def rows(self, leaves: list[Leaf], factor: Factor) -> dict[str, Tensor]:
        """The rows of parameters, one pull-back each."""
        targets = [self.parameters[leaf.path] for leaf in leaves]
        rows: list[list[Tensor]] = [[] for _ in targets]
        columns = factor.slopes(self.output.dtype, self.output.device)
        for i in range(factor.samples):
            for column in columns:
                slope = torch.zeros_like(column)
                slope[i] = column[i]
                for kept, found in zip(rows, self.pull(targets, slope), strict=True):
                    kept.append(found.reshape(-1))
        return {
            leaf.path: torch.stack(found) if found else target.new_zeros(0, target.numel())
            for leaf, found, target in zip(leaves, rows, targets, strict=True)
        }

    def apart(self, taps: list[_Tap], factor: Factor) -> list[_Tap]:
        """The layers whose row i moves row i of the output only."""
        n, graph = factor.samples, self.problem.chain.graph
        if n == 1 or not taps or separate(graph, graph.nodes, [tap.node.name for tap in taps], n):
            return taps
        targets = [self.values[tap.node.name] for tap in taps]
        meets = [False] * len(taps)
        numbers = torch.arange(n, device=self.output.device)
        generator = torch.Generator().manual_seed(0)
        for bit in range((n - 1).bit_length()):
            for side in (0, 1):
                chosen = (numbers >> bit) % 2 == side
                slope = torch.randn(self.output.shape, generator=generator).to(self.output)
                slope[~chosen] = 0
                for k, found in enumerate(self.pull(targets, slope)):
                    meets[k] = meets[k] or bool(found[~chosen].any())
        return [tap for tap, met in zip(taps, meets, strict=True) if not met]


__all__ = ["Gram", "assemble"]
