r"""
The paper's study of VGG
========================

**Problem.** How do the constants of VGG-16 change when it is made smooth, and when it is normalised?

**Method.** Every block of parameters within 1, one batch of 128 images of norm 1, nothing allocated: the models
are on the ``meta`` device. The paper's Algorithm ``smooth_comput`` with its printed constants stands next to
the certified calculus.

**Statement.** Section 5: the smooth VGG has the same :math:`\ell` up to :math:`10^{-4}`; batch-normalisation
with :math:`\varepsilon = 10^{-2}` makes the constants larger, with :math:`\varepsilon = 10^2` smaller.

**Result.** The claims on batch-normalisation hold. That on the smooth VGG holds only if the value of the
soft-plus at zero is left out. A star marks printed numbers that rest on a constant which is not an upper bound.
"""

import torch
from matplotlib.figure import Figure

import surefoot as sf

NAMES = {
    "vgg16": {},
    "vgg16-smooth": {},
    "vgg16-batchnorm": {},
    "vgg16-batchnorm, ε = 100": {"batch_norm": 100.0},
}

lengths: dict[str, list[float]] = {}
print(f"{'':<26}{'as printed: ℓ':>16}{'L':>14}   {'certified: ℓ':>16}{'L':>14}")
for title, options in NAMES.items():
    name = title.partition(",")[0]
    with torch.device("meta"):
        model, images = sf.zoo.build(name, **options), sf.zoo.example_input(name, batch=128)
    printed, proved = (
        sf.certify(model, images, domain=sf.ProductBall(1.0), input_norm=1.0, constants=constants)
        for constants in ("paper", "certified")
    )
    star = "*" if printed.flags else " "
    print(
        f"{title:<26}{printed.lipschitz:>15}{star}{printed.smoothness:>14}"
        f"   {proved.lipschitz:>16}{proved.smoothness:>14}"
    )
    lengths[title] = [float(each.smoothness) for each in (printed, proved)]

# %%
# The smoothness of each network on a logarithmic axis. Where there is no bar, it is infinite.

figure = Figure(figsize=(6.5, 3.2), layout="constrained")
axes = figure.add_subplot()
for k, label in enumerate(("as the paper prints it", "certified")):
    finite = [size[k] if size[k] < float("inf") else float("nan") for size in lengths.values()]
    axes.barh([row + 0.38 * k for row in range(len(lengths))], finite, height=0.36, label=label)
axes.set_yticks([row + 0.19 for row in range(len(lengths))], list(lengths))
axes.set_xscale("log")
axes.invert_yaxis()
axes.set_xlabel("smoothness L")
axes.legend(frameon=False)
