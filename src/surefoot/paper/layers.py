r"""The paper's constants of layers, as printed: appendix "Smoothness of objectives and layers", section 5.

Every function quotes where its constants are printed. A constant that is larger than needed but valid gets a
remark "loose" in the docstring; one that is not an upper bound puts a sentence into ``unsound``, which names
the erratum and says what holds instead. Whether a constant is valid can depend on the arguments: an
overlapping pooling is flagged, a disjoint one is not.

Functions act on the stacked batch; ``entries`` counts the numbers in that stack (samples × features) and only
enters :math:`\|a(0)\|_2`, which the paper's algorithm uses but its lists do not print.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from surefoot.magnitude import Magnitude, Number, maximum
from surefoot.paper.constants import INFINITY, ONE, ZERO, Biaffine, Smooth

CONVOLUTION_BIAS = (
    "ERRATA 2: the linear part of a convolution copies each intercept to every output position of every "
    "sample; its constant is √(batch · positions), not √batch·⌈k/s⌉ or √batch."
)
OVERLAPPING_MAX_POOL = (
    "ERRATA 15: a max-pooling whose patches overlap has ℓ = √(number of patches over one entry), ⌈k/s⌉ for "
    "k×k patches with stride s, not 1."
)
UNCOUNTED_POSITIONS = (
    "ERRATA 3: for images m counts batch × positions; with the batch alone δm is below the bound that holds, "
    "√(δ · batch · positions)."
)
RESIDUAL_BOUND = (
    "ERRATA 14: the augmented function (a(ω₁), ω₂) is bounded by √(m_a² + sup‖ω₂‖²), not by 1 + m_a: "
    "ω₂ is the previous state."
)


def fully_connected(batch: int = 1) -> Biaffine:
    r"""A fully connected layer :math:`W^\top X + w^0 1^\top`: :math:`L = 1`, :math:`l^u = \sqrt m`.

    Section 5, item 2. The appendix ("Smoothness of fully-connected layer", "Batch of inputs") prints the
    same, with :math:`l^u = 1` for one sample. Both are attained.
    """
    return Biaffine(ONE, Magnitude.of(batch).sqrt())


def convolution(
    kernel: int,
    stride: int = 1,
    batch: int = 1,
    positions: int | None = None,
    linear_part: Literal["main text", "appendix"] = "main text",
) -> Biaffine:
    r"""A convolution: :math:`L = \lceil k/s\rceil`, :math:`l^u = \sqrt m\lceil k/s\rceil`.

    Printed in section 5, item 1; the appendix has :math:`l_{conv} = \lceil k/s\rceil` for one sample and
    :math:`\sqrt m` for a batch ("Batch of inputs"): ``linear_part="appendix"`` takes that :math:`\sqrt m`.
    :math:`L` is valid: an entry lies in at most :math:`\lceil k/s\rceil^2` patches.

    Args:
        kernel: k, for patches of k×k positions.
        stride: s.
        batch: the number of samples m.
        positions: output positions per filter. If given, :math:`l^u` is flagged only where it is below the
            constant that holds, :math:`\sqrt{m \cdot \text{positions}}` (ERRATA 2); if not, always.
        linear_part: which of the two printed constants to take for :math:`l^u`.
    """
    overlap = math.ceil(kernel / stride)
    factor = overlap if linear_part == "main text" else 1
    valid = positions is not None and positions <= factor**2
    flags = () if valid else (CONVOLUTION_BIAS,)
    return Biaffine(Magnitude.of(overlap), Magnitude.of(batch).sqrt() * factor, unsound=flags)


def relu() -> Smooth:
    r"""ReLU: :math:`\ell = 1`, :math:`L` not defined (section 5, item 3; appendix "Activation functions")."""
    return Smooth(INFINITY, ONE, INFINITY, ZERO, ONE)


def softplus(entries: int) -> Smooth:
    r"""Soft-plus :math:`\log(1+e^x)`: :math:`\ell = 1`, :math:`L = 1/4` (appendix "Activation functions").

    Both are the suprema. At zero: :math:`\|a(0)\| = \log 2\,\sqrt{\text{entries}}`, :math:`a'(0) = 1/2`.
    """
    value = Magnitude.of(math.log(2.0)) * Magnitude.of(entries).sqrt()
    return Smooth(INFINITY, ONE, Magnitude.of(0.25), value, Magnitude.of(0.5))


def sigmoid(entries: int) -> Smooth:
    r"""Sigmoid: :math:`\ell = 1/4`, :math:`L = 1/10` (appendix "Activation functions").

    Loose: the supremum of :math:`|a''|` is :math:`\sqrt3/18 \approx 0.0962`. No bound is printed, so
    :math:`m = \infty` (:math:`\sqrt{\text{entries}}` holds).
    """
    value = Magnitude.of(entries).sqrt() / 2
    return Smooth(INFINITY, Magnitude.of(0.25), Magnitude.of(0.1), value, Magnitude.of(0.25))


def softmax(classes: int, batch: int = 1) -> Smooth:
    r"""Soft-max of each sample: :math:`\ell = 2`, :math:`L = 4` (section 5, item 4; appendix).

    Loose: :math:`1/2` and :math:`\sqrt6/9 \approx 0.2722` hold (ERRATA 13). For the second: the tensor of
    second derivatives is the third cumulant of an index drawn with the soft-max probabilities; it is
    symmetric, so its norm is :math:`\sup_{\|v\|=1}|\mathbb{E}(v - \mathbb{E}v)^3|`. A unit :math:`v` takes
    values in an interval of length at most :math:`\sqrt2`; at fixed mean the third central moment is linear
    in the law, hence largest on two points, where it is :math:`h^3 p(1-p)(1-2p) \le h^3\sqrt3/18`,
    :math:`h \le \sqrt2`.

    No bound is printed, so :math:`m = \infty` (:math:`\sqrt{\text{batch}}` holds). At zero every probability
    is 1/classes: :math:`\|a(0)\| = \sqrt{\text{batch}/\text{classes}}`,
    :math:`\|\nabla a(0)\| = 1/\text{classes}`.
    """
    value = (Magnitude.of(batch) / classes).sqrt()
    return Smooth(INFINITY, Magnitude.of(2.0), Magnitude.of(4.0), value, ONE / classes)


def max_pool(kernel: int = 2, stride: int | None = None) -> Smooth:
    r"""Max-pooling: :math:`\ell = 1`, :math:`L` not defined (section 5, item 5; appendix "Pooling layers").

    Valid for disjoint patches, the paper's "patches do not coincide"; flagged when ``stride < kernel``.
    """
    overlaps = stride is not None and stride < kernel
    return Smooth(INFINITY, ONE, INFINITY, ZERO, ONE, (OVERLAPPING_MAX_POOL,) if overlaps else ())


def average_pool() -> Smooth:
    r"""Average pooling: :math:`\ell = 1`, :math:`L = 0` (section 5, smooth VGG; appendix "Pooling layers").

    Loose: :math:`1/k` for disjoint k×k patches. Valid with overlap too: the matrix has row sums 1 and column
    sums at most :math:`\lceil k/s\rceil^2/k^2 \le 1`, and the norm is at most the root of their product.
    """
    return Smooth(INFINITY, ONE, ZERO, ZERO, ONE)


def batch_norm(
    features: int,
    batch: int,
    epsilon: float,
    smoothness: Literal["main text", "appendix"] = "main text",
    positions: int = 1,
) -> Smooth:
    r"""Batch-normalisation: bound δm, :math:`\ell = 2\epsilon^{-1/2}`, :math:`L = 2m^{-1/2}\epsilon^{-1}`.

    Section 5; the appendix ("Normalization layers") prints :math:`L = 2\delta m^{-1/2}\epsilon^{-1}` instead:
    ``smoothness="appendix"``. Loose: :math:`\sqrt{\delta m}`, :math:`\epsilon^{-1/2}` and
    :math:`0.8587\,m^{-1/2}\epsilon^{-1}` hold (ERRATA 3). At zero: value 0, Jacobian
    :math:`\epsilon^{-1/2}` times the centring projection.

    Args:
        features: δ, the number of normalised rows (channels of an image).
        batch: m, the number of entries each row is normalised over (samples × positions for images). The
            constants stay valid when positions are counted in ``features`` instead.
        epsilon: ε.
        smoothness: which of the two printed constants to take for L.
        positions: those of an image that are counted neither in δ nor in m. The tensor then has δm · positions
            entries, whose squares add up to as much, and δm is flagged where it is below the root of that.
    """
    flags = (UNCOUNTED_POSITIONS,) if positions > features * batch else ()
    root = (ONE / epsilon).sqrt()
    curvature = Magnitude.of(2.0) / epsilon * (ONE / batch).sqrt()
    if smoothness == "appendix":
        curvature = curvature * features
    bound = Magnitude.of(features) * batch
    return Smooth(bound, 2.0 * root, curvature, ZERO, root if batch > 1 else ZERO, flags)


def residual(biaffine: Biaffine, nonlinear: tuple[Smooth, ...]) -> tuple[Biaffine, tuple[Smooth, ...]]:
    r"""The augmented layer of a residual network on :math:`(x_{t-1}; x_{t-2})`.

    Appendix "Residual Networks":
    :math:`L_{\bar b} = L_b`, :math:`l^{\bar u} = l^u`, :math:`l^{\bar x} \le l^x + 1`,
    :math:`\|\bar b^0\| = \|b^0\|`; for each :math:`\bar a(\omega_1, \omega_2) = (a(\omega_1), \omega_2)`:
    :math:`m_{\bar a} \le 1 + m_a`, :math:`\ell_{\bar a} \le \max(1, \ell_a)`, :math:`L_{\bar a} = L_a`.

    :math:`l^x + 1` is valid, the added part being a permutation of norm 1; loose: for :math:`l^x = l`,
    :math:`(l + \sqrt{l^2 + 4})/2` holds. A finite :math:`1 + m_a` is not a bound (ERRATA 14) and is flagged.
    """
    functions = tuple(
        replace(
            part,
            bound=part.bound + 1.0,
            lipschitz=maximum(1.0, part.lipschitz),
            jacobian_at_zero=maximum(1.0, part.jacobian_at_zero),
            unsound=(*part.unsound, RESIDUAL_BOUND) if part.bound.is_finite else part.unsound,
        )
        for part in nonlinear
    )
    return replace(biaffine, lipschitz_state=biaffine.lipschitz_state + 1.0), functions


def implicit_function(
    gradient_lipschitz: Number, strong_convexity: float, hessian_lipschitz: Number, value_at_zero: Number
) -> Smooth:
    r"""The minimiser g(α) of f(α, ·): :math:`\ell = L_f/\mu`, :math:`L = (H_f/\mu)(1 + L_f/\mu)^2`.

    Appendix "Implicit functions". Loose: with :math:`J = \nabla g^\top`, differentiating
    :math:`\nabla_\beta f(\alpha, g(\alpha)) = 0` twice gives
    :math:`g'' = -(\nabla^2_{\beta\beta} f)^{-1} f'''[(I;J), (I;J), (0;\cdot)]`, so
    :math:`L \le (H_f/\mu)(1 + \ell_g^2)` holds.

    Args:
        gradient_lipschitz: :math:`L_f`, of the gradient in both variables jointly.
        strong_convexity: :math:`\mu > 0`, of :math:`f(\alpha, \cdot)` for every :math:`\alpha`.
        hessian_lipschitz: :math:`H_f`.
        value_at_zero: :math:`\|g(0)\|`, which the paper does not print; infinity if not known.
    """
    slope = Magnitude.of(gradient_lipschitz) / strong_convexity
    curvature = Magnitude.of(hessian_lipschitz) / strong_convexity * (1.0 + slope) ** 2
    return Smooth(INFINITY, slope, curvature, Magnitude.of(value_at_zero), slope)
