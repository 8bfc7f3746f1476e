"""The constants of losses that the paper prints (appendices on supervised and unsupervised objectives)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.magnitude import Magnitude, Number, stack

MANY_LABELS = (
    "Also wrong in the paper: the logistic loss of a label y ∈ {0,1}^q with r ones has ℓ = √(r+1) (a class is "
    "left unmarked) or √(r-1) (all are marked), which exceeds 2 for r > 3 and r > 5."
)
TWO_CLUSTERED_POINTS = (
    "ERRATA 8: for n = 2 convex clustering has ℓ = √2 > n(n-1)/2 = 1; n√((n-1)/2) holds for every n."
)


@dataclass(frozen=True)
class PrintedLoss:
    r"""Constants of a real function h that the paper prints."""

    lipschitz: Magnitude  # :math:`\ell_h`
    smoothness: Magnitude  # :math:`L_h`
    jacobian_at_zero: Magnitude  # :math:`\|\nabla h(0)\|_2`
    unsound: tuple[str, ...] = ()  # one sentence per constant that is printed but is not an upper bound


def square_loss(radius: Number, label_radius: Number) -> PrintedLoss:
    r"""Square loss :math:`\|\hat y - y\|^2/2`: :math:`\ell(C) = \rho_C + \rho_Y`, :math:`L = 1`.

    Appendix "Square loss". Both are attained.

    Args:
        radius: :math:`\rho_C`, the largest norm of the predictions; infinite for the whole space.
        label_radius: :math:`\rho_Y`, the largest norm of the labels.
    """
    labels = Magnitude.of(label_radius)
    return PrintedLoss(Magnitude.of(radius) + labels, Magnitude.of(1.0), labels)


def logistic_loss(classes: int, marked: int = 1) -> PrintedLoss:
    r"""Logistic loss :math:`-y^\top\hat y + \log\sum_j e^{\hat y_j}`: :math:`\ell \le 2`, :math:`L \le 2`.

    Section 5, item 6; appendix "Logistic loss". For one marked class both are loose: :math:`\sqrt2` and
    :math:`1/2` hold (ERRATA 13). The appendix allows every :math:`y \in \{0,1\}^q`, for which
    :math:`\ell \le 2` can fail: :math:`\nabla h = p - y` with :math:`p` in the simplex, and the convex
    :math:`\|p - y\|^2` is largest at a corner, where it is :math:`r + 1` (an unmarked class) or
    :math:`r - 1`.

    Args:
        classes: q, the number of classes.
        marked: r, the number of ones in the label.
    """
    if not 0 <= marked <= classes:
        raise ValueError(
            f"a label of {classes} classes cannot mark {marked} of them; mark between 0 and {classes}"
        )
    supremum_squared = marked + 1 if marked < classes else marked - 1
    at_zero = math.sqrt(marked * (1 - 1 / classes) ** 2 + (classes - marked) / classes**2)
    two = Magnitude.of(2.0)
    return PrintedLoss(two, two, Magnitude.of(at_zero), (MANY_LABELS,) if supremum_squared > 4 else ())


def convex_clustering(points: int) -> PrintedLoss:
    r"""Convex clustering: :math:`\ell \le n(n-1)/2`, :math:`L \le 1` (appendix "Convex clustering").

    :math:`L = 1` is valid, the objective being a Moreau envelope. :math:`\ell` is flagged for :math:`n = 2`;
    for :math:`n > 3` it is loose, :math:`n\sqrt{(n-1)/2}` holds (ERRATA 8):
    :math:`\sum_{i<j}\|y_i-y_j\| \le \sqrt{n(n-1)/2}\,(\sum_{i<j}\|y_i-y_j\|^2)^{1/2}` and the last factor is
    at most :math:`\sqrt n\,\|y\|`. At zero the minimiser is zero, and so is the gradient.
    """
    slope = Magnitude.of(points * (points - 1) / 2)
    flags = (TWO_CLUSTERED_POINTS,) if points == 2 else ()
    return PrintedLoss(slope, Magnitude.of(1.0), Magnitude.zero(), flags)


def supervised(losses: Sequence[PrintedLoss]) -> PrintedLoss:
    r"""The mean of losses, one per sample: :math:`\ell = \|(\ell_i)_i\|_2/n`, :math:`L = \max_i L_i/n`.

    Appendix "Supervised objectives", which says that only the constants of each :math:`h_i` are needed and
    points to Lemma smooth_elt_wise: this is its item 2 for :math:`h_i/n`. With equal constants
    :math:`\ell = \ell_i/\sqrt n` (ERRATA 12).
    """
    count = len(losses)
    if count == 0:
        raise ValueError("the mean of no losses is not defined; give the constants of at least one loss")
    return PrintedLoss(
        stack([loss.lipschitz for loss in losses]).norm() / count,
        stack([loss.smoothness for loss in losses]).max() / count,
        stack([loss.jacobian_at_zero for loss in losses]).norm() / count,
        tuple(dict.fromkeys(flag for loss in losses for flag in loss.unsound)),
    )
