r"""Whether the conjugate gradients of an optimizer are preconditioned, from what they did before.

Kronecker factors save iterations where the damping is small and a loose tolerance is not reached within the cap,
as for convolutions; elsewhere they cost more than they save. So they are tried where two things hold: the cap was
met without them, and they would pay clearly if they halved the iterations
(:class:`surefoot.oracles.choice.Sizes`). From then on the way is taken by which the residual fell faster for the
predicted cost, −log(residual)/cost, and the other one is tried again from time to time. The factors are kept for
some steps: whatever they are, conjugate gradients solve the same system.
"""

from __future__ import annotations

import math

from surefoot.oracles.choice import Sizes
from surefoot.oracles.kronecker import Kronecker
from surefoot.oracles.problem import Problem, Step
from surefoot.oracles.steps import sizes_of

_KEPT = 5  # steps for which factors are kept
_MARGIN = 0.6  # what six iterations may cost, halved and preconditioned, beside six plain ones
_AGAIN = 16  # steps after which the other way is tried again


class Preconditioning:
    """The choice for the next solve.

    Args:
        always: ``True`` and ``False`` for one way, ``None`` for the one that is faster.
    """

    def __init__(self, always: bool | None = None) -> None:
        self.always = always
        self._rates: dict[bool, float] = {}
        self._capped, self._since, self._age = False, 0, 0
        self._factors: Kronecker | None = None
        self._sizes: Sizes | None = None
        self._used = False

    def factors(self, problem: Problem) -> Kronecker | None:
        """For a solve at this problem; ``None`` without a preconditioner."""
        if self._sizes is None or self._sizes.chain.graph is not problem.chain.graph:
            self._sizes, self._factors, self._rates, self._capped = sizes_of(problem), None, {}, False
        self._used = self._wanted(self._sizes) if self.always is None else self.always
        if not self._used:
            return None
        if self._factors is None or self._age >= _KEPT:
            self._factors, self._age = Kronecker(problem), 0
        self._age += 1
        return self._factors

    def learn(self, step: Step, most: int | None) -> None:
        """After a solve with at most so many iterations."""
        if self._sizes is None or step.residual is None or not step.iterations:
            return
        make, apply = self._sizes.kronecker if self._used else (0.0, 0.0)
        cost = make / _KEPT + step.iterations * (2 * self._sizes.call + apply)
        self._rates[self._used] = -math.log(max(step.residual, 1e-300)) / cost
        if not self._used:
            self._capped = self._capped or (most is not None and step.iterations >= most and not step.solved)

    def _wanted(self, sizes: Sizes) -> bool:
        make, apply = sizes.kronecker
        iteration = 2 * sizes.call
        if not self._capped or make / _KEPT + 3 * (iteration + apply) > _MARGIN * 6 * iteration:
            return False
        faster = self._rates.get(True, math.inf) > self._rates[False]
        self._since += 1
        if self._since % _AGAIN == 0:
            return not faster
        return faster
