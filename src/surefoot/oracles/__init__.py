"""Oracles: the minimisers of models of an objective around a point.

* ``problem``: what an oracle is asked and what it returns; ``steps``: :func:`gradient`, :func:`gauss_newton`,
  :func:`newton`; ``search_along``: :func:`line_search`, how far to go in place of the proximal term.
* ``choice``: which method is predicted to cost least; ``measured``: the residual of a step, in double precision;
  ``geodesic``: steps bent by their acceleration.
* ``primal``: Gauss-Newton by conjugate gradients on the parameters; ``kronecker``: their preconditioner;
  ``primal_gram``: with their Gram matrix.
* ``dual``: Gauss-Newton by conjugate gradients on the dual; ``dual_gram``: with the Gram matrix of the dual;
  ``gram``, ``gram_layers``, ``gram_pieces``: how that is assembled; ``symmetric``: how such matrices are held;
  ``factor``: the curvature of a loss as a product.
* ``newton_conjugate``: Newton by conjugate gradients. ``dynamic``, ``riccati``: by dynamic programming, on the
  chain as ``factored`` writes it; ``stages``, ``inner``, ``outer``: one computation in two stages;
  ``vectors``: states as vectors.
* ``quadratic_problem``: :func:`linear_quadratic`, the paper's linear-quadratic problem to look at.
"""

from surefoot.chain.autodiff import Autodiff
from surefoot.oracles.problem import OracleError, Step
from surefoot.oracles.quadratic_problem import linear_quadratic
from surefoot.oracles.search_along import line_search
from surefoot.oracles.steps import gauss_newton, gradient, newton

__all__ = [
    "Autodiff", "OracleError", "Step", "gauss_newton", "gradient", "line_search", "linear_quadratic", "newton",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
