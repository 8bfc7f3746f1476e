"""The automatic-differentiation oracle (one value and one pull-back) against ``torch.autograd.grad``.

The baseline is the forward pass of the model as it is and the gradient of ⟨μ, model(x)⟩. The oracle runs the
captured graph instead and keeps what further pull-backs need; the capture is made once, outside the clock.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import surefoot as sf
from benchmarks.timing import Measurement, compare

TARGET = 1.15


def run() -> list[Measurement]:
    """A perceptron and VGG-16 at its real size."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    digits = torch.randn(256, 784, generator=generator)
    images = torch.randn(2, 3, 224, 224, generator=generator)
    return [
        _oracle("MLP 784-1024-512-10, batch 256", sf.zoo.mlp((784, 1024, 512, 10)), digits, pairs=41, calls=4),
        _oracle("VGG-16 224×224, batch 2", sf.zoo.vgg16(), images, pairs=9, calls=1),
    ]


def _oracle(name: str, model: nn.Module, x: Tensor, pairs: int, calls: int) -> Measurement:
    chain = sf.Chain(model, x)
    parameters = list(model.parameters())
    slope = torch.randn_like(model(x).detach())

    def oracle() -> object:
        found = chain.autodiff()
        return found.value, found.pullback(slope)

    def plain() -> object:
        value = model(x)
        return value, torch.autograd.grad(value, parameters, slope)

    return compare(
        f"{name}: oracle, value and pull-back",
        oracle,
        "forward and torch.autograd.grad",
        plain,
        target=TARGET,
        pairs=pairs,
        calls=calls,
    )
