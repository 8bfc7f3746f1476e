"""A ready-made inner problem with parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from surefoot.implicit.constants import Constants
from surefoot.implicit.errors import ImplicitError

_POTENTIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "log-cosh": lambda z: F.softplus(2 * z) - z,  # log(2 cosh z), written so that it does not overflow
    "square": lambda z: 0.5 * z.square(),
}


class Energy(nn.Module):
    r""":math:`\zeta(x, u, \beta) = \sum_ks((A\beta + Bx + c)_k) + \frac\mu2\|\beta\|^2`, where u is (A, B, c).

    The potential s is convex, so the energy is :math:`\mu`-strongly convex in :math:`\beta`, and all further
    constants are derived from its operations. With half the square it is ridge regression of :math:`-Bx - c` on
    the columns of A.

    Args:
        inputs: the size of x.
        size: the size of :math:`\beta`.
        hidden: how many terms there are; as many as :math:`\beta` has entries by default.
        potential: ``"softplus"``, ``"log-cosh"`` or ``"square"`` (half the square).
        strong_convexity: :math:`\mu`.

    Raises:
        ImplicitError: if the potential is not one of these, or the strong convexity is not positive.

    >>> import torch
    >>> from surefoot.implicit import ArgMin
    >>> layer = ArgMin(Energy(4, 3), 3)
    >>> layer(torch.ones(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        inputs: int,
        size: int,
        hidden: int | None = None,
        potential: Literal["softplus", "log-cosh", "square"] = "softplus",
        strong_convexity: float = 1.0,
    ) -> None:
        super().__init__()
        if potential not in _POTENTIALS:
            raise ImplicitError(f"the potential is {potential!r}", f"Pass one of {', '.join(_POTENTIALS)}.")
        self.constants = Constants(strong_convexity)
        self.potential = potential
        self.own = nn.Linear(size, hidden or size, bias=False)
        self.given = nn.Linear(inputs, hidden or size)

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        """The energy of one sample."""
        terms = _POTENTIALS[self.potential](self.own(beta) + self.given(x))
        return terms.sum() + 0.5 * self.constants.strong_convexity * beta.square().sum()

    def extra_repr(self) -> str:
        """The potential and the strong convexity."""
        return f"potential: {self.potential}, strong_convexity: {self.constants.strong_convexity:g}"
