r"""
A first certificate
===================

**Problem.** How steep and how curved can the output of a network be, for *all* parameters near the present
ones?

**Method.** One pass over the traced graph carries a bound :math:`m`, a Lipschitz constant :math:`\ell` and a
smoothness constant :math:`L` from operation to operation. A search for the worst point gives lower bounds of a
type of their own, so that the truth is bracketed.

**Statement.** Algorithm ``smooth_comput`` and Proposition ``smoothdeep`` of the paper, with certified
constants.

**Result.** The bracket below; with an objective on top, a step size that is proved to descend.
"""

import torch
from torch import nn

import surefoot as sf

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
x = torch.randn(32, 8, dtype=torch.float64)
domain = sf.Ball(0.05)  # all parameters together within 0.05 of the present ones

certificate = sf.certify(model, x, domain=domain)
print(certificate)

# %%
# The largest values a search finds in the same ball are lower bounds of the same constants.

print(certificate.bracket(sf.estimate(model, x, domain=domain)))

# %%
# An objective is real-valued, so its smoothness gives a step size: 1/L, or less if that would leave the ball. The
# step stays in the ball, so it cannot ascend.

y = torch.arange(32) % 3
objective = sf.CrossEntropy(y)
certificate = sf.certify(model, x, objective, domain=domain)
before = objective(model(x))
gradient = torch.autograd.grad(before, list(model.parameters()))
length = torch.cat([g.flatten() for g in gradient]).norm()
step = certificate.step_size
with torch.no_grad():
    for parameter, slope in zip(model.parameters(), gradient, strict=True):
        parameter -= step * slope
    after = objective(model(x))
promised = step * float(length) ** 2 / 2
print(f"step size {step:.3f}: promised decrease {promised:.2e}, found {float(before.detach() - after):.2e}")

# %%
# Where it comes from, layer by layer and pair of blocks by pair of blocks:

figure, axes = certificate.plot()
