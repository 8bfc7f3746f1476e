"""The paper's statements as printed, as pure functions on constants: to reproduce it, not to be relied on.

* ``constants``: records for functions, bi-affine maps, layers and results, with their flags.
* ``layers``: the printed constants of layers, activations, pooling, normalisation, residual and implicit layers.
* ``losses``: those of losses.
* ``chains``: restriction to a ball, compositions, stacks and sums, a chain as a function of its input; Lemma
  smooth, its corollary, Lemma smooth_gen, the objective.
* ``algorithm``: Algorithm 4 with all its intermediate numbers, and the constants around a point.
* ``vgg``: the application section.
* ``reader``: the algorithm on a PyTorch model, as a certificate.
"""

# isort: off
from surefoot.paper.algorithm import InnerTrace, LayerTrace, Trace, algorithm_4, around_point
from surefoot.paper.chains import (
    ObjectiveResult, composition, concatenate_bilinear, corollary_restricted, diameter_of_balls, fix_parameters,
    lemma_smooth, lemma_smooth_gen, objective, restricted_bound, restricted_lipschitz, smooth_state,
    stack_separate, stack_shared, sum_separate, sum_shared,
)  # fmt: skip
from surefoot.paper.constants import Biaffine, Bivariate, Computation, Result, Smooth
from surefoot.paper.layers import (
    average_pool, batch_norm, convolution, fully_connected, implicit_function, max_pool, relu, residual, sigmoid,
    softmax, softplus,
)  # fmt: skip
from surefoot.paper.losses import convex_clustering, logistic_loss, square_loss, supervised
from surefoot.paper.vgg import (
    Application, BatchNormComparison, Reading, application, batch_norm_vgg, smooth_vgg,
    vgg,
)  # fmt: skip

__all__ = [
    "Application", "BatchNormComparison", "Biaffine", "Bivariate", "Computation", "InnerTrace", "LayerTrace",
    "ObjectiveResult", "Reading", "Result", "Smooth", "Trace", "algorithm_4", "application", "around_point",
    "average_pool", "batch_norm", "batch_norm_vgg", "composition", "concatenate_bilinear",
    "convex_clustering", "convolution", "corollary_restricted", "diameter_of_balls", "fix_parameters",
    "fully_connected", "implicit_function", "lemma_smooth", "lemma_smooth_gen", "logistic_loss", "max_pool",
    "objective", "relu", "residual", "restricted_bound", "restricted_lipschitz", "sigmoid", "smooth_state",
    "smooth_vgg", "softmax", "softplus", "square_loss", "stack_separate", "stack_shared", "sum_separate",
    "sum_shared", "supervised", "vgg",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
