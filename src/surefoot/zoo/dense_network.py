"""The paper's dense network: every layer reads all states before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import register
from surefoot.zoo.samples import vector


class DenseLayer(nn.Module):
    r"""One layer :math:`\phi_t(x_{0:t-1}, v_t) = a\big(\sum_{s<t} W_{t,s} x_s + w_t\big)`.

    ``maps.s`` holds :math:`W_{t,s}`; the intercept :math:`w_t` is in the last of them, because a sum of
    intercepts is one intercept.
    """

    def __init__(self, inputs: Sequence[int], outputs: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        last = len(inputs) - 1
        self.maps = nn.ModuleList(
            nn.Linear(size, outputs, bias=bias and position == last) for position, size in enumerate(inputs)
        )
        self.activation = make_activation(activation)

    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        """The next state from all states so far."""
        total = self.maps[0](states[0])
        for one_map, state in zip(list(self.maps)[1:], states[1:], strict=True):
            total = total + one_map(state)
        return self.activation(total)


class Dense(nn.Module):
    """A dense network; made by :func:`dense`."""

    def __init__(self, sizes: Sequence[int], activation: Activation, bias: bool) -> None:
        super().__init__()
        last = len(sizes) - 1
        self.layers = nn.ModuleList(
            DenseLayer(sizes[:t], sizes[t], activation if t < last else "identity", bias)
            for t in range(1, len(sizes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors ``(batch, sizes[0])`` to ``(batch, sizes[-1])``."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states))
        return states[-1]


@register("dense", example=lambda sizes: vector(sizes[0]), small={"sizes": (5, 7, 6, 3)})
def dense(
    sizes: Sequence[int] = (16, 32, 32, 32, 10), activation: Activation = "softplus", bias: bool = True
) -> Dense:
    r"""Dense network :math:`x_t = a(\sum_{s<t} W_{t,s} x_s + w_t)`, without activation on the last layer.

    The paper's eq. dense_net, with one set of parameters per previous state and matrix products as the
    bi-affine maps.

    Args:
        sizes: the size of the input :math:`x_0`, then that of each state :math:`x_t`.
        activation: of all layers but the last, by name or class.
        bias: whether layers have intercepts :math:`w_t`.
    """
    return Dense(check_sizes(sizes, "dense"), activation, bias)
