r"""The logistic loss of several classes, with everything torch knows about it.

Class weights :math:`w`, label smoothing :math:`\epsilon`, ignored samples, labels or distributions: all of them
are non-negative *masses* :math:`M_{ik}`, and the loss is

.. math:: h(\hat y) = -\sum_{ik}M_{ik}\log p_{ik}
    = \sum_i\Big(m_i\log\sum_je^{\hat y_{ij}} - \langle M_i, \hat y_i\rangle\Big), \qquad m_i = \sum_kM_{ik}

with p the soft-max of a row. So a row is :math:`m_i` times the logistic loss of the distribution
:math:`M_i/m_i`: that is what its rule, its Taylor model and its curvature factor are about.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.graph.nodes import Spec
from surefoot.objectives.constants import Constants, ObjectiveError
from surefoot.objectives.loss import Loss, as_tensor, frozen_numbers, refuse_empty, shape_of

ClassWeights: TypeAlias = tuple[float, ...] | None


def cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    *,
    weight: ClassWeights = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    """The loss as torch computes it; targets are class numbers or distributions."""
    labels = not targets.is_floating_point()
    value = F.cross_entropy(
        outputs,
        targets.long() if labels else targets.to(outputs.dtype),
        weight=None if weight is None else as_tensor(weight, outputs),
        ignore_index=ignore_index if labels and ignore_index is not None else -100,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return value if scale == 1.0 else scale * value


def masses(
    targets: Tensor,
    classes: int,
    *,
    weight: ClassWeights = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
    scale: float = 1.0,
) -> Tensor:
    r"""M, samples × classes, in double precision; every entry has a relative error below (n + 16) 2⁻⁵³.

    For class numbers :math:`M_{ik} \propto w_{y_i}(1 - \epsilon)[k = y_i] + \epsilon w_k/K`, zero for ignored
    samples; the mean divides by the sum of the :math:`w_{y_i}` of the others. For distributions :math:`M_{ik}
    \propto w_k((1 - \epsilon)y_{ik} + \epsilon/K)`; the mean divides by the number of samples. These are the
    definitions of torch.nn.CrossEntropyLoss.
    """
    count, device = targets.shape[0], targets.device
    weights = torch.ones(classes, dtype=torch.float64, device=device)
    if weight is not None:
        weights = as_tensor(weight, weights)
    if targets.is_floating_point():
        found = weights * ((1 - label_smoothing) * targets.double() + label_smoothing / classes)
        return found * (scale / count) if reduction == "mean" else found * scale
    labels, counted = targets.long(), torch.ones(count, dtype=torch.bool, device=device)
    if ignore_index is not None:
        counted = labels != ignore_index
        labels = labels.where(counted, 0)
    own = weights[labels].where(counted, 0.0)
    found = (label_smoothing / classes) * weights * counted[:, None]
    found = found.scatter_add(1, labels[:, None], (1 - label_smoothing) * own[:, None])
    return found * (scale / own.sum()) if reduction == "mean" else found * scale


class CrossEntropy(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_i\big(\log\sum_k e^{\hat y_{ik}} - \hat y_{i,y_i}\big)`, the logistic loss.

    Targets are class numbers (n), or distributions over the classes (n × k), one-hot or soft. The options mean
    what they mean in ``torch.nn.CrossEntropyLoss``; the mean of weighted samples divides by their weights.

    Args:
        targets: bound to the loss, or ``None``.
        weight: one per class, not negative.
        label_smoothing: at least 0, less than 1.
        ignore_index: samples of this class number do not count; ``None`` if all count.
        reduction: ``"mean"`` or ``"sum"``.
        scale: a positive factor.

    Raises:
        ObjectiveError: if an option or the targets are not allowed.

    >>> round(float(CrossEntropy()(torch.zeros(2, 10), torch.tensor([3, 7]))), 6)
    2.302585
    """

    operation = "surefoot.cross_entropy"
    function = staticmethod(cross_entropy)
    reductions = ("mean", "sum")
    own_options = (("weight", None), ("label_smoothing", 0.0), ("ignore_index", None))

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
    ) -> None:
        self.weight = class_weights(weight, "CrossEntropy")
        if not 0 <= float(label_smoothing) < 1:
            raise ObjectiveError(f"the label smoothing is at least 0 and less than 1, got {label_smoothing!r}")
        self.label_smoothing = float(label_smoothing)
        self.ignore_index = None if ignore_index is None else int(ignore_index)
        super().__init__(targets, reduction=reduction, scale=scale)

    def check_values(self, targets: Tensor) -> None:
        """Class numbers, or distributions; some weight must be left to divide by."""
        if not targets.is_floating_point():
            check_labels(self, targets, self.weight, self.ignore_index)
            return
        sums = targets.double().sum(dim=-1)
        if not bool((targets >= 0).all()) or not bool(torch.isclose(sums, torch.ones_like(sums), atol=1e-5).all()):
            raise ObjectiveError(
                "real targets of CrossEntropy are distributions: not negative, each row adding up to one; class "
                "numbers are integers (y.long())"
            )

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """Outputs are n × k; targets n class numbers or n × k numbers."""
        assert targets is not None
        wanted = outputs.shape[:1] if not targets.dtype.is_floating_point else outputs.shape
        if len(outputs.shape) != 2 or targets.shape != wanted:
            raise ObjectiveError(
                "CrossEntropy compares outputs (samples × classes) with class numbers (samples) or distributions "
                f"(samples × classes), got {shape_of(outputs)} and {shape_of(targets)}"
            )
        refuse_empty("CrossEntropy", outputs)
        check_classes("CrossEntropy", outputs, self.weight)

    def target_spec(self, outputs: Spec) -> Spec:
        """Class numbers."""
        return Spec(outputs.shape[:1], torch.int64)

    def fit(self, outputs: Spec, targets: Tensor) -> None:
        """Class numbers are less than the number of classes."""
        super().fit(outputs, targets)
        check_range("CrossEntropy", outputs, targets, self.ignore_index)

    def paper_constants(self, outputs: Spec, targets: Tensor | None, radius: float) -> Constants:
        """Appendix "Logistic loss", for one marked class per sample, as a mean (ERRATA 12 and 13)."""
        if not self.is_plain:
            return super().paper_constants(outputs, targets, radius)
        from surefoot.objectives import printed

        count, classes = outputs.shape
        total = printed.supervised([printed.logistic_loss(classes, marked=1)] * count)
        return Constants(total.lipschitz, total.smoothness, True, True, total.unsound)


