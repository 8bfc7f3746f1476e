r"""The objective of a whole set of data, batch by batch: a step needs the memory of one batch.

Let :math:`F_b` be the objective on batch b, a mean over its samples, and :math:`W_b` what that mean divides by:
the number of samples, of entries, or the class weights of the samples added up. The mean over all samples is
:math:`F = \sum_bW_bF_b/\sum_bW_b`. The :math:`W_b` are rational numbers, and so is the sum of the computed
values: only its last rounding is to be counted, besides :math:`\sum_bW_be_b/\sum_bW_b` of the errors.

The batches may lie with several processes. Each sums up its own, as fractions; these few numbers are gathered and
added exactly, so that all processes have the same value and error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import (
    Batches,
    digest,
    digest_of,
    kind_of,
    numbered,
    refuse_other_models,
    refuse_statistics,
    tensors_of,
)
from surefoot.calculus.leaves import captured
from surefoot.enclosure import Spec
from surefoot.errors import EvaluationError, ObjectiveError
from surefoot.graph import Graph, Source
from surefoot.operations.losses.sums import divisor
from surefoot.processes import Processes
from surefoot.program.checks import as_inputs, selected
from surefoot.value.interaction import refuse_interaction
from surefoot.value.valuer import Evaluation, InfiniteValue, Run, Valuer, is_exact_here

_TARGETS, _MODEL = "targets of the loss", "model."  # names in a model with its loss
_MOST = 64  # programs that are held at a time
_PLAIN = {"weight": None, "label_smoothing": 0.0, "ignore_index": None}  # then labels are one-hot distributions
_OTHER_DATA = (
    "the loader gave other numbers than in the first pass: an objective is a function of the weights alone. Take "
    "out random augmentation, or pass a list of batches (to ProvedEpochs as data=), and leave them as they are"
)


@dataclass(frozen=True)
class Streamed:
    """The objective of all data at one point.

    Attributes:
        evaluation: value and error.
        gradient: by path of the parameter; ``None`` if it was not asked for. With several processes, the part of
            this one: the parts add up to it.
        batches: how many there were.
        samples: how many there were in them.

    >>> from surefoot.value.loader import StreamedValuer
    >>> batches = [(torch.eye(2), torch.ones(2, 1))] * 3
    >>> valuer = StreamedValuer(nn.Linear(2, 1), batches, sf.Square())
    >>> valuer.evaluate().samples
    6
    """

    evaluation: Evaluation
    gradient: dict[str, Tensor] | None
    batches: int
    samples: int


@dataclass
class _Sums:
    """Over batches, of value and error by weight, of weights, and of what tells the data apart."""

    value: Fraction = Fraction(0)
    error: Fraction = Fraction(0)
    total: Fraction = Fraction(0)
    unbounded: int = 0
    batches: int = 0
    samples: int = 0
    seen: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


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
        processes: those that hold the data; each has a loader of its own part, which may be empty. All of them
            evaluate at the same time, at the same weights.

    Raises:
        ObjectiveError: if the loss of all data is not the weighted mean of those of the batches.
        EvaluationError: if the loader can be read only once, or leaves out samples at random.

    >>> from surefoot.value.loader import StreamedValuer
    >>> batches = [(torch.eye(2), torch.ones(2, 1))] * 3
    >>> valuer = StreamedValuer(nn.Linear(2, 1), batches, sf.Square())
    >>> valuer.evaluate().evaluation.error < 1e-6
    True
    """

    def __init__(
        self, model: nn.Module, loader: Iterable[Any], objective: Any, processes: Processes | None = None
    ) -> None:
        self._parts = Batches(loader)
        refuse_objective(objective)
        self.model, self.loader, self.objective, self.processes = model, loader, objective, processes
        self._options = dict(objective.options)
        self._valuers: dict[Hashable, Valuer] = {}
        self._outputs: dict[Hashable, Spec] = {}  # by kind of batch
        self._shapes: dict[Hashable, Any] = {}  # of what the loss is a mean over
        self._graphs: dict[Hashable, str] = {}
        self._seen: int | None = None

    @property
    def data(self) -> str:
        """A name for the numbers that the first pass saw; empty before it."""
        return "" if self._seen is None else f"{self._seen:016x}"

    def anew(self) -> StreamedValuer:
        """For the model as it is now, on the same data: a pass that sees others is refused."""
        other = StreamedValuer(self.model, self.loader, self.objective, self.processes)
        other._seen = self._seen
        return other

    def evaluate(
        self,
        weights: Mapping[str, Tensor] | None = None,
        *,
        derivatives: bool = False,
        single: bool = False,
        proved: bool = True,
        summed: bool = True,
    ) -> Streamed:
        """One pass over all batches.

        Args:
            weights: by path; by default those of the model.
            derivatives: whether the gradient is wanted. Then errors come by reverse mode, and are smaller.
            single: whether to compute in single precision where that can be done, which costs half as much;
                errors are larger.
            proved: whether errors are wanted; else they are infinite.
            summed: whether the gradient is wanted itself, and not only errors by reverse mode.

        Raises:
            CaptureError: if the model cannot be read.
            ObjectiveError: if the objective does not fit.
            UnsupportedOperation: naming an operation whose error is not known.
            EvaluationError: if a value is not finite, or the data are not those of the first pass.
            ProcessError: if one of these was raised by another process, or it does not answer.
        """
        point = dict(self.model.named_parameters()) if weights is None else weights
        gradient: dict[str, Tensor] = {}

        def here() -> _Sums:
            return self._summed(point, derivatives, gradient if summed else None, single, proved)

        if self.processes is None:
            sums = here()
        else:
            parts = self.processes.gathered(lambda: self._told(here, point))
            refuse_other_models([digest for _, digest in parts])
            sums = _Sums()
            for rank, (part, _) in enumerate(parts):
                if isinstance(part, str):
                    raise InfiniteValue(f"on process {rank}, {part}")
                sums += part
        self._check(sums.batches, sums.seen % 2**64, sums.total)
        whole = sums.total if self._is_mean else Fraction(1)
        mean = float(sums.value / whole)
        apart = (
            math.inf if sums.unbounded else math.nextafter(float(sums.error / whole), math.inf) + math.ulp(mean)
        )
        means = {path: slope.div_(float(whole)) for path, slope in gradient.items()}
        found = Evaluation(mean, math.inf if sums.unbounded else apart)
        return Streamed(found, means if derivatives and summed else None, sums.batches, sums.samples)

    def _summed(
        self,
        point: Mapping[str, Tensor],
        derivatives: bool,
        gradient: dict[str, Tensor] | None,
        single: bool,
        proved: bool,
    ) -> _Sums:
        """The sums over the batches that are here; the gradient, by weight, is added to what is given, if any."""
        sums, wanted = _Sums(), derivatives and gradient is not None

        def add(x: Any, y: Tensor, own: Fraction | None) -> None:  # which holds nothing of a batch when it is left
            sums.batches += 1
            sums.seen += digest(*tensors_of(x), y)
            sums.samples += len(y)
            if own == 0:
                return
            weight, run, valuer = self._one(x, y, point, derivatives, sums.batches - 1, single, own)
            found = self._enclosed(run, valuer, sums.batches - 1, proved)
            bounded = math.isfinite(found.error)
            sums.total += weight
            sums.value += weight * Fraction(found.value)
            sums.unbounded += not bounded
            sums.error += weight * Fraction(found.error if bounded else 0)
            for name, slope in valuer.gradient(run).items() if wanted else ():
                assert gradient is not None
                path = name.removeprefix(_MODEL)
                if path in gradient:
                    gradient[path].add_(slope, alpha=float(weight))
                else:
                    gradient[path] = slope * float(weight)

        for batch in self._batches():
            add(*batch)
        return sums

    def _told(self, here: Callable[[], _Sums], point: Mapping[str, Tensor]) -> tuple[_Sums | str, int]:
        """The sums of this process, or why there is no value; and which model they are of."""
        try:
            return here(), self._digest_of_model(point)
        except InfiniteValue as error:  # which is no failure, at a trial
            return str(error), self._digest_of_model(point)

    def _digest_of_model(self, point: Mapping[str, Tensor]) -> int:
        """The same where parameters, buffers and the point of a pass are."""
        return digest_of([*self.model.parameters(), *self.model.buffers(), *point.values()])

    @property
    def functions(self) -> dict[Hashable, str]:
        """A name for the function of parameters and buffers, by kind of batch: its operations, with their options
        and constants.
        """
        return dict(self._graphs)

    def check_data(self) -> None:
        """Look at all batches, without a pass.

        Raises:
            EvaluationError: if they are not those of the first pass.
        """
        seen = sum(digest(*tensors_of(x), y) for _, x, y in self._parts) % 2**64
        if self._seen not in (None, seen):
            raise EvaluationError(_OTHER_DATA)

    @property
    def obstacle(self) -> str:
        """An operation beyond which nothing was proved at the last pass, in words; empty if there is none."""
        return next((valuer.obstacle for valuer in self._valuers.values() if valuer.obstacle), "")

    @property
    def _is_mean(self) -> bool:
        """Whether the loss divides by something that depends on the batch."""
        return is_mean(self._options)

    def _batches(self) -> Iterator[tuple[Any, Tensor, Fraction | None]]:
        """Inputs, targets, and what the mean of a loss of class numbers divides by."""
        for number, x, targets in self._parts:
            with numbered(number):
                weight = _class_weight(self._options, targets)
                if weight != 0:
                    self.objective.check_values(targets)
            yield x, targets, weight

    def _one(
        self,
        x: Any,
        y: Tensor,
        weights: Mapping[str, Tensor],
        derivatives: bool,
        number: int,
        single: bool,
        own: Fraction | None,
    ) -> tuple[Fraction, Run, Valuer]:
        """What the mean over a batch divides by, and a pass."""
        with numbered(number):
            kind = tuple(x) if isinstance(x, Mapping) else (), *kind_of(*tensors_of(x), y)
            if kind not in self._shapes:
                graph, _ = captured(self.model, x, self.objective.bound_to(y))
                refuse_statistics(graph)
                if not self._parts.fixed:
                    refuse_interaction(self.model, x, y)
                alone, _ = captured(self.model, x, None)
                self._graphs[kind] = name_of(graph)
                self._shapes[kind] = graph.spec(graph.nodes[-1].inputs[0])
                self._outputs[kind] = alone.specs(alone.outputs[0])[0]
            self.objective.fit(self._outputs[kind], y)
            batch = Batch.of(x, y, self.objective, self._outputs[kind].shape)
            key = kind, batch.whole
            valuer = self._valuers.get(key)
            if valuer is None:
                while len(self._valuers) >= _MOST:
                    self._valuers.pop(next(iter(self._valuers)))
                valuer = self._valuers[key] = batch.valuer(self.model, self.objective)
            bound = valuer.joint.bind(batch.data)
            weight = Fraction(_count(self._shapes[kind], self._options)) if own is None else own
            narrow = valuer.in_single if single and is_exact_here(weights) else None
            for chosen in (valuer,) if narrow is None else (narrow, valuer):
                run = chosen.run(_inner(weights), derivatives=derivatives, bound=bound)
                if math.isfinite(run.value):
                    break
        return weight, run, chosen

    def _enclosed(self, run: Run, valuer: Valuer, number: int, proved: bool) -> Evaluation:
        if not proved and math.isfinite(run.value):
            return Evaluation(run.value, math.inf)
        with numbered(number):
            return valuer.enclosed(run)

    def _check(self, batches: int, seen: int, total: Fraction) -> None:
        if not batches:
            raise EvaluationError("the loader has no batches: there is nothing to evaluate")
        if self._seen not in (None, seen):
            raise EvaluationError(_OTHER_DATA)
        self._seen = seen
        if not total:
            raise ObjectiveError("no sample of the loader has a weight: their mean is not defined")


