r"""
Training without a learning rate
================================

**Problem.** Train a network on handwritten digits without choosing a learning rate, and know before each step
that it descends.

**Method.** Along the direction of a step every tensor is a polynomial in the step with a proved remainder; the
minimiser of the resulting bound on the objective is the step. Directions are conjugate gradients.

**Statement.** The descent lemma behind Theorem ``conv_grad``, with the curvature along the segment in place of
the one over a set.

**Result.** No step goes upwards; every promise is kept; the loss after 150 steps is small.
"""

import copy
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn

import surefoot as sf

torch.manual_seed(0)
images, classes = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(classes)
train, test = torch.randperm(len(y)).split([3 * len(y) // 4, len(y) - 3 * len(y) // 4])
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()

optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy())
for step in range(150):
    before = copy.deepcopy(model)
    optimizer.step(x[train], y[train])
    record = optimizer.history[-1]
    if step % 15 == 0:
        print(
            f"step {step:>4}   loss {record.loss:.5f}   step size {record.step_size:8.3f}   "
            f"promised decrease {record.promised_decrease:.2e}"
        )

# %%
# What was promised, and what happened.

loss = optimizer.value(x[train], y[train])
losses = [record.loss for record in optimizer.history] + [loss]
ascents = sum(after > earlier for earlier, after in pairwise(losses))
print(f"training loss {losses[0]:.3g} → {loss:.3g}, {ascents} steps upwards")
print(optimizer.guarantee)
found = optimizer.stationarity()
print(f"smallest gradient norm {found.smallest:.2e}; proved from the promises alone: at most {found.bound:.2e}")
with torch.no_grad():
    accuracy = float((model(x[test]).argmax(dim=1) == y[test]).double().mean())
print(f"accuracy on {len(test)} other digits {accuracy:.1%}; of this nothing is proved")

# %%
# The last step, certified again from its beginning.

last = optimizer.history[-1]
after = dict(model.named_parameters())
direction = {name: (after[name] - start).detach() / last.step_size for name, start in before.named_parameters()}
segment = sf.Segment(direction, last.step_size, order=optimizer.order)
print(sf.certify(before, x[train], objective=sf.CrossEntropy(y[train]), domain=segment))
print(f"promised decrease {last.promised_decrease:.3e}, found {last.loss - loss:.3e}")