def class_weights(weight: Any, name: str) -> ClassWeights:
    """Weights of classes as a tuple.

    Raises:
        ObjectiveError: if they are not a list of finite numbers ≥ 0.
    """
    numbers = frozen_numbers(weight, f"the class weight of {name}")
    if numbers is None:
        return None
    if not isinstance(numbers, tuple) or not all(isinstance(number, float) for number in numbers):
        raise ObjectiveError(f"the class weight of {name} has one dimension, one entry per class")
    return tuple(number for number in numbers if isinstance(number, float))


def check_labels(loss: Loss, labels: Tensor, weight: ClassWeights, ignore_index: int | None) -> None:
    """Refuse what are no class numbers, and means of samples that have no weight.

    Raises:
        ObjectiveError: in these cases.
    """
    name, labels = type(loss).__name__, labels.long()
    counted = labels if ignore_index is None else labels[labels != ignore_index]
    if counted.numel() and int(counted.min()) < 0:
        raise ObjectiveError(
            f"class numbers of {name} are not negative, got {int(counted.min())}; samples that do not count are "
            "marked by ignore_index"
        )
    if loss.reduction != "mean" or not labels.numel():
        return
    if not counted.numel() or (
        weight is not None and not any(weight[k] for k in counted.unique().tolist() if k < len(weight))
    ):
        raise ObjectiveError(f"no sample of {name} has a weight: their mean is not defined. Use reduction='sum'")


def check_classes(name: str, outputs: Spec, weight: ClassWeights) -> None:
    """Refuse weights that are not those of the outputs.

    Raises:
        ObjectiveError: if there are more or fewer than classes.
    """
    if weight is not None and len(weight) != outputs.shape[1]:
        raise ObjectiveError(
            f"{name} has {len(weight)} class weights, the outputs have {outputs.shape[1]} classes"
        )


def check_range(name: str, outputs: Spec, targets: Tensor, ignore_index: int | None) -> None:
    """Refuse class numbers that are too large.

    Raises:
        ObjectiveError: naming the largest.
    """
    if targets.is_floating_point() or targets.device.type == "meta":
        return
    labels = targets if ignore_index is None else targets[targets != ignore_index]
    if labels.numel() and int(labels.max()) >= outputs.shape[1]:
        raise ObjectiveError(
            f"{name} has {outputs.shape[1]} classes, numbered from 0, and met the class number {int(labels.max())}"
        )
