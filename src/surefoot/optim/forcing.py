r"""How exactly an optimizer solves for its steps: the forcing sequence.

A step is solved until the gradient of the model is at most :math:`\eta_k\|\nabla F(u_k)\|`. Far from a minimum a
tenth is enough, and conjugate gradients stop after a few iterations even before. Near one, η follows the decrease
of the gradient that was achieved last,

.. math:: \eta_k = \min\Big(\frac1{10}, \frac12\frac{\|\nabla F(u_k)\|}{\|\nabla F(u_{k-1})\|}\Big),

which keeps the convergence superlinear (proof in the documentation: Inexact steps). The iterations are capped. The
cap grows by one whenever it was met and the model was right (the objective fell by three quarters of what was
predicted or more), and is halved where the model was wrong.
"""

from __future__ import annotations

from typing import Any

FIRST = 0.1  # the loosest tolerance
_PART = 0.5  # of the last decrease of the gradient
_CAP = 6  # iterations at first
_RIGHT, _WRONG = 0.75, 0.25  # ratios of the actual to the predicted decrease


class Forcing:
    """The tolerance and the cap of the next solve.

    Attributes:
        most: how many iterations are made at most.
    """

    def __init__(self) -> None:
        self.most = _CAP
        self._last: tuple[str, float] | None = None  # the data of the last step, and the norm of its gradient
        self._ratio = 1.0

    def at(self, data: str, size: float) -> None:
        """The next step is on these data, at a gradient of this norm."""
        same = self._last is not None and self._last[0] == data and self._last[1] > 0
        self._ratio = size / self._last[1] if same and self._last is not None else 1.0
        self._last = data, size

    def tolerance(self, finest: float) -> float:
        """η, and no less than what can be reached."""
        return max(min(FIRST, _PART * self._ratio), finest)

    def learn(self, iterations: int, ratio: float) -> None:
        """After a trial: how many iterations were made, and the ratio of the actual to the predicted decrease."""
        if ratio < _WRONG:
            self.most = max(_CAP, self.most // 2)
        elif ratio >= _RIGHT and iterations >= self.most:
            self.most += 1

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"most": self.most, "last": None if self._last is None else list(self._last)}

    def load(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.most = state["most"]
        self._last = None if state["last"] is None else (state["last"][0], state["last"][1])


def relaxed(kappa: float, ratio: float) -> float:
    """κ after a step with this ratio of the actual to the predicted decrease: Nielsen's rule."""
    return kappa * max(1 / 3, 1 - (2 * min(max(ratio, 0.0), 1.0) - 1) ** 3)
