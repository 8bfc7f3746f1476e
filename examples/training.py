r"""
Training without a learning rate
================================

**Problem.** Train a network on handwritten digits without choosing a learning rate, and know before each step
that it descends.

**Method.** Directions are those of L-BFGS. Before a step is taken, the objective is evaluated where it leads, with
a bound on the round-off of every operation; it is taken only if the value in exact arithmetic is lower.

**Statement.** The error of a value is at most the sum, over all operations, of their own round-off times their
costates (``surefoot.valuation.propagation``).

**Result.** No step goes upwards, each is proved, and the loss after 50 steps is tiny. Then one step is promised
ahead, from derivatives alone.
"""

from itertools import pairwise

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import surefoot as sf

torch.manual_seed(0)
images, classes = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(classes)
train, test = torch.randperm(len(y)).split([3 * len(y) // 4, len(y) - 3 * len(y) // 4])
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()

optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
for step in range(50):
    optimizer.step(x[train], y[train])
    record = optimizer.history[-1]
    if step % 5 == 0:
        print(
            f"step {step:>4}   loss {record.loss:.3e}   step size {record.step_size:8.3f}   "
            f"proved decrease {record.proved_decrease:.2e}"
        )

# %%
# What was proved, and what happened.

loss = optimizer.value(x[train], y[train])
losses = [record.loss for record in optimizer.history] + [loss]
ascents = sum(after > earlier for earlier, after in pairwise(losses))
print(f"training loss {losses[0]:.3g} → {loss:.3g}, {ascents} steps upwards")
print(optimizer.guarantee)
found = optimizer.stationarity()
print(f"smallest gradient norm {found.smallest:.2e}; proved from the decreases alone: at most {found.bound:.2e}")
with torch.no_grad():
    accuracy = float((model(x[test]).argmax(dim=1) == y[test]).double().mean())
print(f"accuracy on {len(test)} other digits {accuracy:.1%}; of this nothing is proved")

# %%
# A step that is promised before anything is evaluated: along the segment every tensor is a polynomial in the step
# with a proved remainder, and the minimiser of the resulting bound is the step.

fresh = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
ahead = sf.CertifiedDescent(fresh, sf.CrossEntropy(), proof="segment")
ahead.step(x[train], y[train])
ahead.step(x[train], y[train])
first = ahead.history[0]
print(f"promised decrease {first.proved_decrease:.3e}, found {first.decrease:.3e}")

# %%
# The loss before each step, and by how much the step was proved to lower it.

figure = Figure(figsize=(6.5, 3.4), layout="constrained")
axes = figure.add_subplot()
axes.semilogy([record.loss for record in optimizer.history], label="training loss")
axes.semilogy([record.proved_decrease for record in optimizer.history], "--", label="proved decrease")
axes.set_xlabel("step")
axes.legend(frameon=False)
