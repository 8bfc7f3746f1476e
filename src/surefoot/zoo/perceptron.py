"""The multi-layer perceptron: fully connected layers in a chain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import register
from surefoot.zoo.samples import vector


@register("mlp", example=lambda sizes: vector(sizes[0]), small={"sizes": (5, 7, 6, 3)})
def mlp(
    sizes: Sequence[int] = (16, 32, 32, 10), activation: Activation = "softplus", bias: bool = True
) -> nn.Sequential:
    r"""Multi-layer perceptron :math:`x_t = a(W_t x_{t-1} + w_t)`, without activation on the last layer.

    Args:
        sizes: the size of the input, then that of each layer's output.
        activation: between layers, by name or class.
        bias: whether layers have intercepts :math:`w_t`.

    >>> mlp((2, 8, 1), "tanh")
    Sequential(
      (0): Linear(in_features=2, out_features=8, bias=True)
      (1): Tanh()
      (2): Linear(in_features=8, out_features=1, bias=True)
    )
    """
    sizes = check_sizes(sizes, "mlp")
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), make_activation(activation)]
    return nn.Sequential(*layers[:-1])
