r"""
Gauss-Newton against Adam
=========================

**Problem.** Fit a network to the measurements of 442 patients (scikit-learn's diabetes data): which training
loss is reached in which time?

**Method.** Gauss-Newton steps by duality, with damping adapted to the ratio of actual and predicted decrease,
and Adam with the best of seven learning rates. Both see all data in every step, on one thread in the same run.

**Statement.** Proposition ``dual_gn_step``: a Gauss-Newton step is a linear system in the outputs, here of size
442, whatever the number of parameters.

**Result.** At equal times the two are alike until the fit is close; from there Gauss-Newton converges
quadratically, down to round-off, and Adam does not. This is the case for which it is made: few outputs per
sample. With ten classes and 512 samples the system has 5,120 unknowns, one step costs hundreds of gradients,
and Adam is faster; ``sf.cost`` tells what a step costs beforehand. A small training loss is not a small
test error: here the network learns the noise as well.
"""

import time

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from torch import nn

import surefoot as sf

patients, progression = load_diabetes(return_X_y=True)
x = torch.tensor(patients) / torch.tensor(patients).std(dim=0)
y = torch.tensor(progression)[:, None]
y = (y - y.mean()) / y.std()
loss_function = sf.Square()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def gauss_newton(steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds per step."""
    optimizer = sf.optim.GaussNewton(network(), loss_function)
    optimizer.step(x, y)  # traces the model
    start = time.perf_counter()
    losses = [optimizer.step(x, y) for _ in range(steps)]
    return losses, (time.perf_counter() - start) / steps


def adam(learning_rate: float, steps: int) -> tuple[list[float], float]:
    """The same for Adam."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, (time.perf_counter() - start) / steps


second_order, seconds = gauss_newton(30)
rates = [10.0 ** (-k / 2) for k in range(1, 8)]
runs = {rate: adam(rate, 2000) for rate in rates}
best = min(rates, key=lambda rate: min(runs[rate][0]))
first_order, gradient_seconds = runs[best]
ratio = seconds / gradient_seconds
print(f"Gauss-Newton: loss {second_order[-1]:.0e} after {len(second_order)} steps")
print(f"Adam, best of {len(rates)} learning rates: {min(first_order):.0e} within {len(first_order)} steps")

# %%
# Loss against time, in units of one step of Adam.

figure = Figure(figsize=(6.5, 3.6), layout="constrained")
axes = figure.add_subplot()
axes.semilogy([ratio * (k + 1) for k in range(len(second_order))], second_order, marker=".", label="Gauss-Newton")
axes.semilogy(range(1, len(first_order) + 1), first_order, label=f"Adam, learning rate {best:.2g}")
axes.set_xlabel("time, in steps of Adam")
axes.set_ylabel("training loss")
axes.legend(frameon=False)
