r"""The objective of a whole set of data, batch by batch: a step needs the memory of one batch.

Let :math:`F_b` be the objective on batch b, a mean over its samples, and :math:`W_b` what that mean divides by:
the number of samples, of entries, or the class weights of the samples added up. The mean over all samples is
:math:`F = \sum_bW_bF_b/\sum_bW_b`. The :math:`W_b` are rational numbers, and so is the sum of the computed
values: only its last rounding is to be counted, besides :math:`\sum_bW_be_b/\sum_bW_b` of the errors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from surefoot.calculus.leaves import captured
from surefoot.enclosure import Spec
from surefoot.errors import CaptureError, ObjectiveError, describe
from surefoot.graph import Graph, Source
from surefoot.graph.checks import as_inputs, check_inputs
from surefoot.operations.losses.sums import divisor
from surefoot.valuation.passes import Constants
from surefoot.valuation.tape import tape_of
from surefoot.valuation.valuer import Evaluation, EvaluationError, Valuer


def is_loader(x: Any) -> bool:
    """Whether something is many batches, and not one: a tensor, tensors in a row, or tensors by name are one."""
    if isinstance(x, Tensor | Mapping | str) or not isinstance(x, Iterable):
        return False
    return not (isinstance(x, Sequence) and all(isinstance(item, Tensor) for item in x) and len(x))


@dataclass(frozen=True)
class Streamed:
    """The objective of all data at one point.

    Attributes:
        evaluation: value and error.
        gradient: by path of the parameter; ``None`` if it was not asked for.
        batches: how many there were.
        samples: how many there were in them.
    """

    evaluation: Evaluation
    gradient: dict[str, Tensor] | None
    batches: int
    samples: int


class StreamedValuer:
    """Evaluates the objective of all data at many weights, one pass over the loader each.

    Batches of one shape share their operations and what is known of them. Each pass checks that it sees the same
    numbers as the first, in any order: a loader that changes its samples at random has no objective that anything
    could be proved of.

    Args:
        model: the network, as it is at present; make another valuer after a change of modes or attributes. Its
            samples must not interact: batch normalisation in training mode is refused.
        loader: a ``DataLoader``, a list, or any other iterable of batches ``(x, y)`` that can be read many times.
        objective: a loss without targets.

    Raises:
        ObjectiveError: if the loss of all data is not the weighted mean of those of the batches.
        EvaluationError: if the loader can be read only once, or leaves out samples at random.
    """

    def __init__(self, model: nn.Module, loader: Iterable[Any], objective: Any) -> None:
        if isinstance(loader, Iterator):
            raise EvaluationError(
                f"a {type(loader).__name__} can be read only once: pass a DataLoader or a list of batches"
            )
        _refuse_random_samples(loader)
        _refuse_objective(objective)
        self.model, self.loader, self.objective = model, loader, objective
        self._options = dict(objective.options)
        self._valuers: dict[Hashable, Valuer] = {}
        self._outputs: dict[Hashable, Spec] = {}
        self._seen: int | None = None

    @property
    def data(self) -> str:
        """A name for the numbers that the first pass saw; empty before it."""
        return "" if self._seen is None else f"{self._seen:016x}"

    def anew(self) -> StreamedValuer:
        """For the model as it is now, on the same data: a pass that sees others is refused."""
        other = StreamedValuer(self.model, self.loader, self.objective)
        other._seen = self._seen
        return other

    def evaluate(self, weights: Mapping[str, Tensor] | None = None, *, derivatives: bool = False) -> Streamed:
        """One pass over all batches.

        Args:
            weights: by path; by default those of the model.
            derivatives: whether the gradient is wanted. Then errors come by reverse mode, and are smaller.

        Raises:
            CaptureError: if the model cannot be read.
            ObjectiveError: if the objective does not fit.
            UnsupportedOperation: naming an operation whose error is not known.
            EvaluationError: if a value is not finite, or the data are not those of the first pass.
        """
        point = dict(self.model.named_parameters()) if weights is None else weights
        value, error, total = Fraction(0), Fraction(0), Fraction(0)
        gradient: dict[str, Tensor] = {}
        batches = samples = seen = 0
        bounded = True
        for batches, (x, y, own) in enumerate(self._batches(), start=1):
            seen = (seen + sum(map(_digest, (*_tensors(x), y)))) % 2**64  # sums of words wrap around
            samples += len(y)
            if own == 0:
                continue
            count, found, slopes = self._one(x, y, point, derivatives, batches - 1)
            weight = Fraction(count) if own is None else own
            total += weight
            value += weight * Fraction(found.value)
            bounded &= math.isfinite(found.error)
            error += weight * Fraction(found.error if bounded else 0)
            for path, slope in slopes.items():
                if path in gradient:
                    gradient[path].add_(slope, alpha=float(weight))
                else:
                    gradient[path] = slope * float(weight)
        self._check(batches, seen, total)
        whole = total if self._is_mean else Fraction(1)
        mean = float(value / whole)
        apart = math.nextafter(float(error / whole), math.inf) + math.ulp(mean) if bounded else math.inf
        means = {path: slope / float(whole) for path, slope in gradient.items()}
        return Streamed(Evaluation(mean, apart), means if derivatives else None, batches, samples)

    @property
    def obstacle(self) -> str:
        """An operation beyond which nothing was proved at the last pass, in words; empty if there is none."""
        return next((valuer.obstacle for valuer in self._valuers.values() if valuer.obstacle), "")

    @property
    def _is_mean(self) -> bool:
        """Whether the loss divides by something that depends on the batch."""
        return self._options["reduction"] in ("mean", "entries")

    def _batches(self) -> Iterator[tuple[Any, Tensor, Fraction | None]]:
        """Inputs, targets, and what the mean of a loss of class numbers divides by."""
        for number, batch in enumerate(self.loader):
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
                raise EvaluationError(f"a batch is a pair (x, y) of inputs and targets: batch {number} is {kind}")
            with _numbered(number):
                check_inputs(*as_inputs(batch[0]))
                targets = torch.as_tensor(batch[1]).detach()
                weight = _class_weight(self._options, targets)
                if weight != 0:
                    self.objective.check_values(targets)
            yield batch[0], targets, weight

    def _one(
        self, x: Any, y: Tensor, weights: Mapping[str, Tensor], derivatives: bool, number: int
    ) -> tuple[int, Evaluation, dict[str, Tensor]]:
        """What the mean over a batch divides by, its value, and the gradient if that is asked for."""
        tensors = _tensors(x)
        names = tuple(x) if isinstance(x, Mapping) else ()
        key = names, *((tuple(tensor.shape), tensor.dtype) for tensor in (*tensors, y))
        if key not in self._valuers:
            with _numbered(number):
                graph, _ = captured(self.model, x, self.objective.bound_to(y))
                alone, _ = captured(self.model, x, None)
            _refuse_statistics(graph)
            tape = tape_of(graph)
            self._valuers[key] = Valuer(tape, Constants({}, {}), several=True)
            self._outputs[key] = alone.specs(alone.outputs[0])[0]
        valuer = self._valuers[key]
        graph = valuer.tape.graph
        rows = graph.spec(graph.nodes[-1].inputs[0])
        assert isinstance(rows, Spec)
        with _numbered(number):
            self.objective.fit(self._outputs[key], y)
            inputs = dict(zip((leaf.name for leaf in graph.inputs), tensors, strict=True))
            targets = {leaf.name: y for leaf in graph.leaves.values() if leaf.source is Source.TARGET}
            constants = valuer.tape.constants({**inputs, **targets, **graph.held})
            run = valuer.run(weights, derivatives=derivatives, constants=constants)
            found = valuer.enclosed(run)
        count = divisor(rows.shape, str(self._options["reduction"])) if self._is_mean else 1
        return count, found, valuer.gradient(run) if derivatives else {}

    def _check(self, batches: int, seen: int, total: Fraction) -> None:
        if not batches:
            raise EvaluationError("the loader has no batches: there is nothing to evaluate")
        if self._seen not in (None, seen):
            raise EvaluationError(
                "the loader gave other numbers than in the first pass: an objective is a function of the weights "
                "alone. Take out random augmentation, or pass a list of batches"
            )
        self._seen = seen
        if not total:
            raise ObjectiveError("no sample of the loader has a weight: their mean is not defined")


def _class_weight(options: Mapping[str, Any], targets: Tensor) -> Fraction | None:
    """What the mean of a loss of class numbers divides by: the weights of the classes, those ignored left out."""
    if "ignore_index" not in options or options["reduction"] != "mean" or targets.is_floating_point():
        return None
    if options["ignore_index"] is None and options["weight"] is None:
        return Fraction(targets.numel())
    labels, numbers = targets.reshape(-1).long().unique(return_counts=True)
    total = Fraction(0)
    for label, count in zip(labels.tolist(), numbers.tolist(), strict=True):
        if label != options["ignore_index"]:
            weights = options["weight"]
            fits = weights is not None and 0 <= label < len(weights)
            total += count * (Fraction(weights[label]) if fits else 1)
    return total


def _refuse_objective(objective: Any) -> None:
    """Refuse what is not a sum or a mean over the samples."""
    name = type(objective).__name__
    options = getattr(objective, "options", {})
    if not hasattr(objective, "bound_to") or "reduction" not in options:
        raise ObjectiveError(
            f"{name} is not known to be a mean over samples, so that its value on all data does not follow from "
            "those on batches: use a loss of surefoot without targets, such as surefoot.CrossEntropy(), or "
            "surefoot.objectives.from_torch(loss)"
        )
    if objective.targets is not None:
        raise ObjectiveError(f"{name} is bound to targets, but the batches bring their own: use one without")
    for option in ("weight", "pos_weight"):
        numbers = options.get(option)
        if "ignore_index" not in options and isinstance(numbers, tuple) and isinstance(numbers[0], tuple):
            raise ObjectiveError(
                f"the {option} of {name} has a row for each sample of one batch, which batches do not share"
            )


def _refuse_random_samples(loader: Iterable[Any]) -> None:
    if not isinstance(loader, DataLoader) or not loader.drop_last or not isinstance(loader.sampler, RandomSampler):
        return
    if len(loader.sampler) % (loader.batch_size or 1):
        raise EvaluationError(
            "the loader leaves out samples at random (shuffle with drop_last), so that each pass is another "
            "objective: use drop_last=False"
        )


def _refuse_statistics(graph: Graph) -> None:
    for node in graph.nodes:
        arguments = node.arguments
        if node.op == "aten.batch_norm" and (arguments["training"] or arguments["running_mean"] is None):
            raise EvaluationError(
                f"batch normalisation in {describe(node.module)} computes its statistics from each batch, so that "
                "the objective of all data is not a mean over batches: call model.eval(), or evaluate all data as "
                "one batch"
            )


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """Say in which batch an error was met."""
    try:
        yield
    except (EvaluationError, ObjectiveError) as error:
        raise type(error)(f"in batch {number} of the loader: {error}") from error
    except CaptureError as error:
        what = f"in batch {number} of the loader: {error.what}"
        raise CaptureError(what, where=error.where, remedy=error.remedy) from error


def _tensors(x: Any) -> tuple[Tensor, ...]:
    args, kwargs = as_inputs(x)
    return (*args, *kwargs.values())


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(tensor: Tensor) -> int:
    """The bits of all entries, added up as whole numbers: the same for the same entries in any order."""
    return int(tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))


__all__ = ["Streamed", "StreamedValuer", "is_loader"]
