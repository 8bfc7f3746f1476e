"""Oracles: the minimisers of models of an objective around a point.

* ``problem``: what an oracle is asked and what it returns; ``steps``: :func:`gradient`, :func:`gauss_newton`,
  :func:`newton`, and steps bent by their acceleration; ``search``: :func:`line_search`, how far to go in place of
  the proximal term; ``choice``: which method is predicted to cost least.
* ``losses``: the curvature of a loss as a product. ``gauss_newton``: conjugate gradients, on the parameters or on
  the dual; ``samples``: the rows of the Jacobian, sample by sample; ``gram``: a Cholesky factor of either Gram
  matrix; ``newton``: conjugate gradients.
* ``quadratic``: :func:`linear_quadratic`, the paper's linear-quadratic problem of a chain; ``dynamic``: its
  solution by dynamic programming.
"""

from surefoot.chain.autodiff import Autodiff
from surefoot.oracles.problem import OracleError, Step
from surefoot.oracles.quadratic import linear_quadratic
from surefoot.oracles.search import line_search
from surefoot.oracles.steps import gauss_newton, gradient, newton

__all__ = [
    "Autodiff", "OracleError", "Step", "gauss_newton", "gradient", "line_search", "linear_quadratic", "newton",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
