"""Train a network on handwritten digits without a learning rate, every step proved before it is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import surefoot as sf
from surefoot.optim.record import StepRecord

STEPS = 200


def main() -> None:
    """Train on three quarters of the digits, test on the rest."""
    torch.manual_seed(0)
    (x, y), (x_test, y_test) = data()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    optimizer = sf.optim.CertifiedDescent(model, sf.CrossEntropy(), progress=progress(every=20))
    for _ in range(STEPS):
        before = copy.deepcopy(model)
        optimizer.step(x, y)
    loss = optimizer.value(x, y)
    losses = [record.loss for record in optimizer.history] + [loss]
    ascents = sum(after > before for before, after in pairwise(losses))
    print(f"\nTraining loss {losses[0]:.3g} → {loss:.3g} in {STEPS} steps, {ascents} of them upwards.")
    print(optimizer.guarantee)

    found = optimizer.stationarity()
    print(
        f"Smallest gradient norm: {found.smallest:.2e}; proved from the promises alone: at most {found.bound:.2e}."
    )
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(dim=1) == y_test).double().mean())
    print(f"Accuracy on {len(y_test)} digits that were not trained on: {accuracy:.1%}; of this nothing is proved.")

    last = optimizer.history[-1]
    after = dict(model.named_parameters())
    direction = {
        name: (after[name] - start).detach() / last.step_size for name, start in before.named_parameters()
    }
    domain = sf.Segment(direction, last.step_size, order=optimizer.order)
    print(f"\nThe last step, of size {last.step_size:.3g}, certified again from its beginning:")
    print(sf.certify(before, x, objective=sf.CrossEntropy(y), domain=domain))
    print(f"promised decrease {last.promised_decrease:.3e}, found {last.loss - loss:.3e}")


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and classes to train on and to test on."""
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float64) / 16, torch.tensor(classes)
    order = torch.randperm(len(y))
    train, test = order[: 3 * len(y) // 4], order[3 * len(y) // 4 :]
    return (x[train], y[train]), (x[test], y[test])


def progress(every: int) -> Callable[[StepRecord], None]:
    """A line for some of the steps; in colour if rich is installed."""
    try:
        from rich import print as show
    except ImportError:
        show = print

    def report(record: StepRecord) -> None:
        if record.step % every == 0:
            show(
                f"step {record.step:>4}   loss {record.loss:.5f}   step size {record.step_size:8.3f}   "
                f"promised decrease {record.promised_decrease:.2e}"
            )

    return report


if __name__ == "__main__":
    main()
