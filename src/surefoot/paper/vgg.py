r"""The application of section 5: VGG, smooth VGG and VGG with batch-normalisation, from printed constants.

The 16 layers are those of the appendix "Detailed network": thirteen convolutions (3×3 patches, stride 1,
padding 1) with ReLU, five of them followed by a max-pooling of disjoint 2×2 patches, and three fully
connected layers, the last with a soft-max. Batch size 128, :math:`R = 1` for every layer, :math:`\|x_0\| = 1`
for the stacked batch.

Which reading gives :math:`\ell_{VGG} = 1.6275\cdot10^{12}`: Algorithm 4 as printed (bilinear term counted
twice in :math:`m_{t,0}`), :math:`l^u = \sqrt m\lceil k/s\rceil` for convolutions as in the main text, and the
soft-max of the last layer included with :math:`\ell = 2`. The other readings are in
:attr:`Application.readings`:

=========================================================  ======================
reading                                                    :math:`\ell_{VGG}`
=========================================================  ======================
as printed                                                 :math:`1.63\cdot10^{12}`
without the soft-max                                       half of it
:math:`l^u = \sqrt m` (appendix, "Batch of inputs")        :math:`6.82\cdot10^{11}`
ERRATA 5 and 7 applied                                     :math:`8.90\cdot10^{8}`
:math:`l^u = \sqrt{m\cdot\text{positions}}`, as holds       :math:`1.05\cdot10^{14}`
the last two together                                      :math:`5.95\cdot10^{10}`
=========================================================  ======================

Only the last two rows are upper bounds (ERRATA 2). The smooth network has exactly the same :math:`\ell` when
:math:`\|a(0)\|` is dropped, and 359 times as much when it is kept (ERRATA 4). The four comparisons with
batch-normalisation hold in every reading of its constants.

The paper explains them by the bound :math:`\delta m` of batch-normalisation. It enters for
:math:`\epsilon = 10^{-2}` (:attr:`BatchNormComparison.active_bounds`), where the constants grow all the same.
For :math:`\epsilon = 10^2` it enters at no layer when δ counts channels × positions: there the whole gain is
:math:`\ell = 2\epsilon^{-1/2} = 1/5 < 1` at thirteen layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from surefoot.magnitude import Magnitude
from surefoot.paper import layers as printed
from surefoot.paper.algorithm import algorithm_4
from surefoot.paper.constants import Biaffine, Computation, Result, Smooth

# side of the images, filters and number of convolutions of each stage, which a 2×2 pooling ends
_STAGES = ((224, 64, 2), (112, 128, 2), (56, 256, 3), (28, 512, 3), (14, 512, 3))
FULLY_CONNECTED = (4096, 4096)
CLASSES = 1000

_Over = Literal["every entry", "channels", "images"]
_Print = Literal["main text", "appendix"]


@dataclass(frozen=True)
class Reading:
    """A choice for each detail that the paper leaves open, or prints in two ways."""

    name: str = "as printed"
    soft_max: bool = True  # whether the soft-max of the last layer is part of the network
    # l^u of a convolution: √m⌈k/s⌉ (main text), √m (appendix), or √(m·positions), which holds
    linear_part: Literal["main text", "appendix", "proved"] = "main text"
    # what batch-normalisation counts as δ and m for images: channels × positions and the batch; channels and the
    # batch; or channels and batch × positions, which is the usual operation
    normalised_over: _Over = "every entry"
    normalisation_smoothness: _Print = "main text"  # L of batch-normalisation as there or as in the appendix


AS_PRINTED = Reading()


def _network(batch: int, reading: Reading, smooth: bool, epsilon: float | None) -> tuple[Computation, ...]:
    """The 16 layers; batch-normalisation, if any, comes last in each convolutional layer (a = ν∘π∘α)."""
    layers: list[Computation] = []
    for side, filters, count in _STAGES:
        for position in range(1, count + 1):
            functions: list[Smooth] = [printed.softplus(batch * filters * side**2) if smooth else printed.relu()]
            if position == count:
                functions.append(printed.average_pool() if smooth else printed.max_pool(2, 2))
            if epsilon is not None:
                left = side // 2 if position == count else side
                features = filters * left**2 if reading.normalised_over == "every entry" else filters
                samples = batch * left**2 if reading.normalised_over == "images" else batch
                left_out = left**2 if reading.normalised_over == "channels" else 1
                curvature = reading.normalisation_smoothness
                functions.append(printed.batch_norm(features, samples, epsilon, curvature, left_out))
            if reading.linear_part == "proved":
                product = Biaffine.of(3.0, Magnitude.of(batch * side**2).sqrt())
            else:
                product = printed.convolution(3, 1, batch, side**2, reading.linear_part)
            layers.append(Computation(product, tuple(functions), f"conv {len(layers) + 1}"))
    for index, width in enumerate(FULLY_CONNECTED, start=len(layers) + 1):
        activation = printed.softplus(batch * width) if smooth else printed.relu()
        layers.append(Computation(printed.fully_connected(batch), (activation,), f"full {index}"))
    last = (printed.softmax(CLASSES, batch),) if reading.soft_max else ()
    layers.append(Computation(printed.fully_connected(batch), last, f"full {len(layers) + 1}"))
    return tuple(layers)


def vgg(batch: int = 128, reading: Reading = AS_PRINTED) -> tuple[Computation, ...]:
    """The 16 layers of VGG: ReLU and max-pooling."""
    return _network(batch, reading, smooth=False, epsilon=None)


def smooth_vgg(batch: int = 128, reading: Reading = AS_PRINTED) -> tuple[Computation, ...]:
    """The 16 layers of smooth VGG: soft-plus and average pooling."""
    return _network(batch, reading, smooth=True, epsilon=None)


def batch_norm_vgg(epsilon: float, batch: int = 128, reading: Reading = AS_PRINTED) -> tuple[Computation, ...]:
    """Smooth VGG with a batch-normalisation at the end of each convolutional layer."""
    return _network(batch, reading, smooth=True, epsilon=epsilon)


@dataclass(frozen=True)
class BatchNormComparison:
    """Smooth VGG with and without batch-normalisation."""

    epsilon: float
    reading: Reading  # of the constants
    keep_value_at_zero: bool  # whether ‖a(0)‖ is kept in Algorithm 4
    smooth: Result  # the network without batch-normalisation
    normalised: Result  # the network with it
    active_bounds: int  # at how many of the 13 layers the bound δm of batch-normalisation is the smaller one

    @property
    def increases(self) -> tuple[bool, bool]:
        """Whether batch-normalisation increases (ℓ, L): the paper says yes for ε = 1e-2, no for ε = 1e2."""
        lipschitz = self.normalised.lipschitz >= self.smooth.lipschitz
        return lipschitz, self.normalised.smoothness >= self.smooth.smoothness


@dataclass(frozen=True)
class Application:
    """Every number of section 5."""

    vgg: Result  # VGG as printed; L is infinite, since ReLU has none
    smooth_dropped: Result  # smooth VGG without ‖a(0)‖, the reading in which the paper's claim holds; not a bound
    smooth_kept: Result  # smooth VGG with Algorithm 4 as printed
    relative_difference: float  # |ℓ_VGG - ℓ_smooth| / ℓ_VGG with ‖a(0)‖ dropped; the paper says at most 1e-4
    factor: float  # ℓ_smooth / ℓ_VGG with ‖a(0)‖ kept
    readings: tuple[tuple[str, Result], ...]  # ℓ_VGG and its flags in each reading
    # the comparisons, for each ε, with ‖a(0)‖ dropped and kept, in each reading
    batch_norm: tuple[BatchNormComparison, ...]


def _readings(batch: int, radius: float, input_norm: float) -> tuple[tuple[str, Result], ...]:
    proved = Reading(linear_part="proved")
    cases = (
        ("as printed", AS_PRINTED, False),
        ("without the soft-max", Reading(soft_max=False), False),
        ("l^u = √m (appendix)", Reading(linear_part="appendix"), False),
        ("ERRATA 5 and 7 applied", AS_PRINTED, True),
        ("l^u = √(m·positions), as holds", proved, False),
        ("ERRATA 2, 5 and 7 applied", proved, True),
    )
    return tuple(
        (name, algorithm_4(vgg(batch, reading), radius, input_norm, corrected=corrected).result)
        for name, reading, corrected in cases
    )


def _comparisons(batch: int, radius: float, input_norm: float) -> tuple[BatchNormComparison, ...]:
    comparisons = []
    overs: tuple[_Over, ...] = ("every entry", "channels", "images")
    prints: tuple[_Print, ...] = ("main text", "appendix")
    for keep, epsilon, over, curvature in itertools.product((False, True), (1e-2, 1e2), overs, prints):
        smooth = algorithm_4(smooth_vgg(batch), radius, input_norm, keep).result
        reading = Reading(f"{over}, {curvature}", True, "main text", over, curvature)
        trace = algorithm_4(batch_norm_vgg(epsilon, batch, reading), radius, input_norm, keep)
        active = sum(part.bound_is_active for layer in trace.layers for part in layer.inner)
        comparisons.append(BatchNormComparison(epsilon, reading, keep, smooth, trace.result, active))
    return tuple(comparisons)


def application(batch: int = 128, radius: float = 1.0, input_norm: float = 1.0) -> Application:
    """Section 5: every number of the study, in every reading that matters.

    >>> study = sf.paper.application()
    >>> print(study.vgg.lipschitz, study.relative_difference <= 1e-4, round(study.factor))
    1.628e+12 True 359
    """
    network = algorithm_4(vgg(batch), radius, input_norm).result
    dropped = algorithm_4(smooth_vgg(batch), radius, input_norm, keep_value_at_zero=False).result
    kept = algorithm_4(smooth_vgg(batch), radius, input_norm).result
    reference = network.lipschitz.log2
    return Application(
        vgg=network,
        smooth_dropped=dropped,
        smooth_kept=kept,
        relative_difference=abs(2.0 ** (dropped.lipschitz.log2 - reference) - 1.0),
        factor=2.0 ** (kept.lipschitz.log2 - reference),
        readings=_readings(batch, radius, input_norm),
        batch_norm=_comparisons(batch, radius, input_norm),
    )