def _inner(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names that they have in a model with its loss."""
    return {_MODEL + path: value for path, value in weights.items()}


@dataclass(frozen=True)
class Batch:
    """One batch, as its program sees it.

    Attributes:
        args: the positional inputs of the model; ``kwargs``: those by keyword.
        targets: real targets; class numbers as one-hot distributions where that is the same, so that one program
            serves all batches.
        labels: the shape of class numbers, if targets stand for such.
        whole: its whole numbers, which a program depends on.
    """

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    targets: Tensor
    labels: torch.Size | None
    whole: Hashable

    @classmethod
    def of(cls, x: Any, y: Tensor, objective: Any, shape: Sequence[int]) -> Batch:
        """The inputs and targets of a loader, for outputs of this shape."""
        args, kwargs = as_inputs(x)
        options = dict(objective.options)
        plain = all(options.get(name, True) == value for name, value in _PLAIN.items())
        labels = None
        if "ignore_index" in options and plain and not y.is_floating_point():
            rows, numbers = objective.arranged(torch.zeros(()).expand(shape), y)
            labels, y = y.shape, nn.functional.one_hot(numbers.long(), rows.shape[1]).double()
        whole = [t for t in (*args, *kwargs.values(), y) if not t.is_floating_point()]
        return cls(args, kwargs, y, labels, tuple(t.cpu().contiguous().numpy().tobytes() for t in whole))

    @property
    def data(self) -> dict[str, Tensor]:
        """Its tensors by the names of the program's inputs."""
        if self.kwargs:
            return {**self.kwargs, _TARGETS: self.targets}
        return {f"x.{k}": tensor for k, tensor in enumerate((*self.args, self.targets))}

    def valuer(self, model: nn.Module, objective: Any) -> Valuer:
        """The valuer for all batches that differ in real numbers only."""
        whole = _WithLoss(model, objective, self.labels)
        inputs = {**self.kwargs, _TARGETS: self.targets} if self.kwargs else (*self.args, self.targets)
        return Valuer.of(whole, inputs, single=True)


class _WithLoss(nn.Module):
    """A model and its loss, with the targets among the inputs."""

    def __init__(self, model: nn.Module, objective: Any, labels: torch.Size | None) -> None:
        super().__init__()
        self.model, self.objective, self.labels = model, objective, labels

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        targets = kwargs.pop(_TARGETS) if kwargs else args[-1]
        args = () if kwargs else args[:-1]
        outputs = selected(self.model(*args, **kwargs)).double()
        numbers = targets if self.labels is None else torch.zeros(self.labels, dtype=torch.int64)
        rows, arranged = self.objective.arranged(outputs, numbers)
        right = targets if self.labels is not None else arranged
        value: Tensor = type(self.objective).function(rows, right, **self.objective.options)
        return value


def name_of(graph: Graph) -> str:
    """Another name for another function of parameters and buffers."""
    fixed = [value for name, value in graph.held.items() if graph.leaves[name].source is Source.CONSTANT]
    nodes = [(node.name, node.op, node.args, sorted(node.kwargs.items())) for node in graph.nodes]
    return f"{nodes}{graph.outputs}{[tuple(value.shape) for value in fixed]}{digest_of(fixed)}"


def is_mean(options: Mapping[str, Any]) -> bool:
    """Whether a loss divides by the weights of its samples."""
    return options["reduction"] in ("mean", "entries")


def weight_of(graph: Graph, options: Mapping[str, Any], targets: Tensor) -> Fraction:
    """:math:`W_b`, for the graph of the loss of a batch: what its mean divides by, 1 for a sum."""
    weight = _class_weight(options, targets)
    return Fraction(_count(graph.spec(graph.nodes[-1].inputs[0]), options)) if weight is None else weight


def batch_weight(objective: Any, outputs: Tensor, targets: Tensor) -> Fraction:
    """The same from the outputs of a batch."""
    weight = _class_weight(objective.options, targets)
    if weight is not None or not is_mean(objective.options):
        return Fraction(1) if weight is None else weight
    return Fraction(divisor(objective.arranged(outputs, targets)[0].shape, objective.options["reduction"]))


def is_weightless(options: Mapping[str, Any], targets: Tensor) -> bool:
    """Whether all classes of a batch are ignored or have the weight zero, so that it has no mean."""
    return _class_weight(options, targets) == 0


def _count(rows: Any, options: Mapping[str, Any]) -> int:
    """What a mean over samples or entries divides by; 1 for another loss."""
    assert isinstance(rows, Spec)
    return divisor(rows.shape, options["reduction"]) if is_mean(options) else 1


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


def refuse_objective(objective: Any) -> None:
    """Refuse what is not a sum or a mean over the samples.

    Raises:
        ObjectiveError: in that case.
    """
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
