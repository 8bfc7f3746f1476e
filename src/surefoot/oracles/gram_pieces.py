"""The Gram matrix of data in pieces (:mod:`surefoot.oracles.gram`), from the factors of its layers.

Batches have their layers' inputs and slopes one below the other, and so have processes: process 0 gathers these
factors, each row once, and forms the products. Rows of parameters that have no such factors are gathered
themselves. So activations cross here, and nowhere else: n·(i + c·o) numbers for n samples and a linear layer from
i to o numbers, c the columns of a block of R.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.chain.batched import Batched
from surefoot.graph import Graph
from surefoot.oracles.factor import Factor, Rows, factor_of
from surefoot.oracles.gram import MOST_DUAL, MOST_ROWS, Gram, Sums, pass_of, taps
from surefoot.oracles.gram_layers import Outer, Outers
from surefoot.oracles.problem import Problem
from surefoot.program.checks import differentiable_attention


@dataclass
class Part:
    """What one process has, over its batches.

    Attributes:
        outers: by paths of weight and bias, what linear layers on one vector per sample read, and their slopes.
        rows: of all other parameters, by path.
        calls: pull-backs of a batch.
    """

    outers: dict[tuple[str | None, str | None], list[tuple[Tensor, Tensor]]]
    rows: dict[str, list[Tensor]]
    calls: int


def factors_of_part(problem: Problem) -> list[Part] | None:
    """The factors of all processes, by rank, on process 0; none on the others; ``None`` if they are too large."""
    several, before = problem.processes, problem.autodiff.calls
    factor = factor_of(problem, problem.output.dtype)
    place = problem.autodiff.first if isinstance(problem.autodiff, Batched) else 0

    def sizes() -> int:
        graphs = [graph for graph, _ in problem.chain.pieces()]
        return sum(_held(graph, factor.columns) for graph in graphs)

    if sum([sizes()] if several is None else several.gathered(sizes)) > MOST_ROWS:
        return None

    def here() -> Part:
        part, start = Part(defaultdict(list), defaultdict(list), 0), place
        for graph, inputs in problem.chain.pieces():
            problem.autodiff.calls = before
            with differentiable_attention():
                start += _add_piece(part, problem, factor, graph, inputs, start)
            part.calls = max(part.calls, problem.autodiff.calls - before)
        problem.autodiff.calls = before
        return part

    return [here()] if several is None else several.collected(here)


def _held(graph: Graph, columns: int) -> int:
    """How many numbers the factors of a batch are, at most."""
    samples = graph.specs(graph.outputs[0])[0].shape[0]
    found = taps(graph, samples)
    inside = {path for tap in found if tap.is_outer for path in tap.paths.values()}
    rest = sum(leaf.spec.numel for leaf in graph.parameters if leaf.path not in inside)
    return samples * columns * rest + sum(
        tap.node.numel * columns + graph.numel(tap.node.arguments["input"].name) for tap in found if tap.is_outer
    )


def _add_piece(
    part: Part, problem: Problem, factor: Factor, graph: Graph, inputs: Sequence[Tensor], start: int
) -> int:
    """Add the factors of a batch, whose samples begin at some number; how many there are."""
    samples = graph.specs(graph.outputs[0])[0].shape[0]
    rows = Rows(factor, slice(start, start + samples))
    pass_ = pass_of(problem, rows, graph, inputs)
    plain = [tap for tap in pass_.taps if tap.is_outer and pass_.shared.isdisjoint(tap.paths.values())]
    others = [tap for tap in pass_.taps if tap not in plain]
    slopes = pass_.slopes(plain + others, rows)
    for tap, slope in zip(plain, slopes, strict=False):
        key = tap.paths.get("weight"), tap.paths.get("bias")
        part.outers[key].append((tap.outer(pass_.values).x, slope.clone()))  # no view: all behind it would cross
    found = dict(pass_.pieces(others, slopes[len(plain) :], frozenset(problem.parameters)))
    for path, several in {**found, **(pass_.rows(pass_.rest, rows) if pass_.rest else {})}.items():
        part.rows[path].append(several)
    return samples


def assemble_pieces(problem: Problem, factor: Factor) -> Gram | None:
    """The Gram matrix from the factors of all batches of all processes; ``None`` where it would be too large."""
    if factor.samples * factor.columns > MOST_DUAL:
        return None
    if problem.processes is not None:
        problem.processes.ask(factors_of_part)
    parts = factors_of_part(problem)
    if parts is None:
        return None
    problem.autodiff.calls += max(part.calls for part in parts)
    sums = Sums(problem.output, factor.samples * factor.columns)
    for path in next((list(part.rows) for part in parts if part.rows), []):
        sums.add(problem.weight(path), torch.cat([rows for part in parts for rows in part.rows.get(path, ())]))
    layers, slopes = [], []
    for key in next((list(part.outers) for part in parts if part.outers), []):
        pairs = [pair for part in parts for pair in part.outers.get(key, ())]
        slopes.append(torch.cat([slope for _, slope in pairs]))
        layers.append(Outer(torch.cat([x for x, _ in pairs]), slopes[-1].shape[2], *key))
    outers = Outers(tuple(layers), torch.cat(slopes, dim=2).to(problem.output.dtype)) if layers else None
    return Gram(outers, sums.finished())
