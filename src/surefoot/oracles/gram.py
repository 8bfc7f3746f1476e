r"""Rows of the Jacobian :math:`R^\top J` of a problem layer by layer, and :math:`R^\top JM^{-1}J^\top R` of them.

The layers' results are reached by pull-backs of whole batches, one per column of the blocks of R, where samples
are apart: by the operations (:func:`surefoot.operations.common.separate`) or, at this point, by slopes that are
random in some samples and zero in the others. Two samples differ in a binary digit of their number, so for each
digit two such slopes find every dependence of one sample's output on another one's intermediate result, but for
a cancellation of random numbers. The rows of a parameter that several layers use are the sums of theirs. What is
left - operations without a formula, samples that meet - gets its rows by one pull-back each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.graph import Graph, Leaf, Node
from surefoot.graph.nodes import Ref
from surefoot.operations.common import separate
from surefoot.operations.gram import wide
from surefoot.operations.products import is_linear
from surefoot.oracles.factor import Factor, Rows
from surefoot.oracles.gram_layers import Outer, Outers, pieces, slots_of, whole_rows
from surefoot.oracles.problem import Problem
from surefoot.oracles.symmetric import Symmetric
from surefoot.oracles.vectors import gradients
from surefoot.program.checks import differentiable_attention

MOST_ROWS = 1 << 27  # numbers of rows that are held at a time
MOST_DUAL = 1 << 14  # size of a Gram matrix
_read: WeakKeyDictionary[Graph, tuple[int, list[Tap], bool]] = WeakKeyDictionary()  # see _layers; by samples
FEW = 1 << 17  # numbers in the layers' results up to which pull-backs are faster together than one by one


@dataclass
class Gram:
    """The matrix as a sum.

    Attributes:
        outers: the linear layers on one vector per sample, kept as factors; ``None`` if there are none.
        dense: for each weight of the regulariser, the sum over all other parameters with that weight.
    """

    outers: Outers | None
    dense: Mapping[float, Symmetric]


@dataclass(frozen=True)
class Tap:
    """A layer: its node, and the paths of the parameters found there by slot."""

    node: Node
    paths: dict[str, str]

    @property
    def is_outer(self) -> bool:
        """Whether it is a linear layer on one vector per sample."""
        return is_linear(self.node) and len(self.node.specs[0].shape) == 2

    def outer(self, values: Mapping[str, Any]) -> Outer:
        """It as such a layer."""
        x = values[self.node.arguments["input"].name].detach()
        return Outer(x, self.node.specs[0].shape[1], self.paths.get("weight"), self.paths.get("bias"))


def assemble(problem: Problem, factor: Factor) -> Gram | None:
    """The Gram matrix in the precision of the model; ``None`` where it would be too large."""
    size = factor.samples * factor.columns
    if size > MOST_DUAL:
        return None
    sums = Sums(problem.output, size)
    with differentiable_attention():
        pass_ = pass_of(problem, factor)
        taps, rest = pass_.taps, pass_.rest
        held = sum(leaf.spec.numel for leaf in rest) + sum(tap.node.numel // factor.samples for tap in taps)
        if size * held > MOST_ROWS:
            return None
        shared = pass_.shared
        plain = [tap for tap in taps if tap.is_outer and shared.isdisjoint(tap.paths.values())]
        others = [tap for tap in taps if tap not in plain]
        slopes = pass_.slopes(plain + others, factor)
        if not rest:
            pass_.keep_inputs()
        later = slopes[len(plain) :]
        del slopes[len(plain) :]
        for path, rows in pass_.pieces(others, later, shared):
            sums.add(problem.weight(path), rows)
            del rows  # before the next piece is made
        if rest:
            for path, rows in pass_.rows(rest, factor).items():
                sums.add(problem.weight(path), rows)
        outers = None
        if plain:
            layers = tuple(tap.outer(pass_.values) for tap in plain)
            outers = Outers(layers, torch.cat(slopes, dim=2).to(problem.output.dtype))
    return Gram(outers, sums.finished())


class Sums:
    """Products of rows with themselves, by the weight of the regulariser; narrow pieces wait for one another."""

    def __init__(self, like: Tensor, size: int) -> None:
        self._waiting: dict[float, list[Tensor]] = defaultdict(list)
        self._totals: dict[float, Symmetric] = defaultdict(lambda: Symmetric(like, size))
        self._wide, self._dtype = wide(size), like.dtype

    def add(self, weight: float, rows: Tensor) -> None:
        """Further columns of the rows."""
        rows = rows.to(self._dtype)
        if 2 * rows.shape[1] >= self._wide:
            self._totals[weight].add(rows.T)
            return
        self._waiting[weight].append(rows)
        if sum(part.shape[1] for part in self._waiting[weight]) >= self._wide:
            self._flush(weight)

    def _flush(self, weight: float) -> None:
        self._totals[weight].add(torch.cat(self._waiting.pop(weight), dim=1).T)

    def finished(self) -> dict[float, Symmetric]:
        """The sums."""
        for weight in list(self._waiting):
            self._flush(weight)
        return dict(self._totals)


def jacobian(problem: Problem, factor: Factor) -> Tensor:
    """RᵀJ in the precision of the model: samples · columns × the parameters side by side."""
    size, paths = factor.samples * factor.columns, list(problem.parameters)
    sizes = [value.numel() for value in problem.parameters.values()]
    with differentiable_attention():
        whole = problem.output.new_zeros(size, sum(sizes))
        parts = dict(zip(paths, whole.split(sizes, dim=1), strict=True))
        pass_ = pass_of(problem, factor)
        everything = frozenset(paths)
        for path, rows in pass_.pieces(pass_.taps, pass_.slopes(pass_.taps, factor), everything):
            parts[path].copy_(rows)
        if pass_.rest:
            for path, rows in pass_.rows(pass_.rest, factor).items():
                parts[path].copy_(rows)
    return whole


def taps(graph: Graph, samples: int) -> list[Tap]:
    """The layers whose parameters are used by such layers only."""
    found: list[Tap] = []
    names = {leaf.name: leaf.path for leaf in graph.parameters if leaf.name not in graph.outputs}
    for node in graph.nodes:
        slots = slots_of(graph, node) if node.specs[0].shape[:1] == (samples,) else frozenset()
        arguments = node.arguments if slots else {}
        refs = {slot: arguments[slot] for slot in slots if isinstance(arguments[slot], Ref)}
        counts = [value.name for value in arguments.values() if isinstance(value, Ref)]
        paths = {s: names[r.name] for s, r in refs.items() if r.name in names and counts.count(r.name) == 1}
        if paths:
            found.append(Tap(node, paths))
    uses = {path: len(graph.consumers[name]) for name, path in names.items()}
    return _complete(found, uses)


def _layers(graph: Graph, samples: int) -> tuple[list[Tap], bool]:
    """The same, and whether the operations keep samples apart behind all of them."""
    found = taps(graph, samples)
    return found, samples == 1 or not found or separate(graph, graph.nodes, [t.node.name for t in found], samples)


def _complete(found: list[Tap], uses: Mapping[str, int]) -> list[Tap]:
    """The layers, with those parameters of which every use is among them."""
    counts = Counter(path for tap in found for path in tap.paths.values())
    whole = {path for path, count in counts.items() if count == uses[path]}
    kept = [Tap(tap.node, {s: path for s, path in tap.paths.items() if path in whole}) for tap in found]
    return [tap for tap in kept if tap.paths]


def pass_of(
    problem: Problem, factor: Factor | Rows, graph: Graph | None = None, inputs: Sequence[Tensor] | None = None
) -> Pass:
    """A pass with the layers whose rows are those of single samples."""
    read = problem.chain.graph if graph is None else graph
    if read not in _read or _read[read][0] != factor.samples:
        _read[read] = factor.samples, *_layers(read, factor.samples)
    _, found, are_apart = _read[read]
    first = Pass(problem, found, graph, inputs)
    kept = found if are_apart else first.apart(found, factor)
    if len(kept) == len(found):
        return first
    whole = _complete(kept, Counter(path for tap in found for path in tap.paths.values()))
    return Pass(problem, whole, graph, inputs)


class Pass:
    """One forward pass, and pull-backs to the results of layers and to the parameters of no layer; of a batch of
    the problem, where its data are in pieces.
    """

    def __init__(
        self, problem: Problem, taps: list[Tap], graph: Graph | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        graph = problem.chain.graph if graph is None else graph
        inputs = problem.chain.inputs if inputs is None else inputs
        self.problem, self.taps, self.graph = problem, taps, graph
        uses = Counter(path for tap in taps for path in tap.paths.values())
        self.shared = frozenset(path for path, count in uses.items() if count > 1)
        covered = {path for tap in taps for path in tap.paths.values()}
        leaves = {path: value.detach() for path, value in problem.point.items()}
        self.parameters = {
            leaf.path: leaves[leaf.path].clone().requires_grad_()
            for leaf in graph.parameters
            if leaf.path not in covered
        }
        self.rest = [leaf for leaf in graph.parameters if leaf.path not in covered]
        names = {tap.node.name for tap in taps}
        needed = names.union(graph.outputs, *(tap.node.inputs for tap in taps))
        self.values = graph.bind({**leaves, **self.parameters}, [value.detach() for value in inputs])
        for node in graph.nodes:
            if node.name not in graph.constant_names:
                value = self.values[node.name] = node.run(self.values)
                if node.name in names and not value.requires_grad:
                    value.requires_grad_()
            for name in graph.finished[node.name]:
                if name not in needed:
                    del self.values[name]
        self.output: Tensor = self.values[graph.outputs[0]]

    def keep_inputs(self) -> None:
        """Drop what pull-backs need, and all values but those that layers read: there are no more pull-backs."""
        needed = {name for tap in self.taps for name in tap.node.inputs}
        self.values = {name: value.detach() for name, value in self.values.items() if name in needed}
        self.output = self.output.detach()

    def pull(self, targets: list[Tensor], slope: Tensor, last: bool = False) -> list[Tensor]:
        """The gradients of the output along a slope, perhaps the last one; each counts as a call of the oracle."""
        self.problem.autodiff.calls += 1
        if not self.output.requires_grad:
            return [torch.zeros_like(target) for target in targets]
        found = torch.autograd.grad(self.output, targets, slope, retain_graph=not last, allow_unused=True)
        return [torch.zeros_like(t) if f is None else f for t, f in zip(targets, found, strict=True)]

    def slopes(self, taps: list[Tap], factor: Factor | Rows) -> list[Tensor]:
        """For each layer the slopes of all columns: samples × columns × the rest of the shape of its result."""
        targets = [self.values[tap.node.name] for tap in taps]
        count = factor.columns
        if not targets or not count or not self.output.requires_grad:
            return [target.new_zeros(len(target), count, *target.shape[1:]) for target in targets]
        if count == 1:
            return [slope.unsqueeze(1) for slope in self.pull(targets, next(self._columns(factor)))]
        if sum(target.numel() for target in targets) <= FEW:
            self.problem.autodiff.calls += count
            columns = factor.all_columns(self.output.dtype, self.output.device)
            together = gradients(self.output, targets, columns)
            return [slopes.transpose(0, 1) for slopes in together]
        whole = [target.new_empty(len(target), count, *target.shape[1:]) for target in targets]
        for j, column in enumerate(self._columns(factor)):
            for slopes, found in zip(whole, self.pull(targets, column), strict=True):
                slopes[:, j] = found
        return whole

    def _columns(self, factor: Factor | Rows) -> Iterator[Tensor]:
        for j in range(factor.columns):
            yield factor.column(j, self.output.dtype, self.output.device)

    def pieces(self, taps: list[Tap], slopes: list[Tensor], whole: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """The rows of the parameters of layers by path: those of ``whole`` in one piece, added up over layers."""
        kept: dict[str, list[Tensor]] = {}
        left = Counter(path for tap in taps for path in tap.paths.values())
        for tap in taps:
            found = slopes.pop(0)  # which frees it after its layer
            values = {name: self.values[name].detach() for name in tap.node.inputs}
            parts: dict[str, list[Tensor]] = defaultdict(list)
            for slot, rows in pieces(tap.node, values, found.contiguous(), frozenset(tap.paths)):
                if tap.paths[slot] in whole:
                    parts[tap.paths[slot]].append(rows)
                else:
                    yield tap.paths[slot], rows
                del rows  # before the next piece is made
            for path, several in parts.items():
                kept.setdefault(path, []).append(whole_rows(tap.node, values, several))
                left[path] -= 1
                if not left[path]:
                    uses = kept.pop(path)
                    yield path, uses[0] if len(uses) == 1 else torch.stack(uses).sum(0)

    def rows(self, leaves: list[Leaf], factor: Factor | Rows) -> dict[str, Tensor]:
        """The rows of parameters, one pull-back each."""
        targets = [self.parameters[leaf.path] for leaf in leaves]
        rows: list[list[Tensor]] = [[] for _ in targets]
        columns = list(self._columns(factor))
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

    def apart(self, taps: list[Tap], factor: Factor | Rows) -> list[Tap]:
        """The layers whose row i moves row i of the output only, by slopes that are random."""
        n = factor.samples
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
