"""Losses of class numbers: the logistic loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.errors import ObjectiveError
from surefoot.objectives.loss import Loss, Shaped, as_tensor, frozen_numbers, refuse_empty, shape_of

_FEW = 32  # classes up to which a soft-max over columns is several times as fast as one over rows
_COMPARED = "CrossEntropy compares outputs (samples × classes) with class numbers (samples) or distributions"


class CrossEntropy(Loss):
    r""":math:`h(\hat y) = \frac1n\sum_i\big(\log\sum_k e^{\hat y_{ik}} - \hat y_{i,y_i}\big)`, the logistic loss.

    Targets are class numbers (n), or distributions over the classes (n × k), one-hot or soft. The options have the
    same meaning as in ``torch.nn.CrossEntropyLoss``; the mean of weighted samples divides by their weights.
    Outputs of sequences (n × t × k) and images (n × k × h × w) are compared with one target for each place, and
    the mean is over all places that count.

    *Constants.* With masses M a row is :math:`m_i\log\sum_je^{\hat y_{ij}} - \langle M_i, \hat y_i\rangle`,
    :math:`m_i = \sum_kM_{ik}`. With p its soft-max the gradient is :math:`m_ip - M_i`, a convex function of p,
    whose norm is largest at a corner of the simplex: :math:`\sqrt2/n` for the mean of labels. The Hessian is
    :math:`m_i(\mathrm{diag}(p) - pp^\top)`, of norm at most :math:`2m_i\max_kp_k(1 - p_k) \le m_i/2` by
    Gershgorin's circles (Böhning, Ann. Inst. Statist. Math. 44, 1992), reached by two classes of probability 1/2
    (ERRATA 13).

    Args:
        targets: targets to bind to the loss, or ``None``.
        weight: one non-negative number per class.
        label_smoothing: at least 0, less than 1.
        ignore_index: samples of this class number do not count; ``None`` if all count.
        class_dim: the dimension of the classes, where it does not follow from the shape of the targets.
        averaging: ``reduction``, ``"mean"`` or ``"sum"``, and ``scale``, a positive factor.

    >>> round(float(sf.CrossEntropy()(torch.zeros(2, 10), torch.tensor([3, 7]))), 6)
    2.302585
    """

    operation = "surefoot.cross_entropy"
    reductions = ("mean", "sum")
    defaults: ClassVar = {"weight": None, "label_smoothing": 0.0, "ignore_index": None}
    weight: tuple[float, ...] | None
    label_smoothing: float
    ignore_index: int | None

    def __init__(
        self,
        targets: Any = None,
        *,
        weight: Any = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        class_dim: int | None = None,
        **averaging: Any,
    ) -> None:
        if not 0 <= float(label_smoothing) < 1:
            raise ObjectiveError(f"the label smoothing is at least 0 and less than 1, got {label_smoothing!r}")
        self.class_dim = None if class_dim is None else int(class_dim)
        numbers = frozen_numbers(weight, "the class weight of CrossEntropy")
        if not (numbers is None or (isinstance(numbers, tuple) and all(isinstance(n, float) for n in numbers))):
            raise ObjectiveError("the class weight of CrossEntropy has one dimension, one entry per class")
        ignored = None if ignore_index is None else int(ignore_index)
        smoothing = float(label_smoothing)
        super().__init__(targets, weight=numbers, label_smoothing=smoothing, ignore_index=ignored, **averaging)

    @staticmethod
    def function(
        outputs: Tensor,
        targets: Tensor,
        *,
        weight: tuple[float, ...] | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        reduction: str = "mean",
        scale: float = 1.0,
    ) -> Tensor:
        labels = not targets.is_floating_point()
        options: dict[str, Any] = {
            "weight": None if weight is None else as_tensor(weight, outputs),
            "ignore_index": ignore_index if labels and ignore_index is not None else -100,
            "reduction": reduction,
        }
        few = outputs.dtype == torch.float64 and outputs.shape[1] <= _FEW  # in single, numbers are those of torch
        if labels and not label_smoothing and few:
            value = F.nll_loss(torch.log_softmax(outputs.T.contiguous(), dim=0).T, targets.long(), **options)
        else:
            marks = targets.long() if labels else targets.to(outputs.dtype)
            value = F.cross_entropy(outputs, marks, label_smoothing=label_smoothing, **options)
        return value if scale == 1.0 else scale * value

    def counted(self, targets: Tensor) -> Tensor:
        """The class numbers that are not ignored."""
        labels = targets.long()
        return labels if self.ignore_index is None else labels[labels != self.ignore_index]

    def check_values(self, targets: Tensor) -> None:
        if targets.is_floating_point():
            sums = targets.double().sum(dim=-1 if self.class_dim is None else self.class_dim)
            if targets.dim() > 2 and self.class_dim is None:
                raise ObjectiveError("say with class_dim in which dimension the distributions of CrossEntropy are")
            if not bool((targets >= 0).all() and torch.isclose(sums, torch.ones_like(sums), atol=1e-5).all()):
                raise ObjectiveError(
                    "real targets of CrossEntropy are distributions: not negative, each row adding up to one; "
                    "class numbers are integers (y.long())"
                )
            return
        counted, weight = self.counted(targets), self.weight
        if counted.numel() and int(counted.min()) < 0:
            raise ObjectiveError(
                f"class numbers of CrossEntropy are not negative, got {int(counted.min())}; samples that do not "
                "count are marked by ignore_index"
            )
        weightless = weight is not None and not any(
            weight[k] for k in counted.unique().tolist() if k < len(weight)
        )
        if self.reduction == "mean" and targets.numel() and (weightless or not counted.numel()):
            raise ObjectiveError(
                "no sample of CrossEntropy has a weight: their mean is not defined. Use reduction='sum'"
            )

    def check(self, outputs: Shaped, targets: Shaped | None) -> None:
        assert targets is not None
        classes = outputs.shape[self._dimension(outputs, targets)]
        refuse_empty("CrossEntropy", outputs)
        if self.weight is not None and len(self.weight) != classes:
            raise ObjectiveError(
                f"CrossEntropy has {len(self.weight)} class weights, the outputs have {classes} classes"
            )

    def fit(self, outputs: Shaped, targets: Tensor) -> None:
        super().fit(outputs, targets)
        if targets.is_floating_point() or targets.device.type == "meta":
            return
        labels, classes = self.counted(targets), outputs.shape[self._dimension(outputs, targets)]
        if labels.numel() and int(labels.max()) >= classes:
            raise ObjectiveError(
                f"CrossEntropy has {classes} classes, numbered from 0, and met the class number "
                f"{int(labels.max())}"
            )

    def _dimension(self, outputs: Shaped, targets: Shaped) -> int:
        """The dimension of the classes: ``class_dim``, or the one that fits the targets."""
        shape, rank = tuple(outputs.shape), len(outputs.shape)
        possible = [1] if rank == 2 else [] if rank < 2 else sorted({1, rank - 1})
        if self.class_dim is not None and rank > 2:
            possible = [self.class_dim % rank]
        real = targets.dtype.is_floating_point
        expected = {dim: shape if real else shape[:dim] + shape[dim + 1 :] for dim in possible}
        fitting = [dim for dim in possible if expected[dim] == tuple(targets.shape)]
        got = f"got {shape_of(outputs)} and {shape_of(targets)}"
        if len(fitting) > 1:
            raise ObjectiveError(
                f"classes may be in dimension {' or '.join(map(str, fitting))} of the outputs of CrossEntropy, "
                f"{got}: say class_dim={fitting[0]} or class_dim={fitting[1]}"
            )
        if not fitting:
            more = "" if rank < 3 else "; of sequences and images, one for each row of classes"
            raise ObjectiveError(f"{_COMPARED}{more}, {got}")
        return fitting[0]

    def arranged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets with one row for each class number."""
        if outputs.dim() == 2:
            return outputs, targets
        dim = self._dimension(outputs, targets)
        rows = outputs.movedim(dim, -1).flatten(0, -2)
        if targets.is_floating_point():
            return rows, targets.movedim(dim, -1).flatten(0, -2)
        return rows, targets.flatten()

    def masses(self, targets: Tensor, classes: int) -> Tensor:
        r"""M, samples × classes, in double precision: the definitions of torch.nn.CrossEntropyLoss.

        For class numbers :math:`M_{ik} \propto w_{y_i}(1 - \epsilon)[k = y_i] + \epsilon w_k/K`, zero for ignored
        samples; the mean divides by the sum of the :math:`w_{y_i}` of the others. For distributions :math:`M_{ik}
        \propto w_k((1 - \epsilon)y_{ik} + \epsilon/K)`; the mean divides by the number of samples.
        """
        smoothing, is_mean = self.label_smoothing, self.reduction == "mean"
        weights = torch.ones(classes, dtype=torch.float64, device=targets.device)
        if self.weight is not None:
            weights = as_tensor(self.weight, weights)
        if targets.is_floating_point():
            masses = weights * ((1 - smoothing) * targets.double() + smoothing / classes)
            return masses * (self.scale / (len(targets) if is_mean else 1))
        labels = targets.long()
        counts = torch.ones_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            counts = labels != self.ignore_index
            labels = labels.where(counts, 0)
        own = weights[labels].where(counts, 0.0)
        masses = (smoothing / classes) * weights * counts[:, None]
        masses = masses.scatter_add(1, labels[:, None], (1 - smoothing) * own[:, None])
        return masses * (self.scale / float(own.sum()) if is_mean else self.scale)

    def suprema(self, shape: Sequence[int], targets: Tensor | None, radius: float) -> tuple[float, float]:
        classes = shape[1] if len(shape) == 2 else shape[-1 if self.class_dim is None else self.class_dim]
        count = math.prod(shape) // max(classes, 1)
        if targets is not None:
            masses = self.masses(targets, classes)
            total = masses.sum(dim=1)
            # ‖m e_k - M‖² = ‖M‖² + m² - 2mM_k, largest where M_k is the smallest entry
            corner = masses.square().sum(dim=1) + total.square() - 2 * total * masses.amin(dim=1)
            return float(corner.sum().clamp(min=0).sqrt()), float(total.max()) / 2
        weights, is_mean = self.weight or (1.0,), self.reduction == "mean"
        if is_mean and (self.ignore_index is not None or max(weights) > min(weights)):
            raise ObjectiveError("the constants of a mean of weighted samples depend on the targets: bind them")
        # distributions may add up to a little more than one
        mass = self.scale * (1 / count if is_mean else max(weights)) * (1 + 3e-5)
        return math.sqrt(2 * count) * mass, mass / 2
