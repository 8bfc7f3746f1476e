r"""
Why the ε of batch-normalisation matters
========================================

**Problem.** Batch-normalisation is said to make objectives smoother. When does it, by how much, and what
decides?

**Method.** The smooth VGG-16 of the paper, every block of parameters within 1, images of norm 1, batch 128,
with a batch-normalisation at each convolutional layer and :math:`\varepsilon` from :math:`10^{-4}` to
:math:`10^4`; nothing is allocated.

**Statement.** Section 5: the constants grow for :math:`\varepsilon = 10^{-2}` and shrink for :math:`\varepsilon
= 10^2`. The reason is one line of algebra: centring and dividing by :math:`\sqrt{\sigma^2 + \varepsilon}` has
:math:`\ell = \varepsilon^{-1/2}` and :math:`L = 0.8587\,m^{-1/2}\varepsilon^{-1}`, so a layer multiplies the
product of slopes by :math:`\varepsilon^{-1/2}`.

**Result.** With the certified constants normalisation pays from the :math:`\varepsilon` at which the curves
below cross the line of the network without it. The default of PyTorch, :math:`10^{-5}`, is far on the other
side: over *all* parameters of norm one a feature may have a variance of nearly zero, and is then blown up.
"""

import torch
from matplotlib.figure import Figure

import surefoot as sf


def certify(name: str, **options: float) -> sf.Certificate:
    with torch.device("meta"):
        model, images = sf.zoo.build(name, **options), sf.zoo.example_input(name, batch=128)
    return sf.certify(model, images, domain=sf.ProductBall(1.0), input_norm=1.0)


plain = certify("vgg16-smooth")
epsilons = [10.0**k for k in range(-4, 5)]
normalised = [certify("vgg16-batchnorm", batch_norm=epsilon) for epsilon in epsilons]

print(f"{'':<14}{'Lipschitz ℓ':>14}{'smoothness L':>14}")
print(f"{'without':<14}{plain.lipschitz:>14}{plain.smoothness:>14}")
for epsilon, found in zip(epsilons, normalised, strict=True):
    print(f"{f'ε = {epsilon:g}':<14}{found.lipschitz:>14}{found.smoothness:>14}")

# %%
# The smoothness against ε, with and without normalisation.

figure = Figure(figsize=(6.5, 3.6), layout="constrained")
axes = figure.add_subplot()
axes.loglog(epsilons, [float(c.smoothness) for c in normalised], marker="o", label="with batch-normalisation")
axes.axhline(float(plain.smoothness), color="black", linewidth=1, linestyle="--", label="without")
axes.set_xlabel("ε of batch-normalisation")
axes.set_ylabel("smoothness L of VGG-16")
axes.legend(frameon=False)
