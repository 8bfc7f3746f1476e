r"""
An auto-encoder without a learning rate
=======================================

**Problem.** Represent 8×8 images of digits by 8 numbers, so that they can be reconstructed: :math:`\min_{u_e,
u_d}\frac1n\sum_i\|x_i - \psi^d(\psi^e(x_i, u_e), u_d)\|^2`.

**Method.** Encoder and decoder are two chains of computations; one behind the other they are a chain again.
Gradient descent without a learning rate: every step is proved to descend before it is taken.

**Statement.** Section "Auto-encoders" and appendix "Auto-encoders, composition of chains of computations": the
composition of two chains is a chain, so everything known about chains holds for an auto-encoder.

**Result.** Every certified step descends. The reconstruction error is compared with that of principal
components of the same dimension, the best linear auto-encoder.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor

import surefoot as sf
from surefoot.objectives import Reconstruction

CODE, SAMPLES, STEPS = 8, 500, 500


def main() -> Figure:
    """Train on some of the digits and compare; images and what is left of them."""
    torch.manual_seed(0)
    x = data()
    model = sf.zoo.autoencoder(sizes=(64, 24, CODE), activation="tanh").double()
    encoder = sf.Chain(model.encoder, x)
    chain = encoder >> sf.Chain(model.decoder, encoder.value())
    assert torch.equal(chain.value(), model(x).detach())
    print(chain)

    optimizer = sf.optim.CertifiedDescent(model, Reconstruction())
    losses = [float(optimizer.step(x, x)) for _ in range(STEPS)]
    losses.append(float(optimizer.value(x, x)))
    ascents = sum(after > before for before, after in pairwise(losses))
    for step in range(0, STEPS + 1, 100):
        print(f"step {step:>4}   loss {losses[step]:.4f}")
    print(f"Certified descent: {ascents} of {STEPS} steps upwards.\n")

    components = PCA(CODE).fit(x.numpy())
    linear = torch.as_tensor(components.inverse_transform(components.transform(x.numpy())))
    objective = Reconstruction(x)
    mean = float(objective(x.mean(dim=0).expand_as(x)))
    print(f"\nMean squared distance of an image to the mean image:      {mean:.4f}")
    print(f"to its reconstruction from {CODE} principal components:       {float(objective(linear)):.4f}")
    coded = model(x).detach()
    print(f"to its reconstruction by the auto-encoder, code of {CODE}:    {float(objective(coded)):.4f}")
    return pictures({"images": x, f"{CODE} components": linear, "auto-encoder": coded}, losses)


def pictures(rows: dict[str, Tensor], losses: list[float]) -> Figure:
    """The loss by step, and ten images in each row."""
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    axes = left.subplots()
    axes.semilogy(losses)
    axes.set_xlabel("step of certified descent")
    axes.set_ylabel("loss")
    for row, (name, images) in zip(right.subplots(len(rows), 1), rows.items(), strict=True):
        row.imshow(images[:10].reshape(10, 8, 8).transpose(0, 1).reshape(8, 80), cmap="gray_r", vmin=0, vmax=1)
        row.set_title(name, fontsize=9, loc="left")
        row.set_axis_off()
    return figure


def data() -> Tensor:
    """Images with entries between 0 and 1."""
    images, _ = load_digits(return_X_y=True)
    return torch.tensor(images[:SAMPLES], dtype=torch.float64) / 16


if __name__ == "__main__":
    figure = main()
