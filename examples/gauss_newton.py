r"""
Gauss-Newton against Adam
=========================

**Problem.** Fit a network to 512 handwritten digits: how many gradients does a small training loss cost?

**Method.** Gauss-Newton steps by duality, with damping adapted to the ratio of actual and predicted decrease,
and Adam with the best of seven learning rates. Work is counted in gradients of the whole batch; what a step
costs in gradients is measured here, on the same machine and in the same run.

**Statement.** Proposition ``dual_gn_step``: a Gauss-Newton step is a linear system in the outputs.

**Result.** The curves below, at equal work.
"""

import time

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import surefoot as sf

images, classes = load_digits(return_X_y=True)
x, y = torch.tensor(images[:512], dtype=torch.float32) / 16, torch.tensor(classes[:512])
loss_function = sf.CrossEntropy()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def gauss_newton(steps: int) -> tuple[list[float], float]:
    """The losses, and the seconds per step."""
    optimizer = sf.optim.GaussNewton(network(), loss_function)
    optimizer.step(x, y)  # traces the model
    start = time.perf_counter()
    losses = [float(optimizer.step(x, y)) for _ in range(steps)]
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


second_order, seconds = gauss_newton(10)
rates = [10.0 ** (-k / 2) for k in range(1, 8)]
runs = {rate: adam(rate, 1000) for rate in rates}
best = min(rates, key=lambda rate: runs[rate][0][-1])
first_order, gradient_seconds = runs[best]
ratio = seconds / gradient_seconds
print(f"Gauss-Newton: loss {second_order[-1]:.1e} after {len(second_order)} steps")
print(f"Adam, best of {len(rates)} learning rates: loss {first_order[-1]:.1e} after {len(first_order)} steps")

# %%
# Loss against time, in units of one gradient step of Adam.

figure = Figure(figsize=(6.5, 3.6), layout="constrained")
axes = figure.add_subplot()
axes.semilogy([ratio * (k + 1) for k in range(len(second_order))], second_order, marker=".", label="Gauss-Newton")
axes.semilogy(range(1, len(first_order) + 1), first_order, label=f"Adam, learning rate {best:.2g}")
axes.set_xlabel("time, in steps of Adam")
axes.set_ylabel("training loss")
axes.legend(frameon=False)
