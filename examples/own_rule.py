r"""
Adding your own rule
====================

**Problem.** A network uses an operation that has no rule. It is refused, by name; nothing is guessed.

**Method.** A rule is one function from enclosures of the arguments to bounds on the Jacobians, the second
derivatives and the result, with its proof in the docstring.

**Statement.** Lemma ``smooth_gen`` for an operation with one argument: :math:`\ell \le \sup\|\nabla f\|`,
:math:`L \le \sup\|\nabla^2f\|`.

**Result.** The network gets a certificate, and a search that tries to exceed it does not.
"""

import torch
from matplotlib.figure import Figure
from torch import nn

import surefoot as sf
from surefoot.magnitude import Magnitude
from surefoot.operations import Bounds, Call


class Wavy(nn.Module):
    """A network that ends in ``sinc(x) = sin(πx)/(πx)``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sinc(self.linear(x))


torch.manual_seed(0)
model, x = Wavy().double(), torch.randn(6, 4, dtype=torch.float64)
try:
    sf.certify(model, x, domain=sf.Ball(0.1))
except sf.errors.UnsupportedOperation as refused:
    print(refused)

# %%
# The rule. All arithmetic on bounds is on magnitudes, which round up and do not overflow.


@sf.register_rule("aten.sinc")
def sinc(call: Call) -> Bounds:
    r"""Slope π/2, curvature π²/3, values within 1, entry by entry.

    :math:`\mathrm{sinc}(x) = \int_0^1\cos(\pi xt)\,dt`, so the k-th derivative is at most
    :math:`\int_0^1(\pi t)^k\,dt = \pi^k/(k + 1)`: 1, π/2 and π²/3; the last is reached at 0. The Jacobian is
    diagonal.
    """
    pi = Magnitude.of(3.1415926535897936)  # the double above π
    return Bounds(
        jacobian={"self": pi / 2},
        curvature={("self", "self"): pi**2 / 3},
        bound=Magnitude.of(call.numel).sqrt(),
    )


certificate = sf.certify(model, x, domain=sf.Ball(0.1))
print(certificate)

# %%
# Attack it: the best points a search finds stay below.

print(certificate.bracket(sf.estimate(model, x, domain=sf.Ball(0.1))))

# %%
# What the rule claims of the second derivative, and the second derivative itself: the bound is reached at 0.

place = torch.linspace(-4, 4, 800, dtype=torch.float64, requires_grad=True)
(slope,) = torch.autograd.grad(torch.sinc(place).sum(), place, create_graph=True)
(bend,) = torch.autograd.grad(slope.sum(), place)
figure = Figure(figsize=(6.5, 3.2), layout="constrained")
axes = figure.add_subplot()
axes.plot(place.detach(), bend.detach().abs(), label="|sinc''|")
axes.axhline(torch.pi**2 / 3, linestyle="--", color="0.4", label="π²/3, the rule")
axes.set_xlabel("x")
axes.legend(frameon=False)
