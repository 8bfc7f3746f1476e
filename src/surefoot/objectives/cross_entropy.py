"""Losses of class numbers: the logistic loss, and the likelihood of outputs that are log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from surefoot.graph.nodes import Spec
from surefoot.objectives.base import Averaging, Loss, frozen_numbers, refuse_empty, shape_of, spec_of
from surefoot.objectives.constants import Constants, ObjectiveError, logistic_loss, supervised
from surefoot.operations.losses.cross_entropy import ClassWeights


class ClassLoss(Loss):
    """A loss of outputs (samples × classes) and class numbers.

    Outputs of more dimensions hold several such rows: those of a sequence (samples × times × classes) or of an
    image (samples × classes × height × width), with one class number for each. The dimension of the classes
    follows from the shape of the targets, or is given by ``class_dim``.
    """

    reductions = ("mean", "sum")
    compared_with = "class numbers (samples)"
    weight: ClassWeights
    ignore_index: int | None

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        ignore_index: int | None = None,
        class_dim: int | None = None,
        **options: Any,
    ) -> None:
        self.class_dim = None if class_dim is None else int(class_dim)
        numbers, name = frozen_numbers(weight, f"the class weight of {type(self).__name__}"), type(self).__name__
        if not (numbers is None or (isinstance(numbers, tuple) and all(isinstance(n, float) for n in numbers))):
            raise ObjectiveError(f"the class weight of {name} has one dimension, one entry per class")
        ignored = None if ignore_index is None else int(ignore_index)
        super().__init__(targets, weight=numbers, ignore_index=ignored, **options)

    def check_values(self, targets: Tensor) -> None:
        """Refuse negative class numbers, and a mean of samples without any weight."""
        name, labels = type(self).__name__, targets.long()
        counted = labels if self.ignore_index is None else labels[labels != self.ignore_index]
        if counted.numel() and int(counted.min()) < 0:
            raise ObjectiveError(
                f"class numbers of {name} are not negative, got {int(counted.min())}; samples that do not count "
                "are marked by ignore_index"
            )
        if self.reduction != "mean" or not labels.numel():
            return
        weight = self.weight
        if not counted.numel() or (
            weight is not None and not any(weight[k] for k in counted.unique().tolist() if k < len(weight))
        ):
            raise ObjectiveError(
                f"no sample of {name} has a weight: their mean is not defined. Use reduction='sum'"
            )

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Refuse outputs and targets of other shapes, and another number of class weights."""
        assert targets is not None
        name = type(self).__name__
        classes = outputs.shape[self._dimension(outputs, targets)]
        refuse_empty(name, outputs)
        if self.weight is not None and len(self.weight) != classes:
            raise ObjectiveError(
                f"{name} has {len(self.weight)} class weights, the outputs have {classes} classes"
            )

    def _dimension(self, outputs: Spec, targets: Spec) -> int:
        """The dimension of the classes: ``class_dim``, or the one that fits the targets."""
        name, rank = type(self).__name__, len(outputs.shape)
        possible = (
            [1] if rank == 2 else sorted({1, rank - 1}) if self.class_dim is None else [self.class_dim % rank]
        )
        fitting = [dim for dim in possible if rank > 1 and self._expected(outputs, targets, dim) == targets.shape]
        if len(fitting) == 1:
            return fitting[0]
        got = f"got {shape_of(outputs)} and {shape_of(targets)}"
        if fitting:
            raise ObjectiveError(
                f"classes may be in dimension {' or '.join(map(str, fitting))} of the outputs of {name}, {got}: "
                f"say class_dim={fitting[0]} or class_dim={fitting[1]}"
            )
        more = "" if rank < 3 else "; of sequences and images, one for each row of classes"
        raise ObjectiveError(f"{name} compares outputs (samples × classes) with {self.compared_with}{more}, {got}")

    def _expected(self, outputs: Spec, targets: Spec, dim: int) -> tuple[int, ...]:
        """The shape that targets have if this is the dimension of the classes."""
        return outputs.shape[:dim] + outputs.shape[dim + 1 :]

    def arranged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets with one row for each class number."""
        if outputs.dim() == 2:
            return outputs, targets
        dim = self._dimension(spec_of(outputs), spec_of(targets))
        rows = outputs.movedim(dim, -1).flatten(0, -2)
        if targets.is_floating_point():
            return rows, targets.movedim(dim, -1).flatten(0, -2)
        return rows, targets.flatten()

    def constants(
        self, outputs: Tensor | Sequence[int], targets: Any = None, *args: Any, **kwargs: Any
    ) -> Constants:
        """See :meth:`Objective.constants <surefoot.objectives.Objective.constants>`; all rows count as samples."""
        spec = spec_of(outputs)
        if len(spec.shape) == 2:
            return super().constants(outputs, targets, *args, **kwargs)
        if targets is None and self.targets is None:
            classes = spec.shape[-1 if self.class_dim is None else self.class_dim] if spec.shape else 0
            rows = (spec.numel // classes, classes) if classes else spec.shape
            return self.bound_to(None).constants(rows, None, *args, **kwargs)
        chosen = self.chosen(targets)
        self.fit(spec, chosen)
        outputs, flat = self.arranged(torch.empty(spec.shape, device="meta"), chosen)
        return super().constants(tuple(outputs.shape), flat, *args, **kwargs)

    def target_spec(self, outputs: Spec) -> Spec:
        """Class numbers."""
        return Spec(outputs.shape[:1] if len(outputs.shape) == 2 else outputs.shape[:-1], torch.int64)

    def fit(self, outputs: Spec, targets: Tensor) -> None:
        """Refuse class numbers that are not below the number of classes."""
        super().fit(outputs, targets)
        if targets.is_floating_point() or targets.device.type == "meta":
            return
        labels = targets if self.ignore_index is None else targets[targets != self.ignore_index]
        classes = outputs.shape[self._dimension(outputs, spec_of(targets))]
        if labels.numel() and int(labels.max()) >= classes:
            raise ObjectiveError(
                f"{type(self).__name__} has {classes} classes, numbered from 0, and met the class number "
                f"{int(labels.max())}"
            )


class CrossEntropy(ClassLoss):
    r""":math:`h(\hat y) = \frac1n\sum_i\big(\log\sum_k e^{\hat y_{ik}} - \hat y_{i,y_i}\big)`, the logistic loss.

    Targets are class numbers (n), or distributions over the classes (n × k), one-hot or soft. The options have the
    same meaning as in ``torch.nn.CrossEntropyLoss``; the mean of weighted samples divides by their weights.
    Outputs of sequences (n × t × k) and images (n × k × h × w) are compared with one target for each place, and
    the mean is over all places that count.

    Args:
        targets: targets to bind to the loss, or ``None``.
        weight: one non-negative number per class.
        label_smoothing: at least 0, less than 1.
        ignore_index: samples of this class number do not count; ``None`` if all count.
        class_dim: the dimension of the classes, where it does not follow from the shape of the targets.
        reduction: ``"mean"`` or ``"sum"``.
        scale: a positive factor.

    >>> round(float(sf.CrossEntropy()(torch.zeros(2, 10), torch.tensor([3, 7]))), 6)
    2.302585
    """

    operation = "surefoot.cross_entropy"
    compared_with = "class numbers (samples) or distributions (samples × classes)"

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        class_dim: int | None = None,
        **averaging: Unpack[Averaging],
    ) -> None:
        if not 0 <= float(label_smoothing) < 1:
            raise ObjectiveError(f"the label smoothing is at least 0 and less than 1, got {label_smoothing!r}")
        options: dict[str, Any] = {"label_smoothing": float(label_smoothing), "ignore_index": ignore_index}
        super().__init__(targets, weight=weight, class_dim=class_dim, **averaging, **options)

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets that are neither class numbers nor distributions."""
        if not targets.is_floating_point():
            super().check_values(targets)
            return
        sums = targets.double().sum(dim=-1 if self.class_dim is None else self.class_dim)
        if targets.dim() > 2 and self.class_dim is None:
            raise ObjectiveError("say with class_dim in which dimension the distributions of CrossEntropy are")
        if not bool((targets >= 0).all()) or not bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-5).all()):
            raise ObjectiveError(
                "real targets of CrossEntropy are distributions: not negative, each row adding up to one; class "
                "numbers are integers (y.long())"
            )

    def _expected(self, outputs: Spec, targets: Spec, dim: int) -> tuple[int, ...]:
        return outputs.shape if targets.dtype.is_floating_point else super()._expected(outputs, targets, dim)

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """Appendix "Logistic loss", for one marked class per sample, as a mean (ERRATA 12 and 13)."""
        if not self.is_plain:
            return super().paper_constants(outputs, targets, radius)
        count, classes = outputs.shape
        total = supervised([logistic_loss(classes, marked=1)] * count)
        return Constants(total.lipschitz, total.smoothness, True, True, total.unsound)


class NegativeLogLikelihood(ClassLoss):
    r""":math:`h(\hat y) = -\frac1n\sum_i\hat y_{i,y_i}`, outputs being logarithms of probabilities.

    It is affine in the outputs: its smoothness is zero, and that of the whole comes from the log-soft-max before
    it.

    Args:
        targets: class numbers to bind to the loss, or ``None``.
        weight: one non-negative number per class; the mean divides by their sum.
        ignore_index: samples of this class number do not count; ``None`` if all count.
        class_dim: the dimension of the classes, where it does not follow from the shape of the targets.
        reduction: ``"mean"`` or ``"sum"``.
        scale: a positive factor.

    >>> float(sf.objectives.NegativeLogLikelihood()(torch.tensor([[-1.0, -2.0]]), torch.tensor([1])))
    2.0
    """

    operation = "surefoot.negative_log_likelihood"

    def check_values(self, targets: Tensor) -> None:
        """Refuse targets that are not class numbers."""
        if targets.is_floating_point():
            raise ObjectiveError("the targets of NegativeLogLikelihood are class numbers, integers (y.long())")
        super().check_values(targets)
