"""One pass over the operations of an objective: what it notes and what it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.enclosure import constant, measure
from surefoot.graph import Node
from surefoot.graph.nodes import in_double
from surefoot.operations.call import Call
from surefoot.operations.normalisation import BATCH
from surefoot.operations.record import record_of
from surefoot.torch_private import differences_together, norms_together
from surefoot.valuation.entropy import ENTROPY, Logistic, entropy
from surefoot.valuation.joints import Links
from surefoot.valuation.normalising import Normalised, Recipe, Statistics, normalised
from surefoot.valuation.samples import Amount, least, together
from surefoot.valuation.single import norm_of, noted

Values = dict[str, Any]

NEAR = 2.0**-20  # to a kink, so that costates are kept entry by entry
_SMALL = 2**16  # entries of a tensor up to which norms of several are taken in one call


@dataclass(frozen=True)
class Plan:
    """What a pass is asked to note and to keep.

    Attributes:
        keep: the names of what is read after the pass; other values are freed after their last reader.
        watch: the names of tensors whose costates are measured.
        weights: parameters whose norms are known, by name of the leaf, with these.
    """

    keep: frozenset[str]
    watch: frozenset[str]
    weights: Mapping[str, tuple[Tensor, float]]


@dataclass(frozen=True)
class Constants:
    """What no parameter enters: values and sizes, by name; of inputs also those of each sample; and, beside masks,
    the names of those that are computed without any error.
    """

    values: Values
    sizes: dict[str, float]
    each: dict[str, Amount] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Near:
    """The entries of an argument that are very near to a kink.

    Attributes:
        nearest: the distance of the nearest of all.
        places: their positions, flat.
        distances: of each of them.
        costates: at these places in the result, once they are computed.
    """

    nearest: float
    places: Tensor | None = None
    distances: Tensor | None = None
    costates: list[Tensor] = field(default_factory=list)


@dataclass
class Run:
    """One pass over a tape.

    Attributes:
        output: the name of the result.
        moving: the names of what a parameter enters.
        values: of the tensors that were kept, by name.
        parameters: those that ask for gradients, by name of the leaf.
        constants: what no parameter enters.
        derivatives: whether costates can be computed.
        whole: whether all values were kept.
        light: whether nothing was noted for errors by reverse mode.
        samples: how many stay apart, so that sizes are those of each; 0 if they are not looked at.
        shifts: the names of parameters that are added to all samples alike.
        rough: whether samples that stay apart are not looked at.
        error: of the value by forward mode, once it was asked for.
        near: how near a scalar function's argument comes to a kink, by name of the function.
        facts: of normalisations.
        losses: what is known of them.
        statistics: what batch-normalisations computed from the batch; ``None`` if one of them is not known.
        watching: the names of tensors whose costates are measured; none comes back where that is zero.
        given: norms that follow from what a tensor is, of samples that are alike.
        aliases: where the norm of a tensor is at most a factor times that of another, its name and the factor.
        recipes: how normalisations are computed.
        masked: of sums with numbers as large as masks hold, the norm of what the entries are off by.
        met: of these, the products of what an entry is off by with its computed costate, added up.
        links: the derivatives between states, if they were asked for.
    """

    output: str
    moving: frozenset[str]
    values: Values
    parameters: dict[str, Tensor]
    constants: Constants
    derivatives: bool
    whole: bool
    light: bool = False
    samples: int = 0
    shifts: frozenset[str] = frozenset()
    rough: bool = False
    error: float | None = None
    near: dict[str, Near] = field(default_factory=dict)
    facts: dict[str, Normalised] = field(default_factory=dict)
    losses: dict[str, Logistic] = field(default_factory=dict)
    statistics: list[Statistics] | None = field(default_factory=list)
    watching: set[str] = field(default_factory=set)
    given: dict[str, float] = field(default_factory=dict)
    aliases: dict[str, tuple[str, float]] = field(default_factory=dict)
    recipes: Mapping[str, Recipe | None] = field(default_factory=dict)
    masked: dict[str, float] = field(default_factory=dict)
    met: dict[str, float] = field(default_factory=dict)
    links: Links | None = None
    _sizes: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _distances: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _known: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    _each: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _matrices: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _squares: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    _later: dict[str, Tensor] = field(default_factory=dict)  # to be measured
    _norms: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  # held by hooks, which the run must not be
    _costates: dict[str, Tensor] = field(default_factory=dict)  # to be measured, likewise

    @cached_property
    def value(self) -> float:
        """The value of the output, which is one number."""
        return float(self.values[self.output].detach())

    def by_formula(self, node: Node, values: Values) -> Tensor | None:
        """The value of an operation by a formula whose error is proved and noted; ``None`` without one."""
        if node.op == ENTROPY:
            loss = entropy(node, values, self.samples)
            if loss is None:
                return None
            self.losses[node.name] = loss[1]
            if node.name == self.output:
                self.value = loss[1].value  # read already
            return loss[0]
        recipe = self.recipes[node.name]
        special = None if recipe is None else normalised(recipe, values[recipe.argument], self.samples)
        if special is None:
            if node.op == BATCH:
                self.statistics = None
            return None
        value, self.facts[node.name], statistics = special
        self.given[node.name] = math.sqrt(value.numel()) * (1 + 2.0**-20)
        if statistics is not None and self.statistics is not None:
            self.statistics.append(statistics)
        return value

    def measure_parameters(self, known: Mapping[str, tuple[Tensor, float]]) -> None:
        """Note the norms of the parameters, or how far they are from tensors of which that is known."""
        here = [in_double(value) for value in self.parameters.values()]  # which do not ask for gradients yet
        names = list(self.parameters)
        if known:
            apart = lengths_between(here, [known[name][0] for name in names])
            self._distances = {n: (t.numel(), d) for n, t, d in zip(names, here, apart, strict=True)}
            self._known = known
        else:
            sizes = norms_together(here)
            self._sizes |= {n: (t.numel(), size) for n, t, size in zip(names, here, sizes, strict=True)}

    def measure(self, name: str, value: Any) -> None:
        """Note the norm of a tensor, or of several together; of each sample where these stay apart."""
        real = _detached(value)
        if not real or (name == self.output and name in self.losses):
            return
        if self.samples and name != self.output:
            self._each[name] = _rows(real, self.samples)
        elif len(real) == 1 and real[0].numel() <= _SMALL:
            self._later[name] = real[0]
        else:
            counts, sizes = zip(*(noted(part.numel(), norm_of(part)) for part in real), strict=True)
            size = sizes[0] if len(sizes) == 1 else torch.linalg.vector_norm(torch.stack(sizes))
            self._sizes[name] = sum(counts), size

    def measure_matrices(self, names: tuple[str, str]) -> None:
        r"""Note the largest norms of the matrices that the last two dimensions of a tensor make; in a light pass
        over samples that stay apart no operator norms.

        The operator norm of A is at most :math:`\|A^\top A\|_F^{1/2}`. Computed, :math:`A^\top A` is off by at
        most :math:`\gamma_k\|A\|_F^2 \le \gamma_k\sqrt n\,\|A^\top A\|_F` with its size n and k numbers per sum.
        """
        for name in names:
            value = self.values[name].detach()
            if name not in self._matrices and value.numel():
                rows, columns = value.shape[-2:]
                self._matrices[name] = rows * columns, _largest(value, self.samples)
                if not (self.light and (self.samples or self.rough)):
                    gram = value.mT @ value if columns <= rows else value @ value.mT
                    self._squares[name] = 4 * rows * columns, _largest(gram, self.samples)

    def note_kinks(self, name: str, argument: str, breaks: tuple[float, ...]) -> None:
        """How near the argument of a scalar function comes to its kinks."""
        x = self.values[argument].detach().reshape(-1)
        if not x.numel():
            self.near[name] = Near(math.inf)
            return
        shifted = [x if point == 0 else x - point for point in breaks]
        squares = min(float((part * part).amin()) for part in shifted)  # faster than absolute values
        nearest = max(math.sqrt(squares) * (1 - 2.0**-50) - 2.0**-500, 0.0) if squares >= 0 else 0.0
        if nearest < NEAR:
            away = torch.stack([part.abs() for part in shifted]).amin(dim=0)
            places = (away < NEAR).nonzero().reshape(-1)
            self.near[name] = Near(nearest, places, away[places])
        else:
            self.near[name] = Near(nearest)

    def weigh(self, node: Node, values: Values, result: Tensor) -> None:
        """Note what every entry of a sum is off by, and its product with the costate when that is computed."""
        stated = record_of(node).entry_error
        assert stated is not None
        errors = stated(exact_call(node, values), result.detach())
        self.masked[node.name] = float(measure(errors)[0])
        if result.requires_grad:
            result.register_hook(self._heard(partial(_met, self.met, node.name, errors)))

    def watched(self, name: str, value: Tensor) -> Tensor:
        """The tensor itself; the norm of its costate is kept when that is computed."""
        if value.requires_grad:
            self.watching.add(name)
            samples = self.samples if name in self.moving and name != self.output else 0
            hook = partial(_seen, self._norms, self._costates, self.near.get(name), name, samples)
            value.register_hook(self._heard(hook))
        return value

    def _heard(self, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        return hook if self.links is None else self.links.heard(hook)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The gradient in each parameter, by name of the leaf."""
        output, wanted = self.values[self.output], list(self.parameters.values())
        if not output.requires_grad:
            return {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        total = output if output.dim() == 0 else output.sum()
        slopes = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        return dict(zip(self.parameters, slopes, strict=True))

    def is_from(self, plan: Plan) -> bool:
        """Whether distances are measured from the weights of a plan."""
        return bool(plan.weights) and self._known is plan.weights

    @cached_property
    def distances(self) -> dict[str, float]:
        """Bounds on how far parameters are from those that are known."""
        return dict(zip(self._distances, self._numbers, strict=False))

    @cached_property
    def _numbers(self) -> list[float]:
        """Bounds on distances, then on norms of all samples together, read at the same time."""
        self._sizes |= _measured(self._later)
        return _bounds([*self._distances.values(), *self._sizes.values()])

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bounds on the norms of values, parameters and constants."""
        sizes = self._numbers[len(self._distances) :]
        found = {name: together(amount) for name, amount in self._bounded.items()} | self.given
        found |= self.constants.sizes | dict(zip(self._sizes, sizes, strict=True))
        for name, loss in self.losses.items():
            found.setdefault(name, abs(loss.value))
        for name, distance in self.distances.items():
            found[name] = (self._known[name][1] + distance) * (1 + 2.0**-50)
        for name, size in found.items():
            if size == math.inf and name in self.values:  # squares overflow, or it is not finite
                found[name] = float(measure(_detached(self.values[name]))[0])
        for name, (other, factor) in self.aliases.items():
            found[name] = found[other] * factor
        return found

    @cached_property
    def _bounded(self) -> dict[str, Amount]:
        """Bounds on the norms of values, of each sample."""
        return dict(zip(self._each, _bounds(list(self._each.values())), strict=True))

    @cached_property
    def each(self) -> Mapping[str, Amount]:
        """The sizes, of each sample where these stay apart; of a shift the part that counts for a sample."""
        if not self.samples:
            return self.sizes
        found: dict[str, Amount] = self.sizes | self.constants.each | self._bounded
        for name, size in self.given.items():
            found[name] = np.full(self.samples, size / math.sqrt(self.samples) * (1 + 2.0**-50))
        for name in self.shifts:
            found[name] = self.sizes[name] / math.sqrt(self.samples) * (1 + 2.0**-50)
        for name, (other, factor) in self.aliases.items():
            found[name] = found[other] if factor == 1 else found[other] * factor
        return found

    @cached_property
    def matrices(self) -> dict[str, Amount]:
        """Bounds on the norms of all matrices of a tensor, of factors that meet matrix by matrix."""
        return dict(zip(self._matrices, _bounds(list(self._matrices.values())), strict=True))

    @cached_property
    def operators(self) -> dict[str, Amount]:
        """Likewise on their operator norms."""
        squares = zip(self._squares, _bounds(list(self._squares.values())), strict=True)
        return self.matrices | {
            name: least(square**0.5 * (1 + 2.0**-50), self.matrices[name]) for name, square in squares
        }

    @cached_property
    def costate_sizes(self) -> dict[str, Amount]:
        """Bounds on the norms of the costates as computed, where they were measured and did come back; of each
        sample where these stay apart.
        """
        _ = self.gradient
        found = self._norms | _measured(self._costates)
        return dict(zip(found, _bounds(list(found.values())), strict=True))


def _seen(
    sizes: dict[str, tuple[int, Tensor]],
    later: dict[str, Tensor],
    near: Near | None,
    name: str,
    samples: int,
    costate: Tensor,
) -> None:
    if samples:
        sizes[name] = _rows([costate.detach()], samples)
    elif costate.numel() <= _SMALL:
        later[name] = costate.detach()
    else:
        sizes[name] = noted(costate.numel(), norm_of(costate))
    if near is not None and near.places is not None:
        near.costates.append(costate.reshape(-1)[near.places])


def exact_call(node: Node, values: Values) -> Call:
    """An operation on these values and no others."""
    return Call(node, {name: constant(in_double(values[name].detach()), 0) for name in node.inputs})


def _met(met: dict[str, float], name: str, errors: Tensor, costate: Tensor) -> None:
    """A sum of non-negative products, rounded up."""
    met[name] = float((errors * costate.detach().abs()).sum()) * (1 + (costate.numel() + 8) * 2.0**-52)


def _measured(later: dict[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """The norms of tensors that were kept for that, in one call; they are freed."""
    wide = [value if value.dtype is torch.float64 else value.double() for value in later.values()]
    found = {n: (t.numel(), size) for n, t, size in zip(later, wide, norms_together(wide), strict=True)}
    later.clear()
    return found


def lengths_between(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """The norms of differences."""
    return norms_together(differences_together(first, second))


def norms(tensors: Iterable[Tensor]) -> list[float]:
    r"""Upper bounds on the Euclidean norms of real tensors.

    A sum of n squares and its root have a relative error of at most (n + 8) 2⁻⁵³; squares that underflow take at
    most :math:`\sqrt n\,2^{-500}` from the norm. Infinite where a square overflows or an entry is not a number.
    """
    given = [tensor.detach() for tensor in tensors]
    return bounds_of(given, norms_together(given))


def bounds_of(tensors: list[Tensor], sizes: list[Tensor]) -> list[float]:
    """The same where norms are computed."""
    return _bounds([(t.numel(), size) for t, size in zip(tensors, sizes, strict=True)])


def norms_of_samples(value: Tensor, samples: int) -> Amount:
    """The same for each sample of a tensor; infinite for all where one is not finite."""
    return _bounds([_rows([value], samples)])[0]


def _rows(parts: list[Tensor], samples: int) -> tuple[int, Tensor]:
    """The norms of the samples of a tensor, and how many numbers each has."""
    rows = [part.reshape(samples, -1) for part in parts]
    value = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    return noted(value.shape[1], norm_of(value, 1))


def _largest(matrices: Tensor, samples: int) -> Tensor:
    """The largest norm of all matrices, or of those of each sample."""
    sizes = torch.linalg.vector_norm(matrices, dim=(-2, -1))
    return sizes.reshape(samples, -1).amax(dim=1) if samples else sizes.amax()


def _bounds(found: list[tuple[int, Tensor]]) -> list[Any]:
    if not found:
        return []
    if any(size.dim() for _, size in found):
        return _bounds_of_samples(found)
    sizes = torch.stack([size for _, size in found]).tolist()
    return [
        size * (1 + (count + 8) * 2.0**-52) + count**0.5 * 2.0**-500 if size < math.inf else math.inf
        for size, (count, _) in zip(sizes, found, strict=True)
    ]


def _bounds_of_samples(found: list[tuple[int, Tensor]]) -> list[Amount]:
    """The same where most are of each sample."""
    rows = torch.stack([size for _, size in found if size.dim()]).cpu().numpy()
    counts = np.array([[count] for count, size in found if size.dim()], dtype=float)
    rows = rows * (1 + (counts + 8) * 2.0**-52) + np.sqrt(counts) * 2.0**-500
    known = iter(rows if np.isfinite(rows).all() else [r if np.isfinite(r).all() else math.inf for r in rows])
    return [next(known) if size.dim() else _bounds([(count, size)])[0] for count, size in found]


def _detached(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()] if value.is_floating_point() else []
    return [part.detach() for part in value if part.is_floating_point()]


def is_measured(value: Any) -> bool:
    """Whether something has a norm: a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
