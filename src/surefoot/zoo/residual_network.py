"""The paper's residual network of fully connected layers."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import register
from surefoot.zoo.samples import vector


class ResidualLayer(nn.Module):
    r"""One layer :math:`a(b(x_{t-1}, u_t) + x_{t-2})`, where :math:`b` is a matrix product."""

    def __init__(self, width: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=bias)
        self.activation = make_activation(activation)

    def forward(self, last: torch.Tensor, penultimate: torch.Tensor | None) -> torch.Tensor:
        """The next state; ``None`` stands for :math:`x_{-1} = 0`."""
        total = self.map(last)
        if penultimate is not None:
            total = total + penultimate
        return self.activation(total)


class Residual(nn.Module):
    """A residual network; made by :func:`residual`."""

    def __init__(
        self, width: int, depth: int, inputs: int, outputs: int | None, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=bias)
        self.layers = nn.ModuleList(ResidualLayer(width, activation, bias) for _ in range(depth))
        self.head = nn.Identity() if outputs is None else nn.Linear(width, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors ``(batch, inputs)`` to ``(batch, outputs)``."""
        penultimate, last = None, self.embedding(x)
        for layer in self.layers:
            penultimate, last = last, layer(last, penultimate)
        return self.head(last)


@register(
    "residual",
    example=lambda inputs: vector(inputs),
    small={"width": 6, "depth": 3, "inputs": 5, "outputs": 3},
)
def residual(
    width: int = 32,
    depth: int = 4,
    inputs: int = 16,
    outputs: int | None = 10,
    activation: Activation = "softplus",
    bias: bool = True,
) -> Residual:
    r"""Residual network :math:`x_t = a(W_t x_{t-1} + w_t + x_{t-2})` with :math:`x_{-1} = 0`.

    The paper's eq. chain_res_def. All states have one size, so the input is embedded first if its size is
    another one, and a linear head follows; ``inputs=width, outputs=None`` is the bare chain.

    Args:
        width: the size of each state.
        depth: the number of residual layers.
        inputs: the size of the input.
        outputs: the size of the output of the head; ``None`` for no head.
        activation: by name or class.
        bias: whether layers have intercepts :math:`w_t`.
    """
    check_sizes((inputs, *[width] * depth, width if outputs is None else outputs), "residual")
    return Residual(width, depth, inputs, outputs, activation, bias)
