"""Highway networks: the paper's, which read the last two states, and the gated ones of Srivastava."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import register
from surefoot.zoo.samples import vector

# The gates start nearly closed, so that a deep network starts near the identity (Srivastava et al. suggest
# intercepts such as −1 or −3).
_GATE_INTERCEPT = -2.0


class HighwayLayer(nn.Module):
    r"""One layer :math:`\phi_t(x_{t-2:t-1}, v_t) = a(W_{t,t-1} x_{t-1} + W_{t,t-2} x_{t-2} + w_t)`.

    The first layer has no penultimate state: :math:`x_{-1} = 0`.
    """

    def __init__(
        self, last: int, penultimate: int | None, outputs: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.last = nn.Linear(last, outputs, bias=bias)
        self.penultimate = None if penultimate is None else nn.Linear(penultimate, outputs, bias=False)
        self.activation = make_activation(activation)

    def forward(self, last: torch.Tensor, penultimate: torch.Tensor | None) -> torch.Tensor:
        """The next state from the last two."""
        total = self.last(last)
        if self.penultimate is not None:
            total = total + self.penultimate(penultimate)
        return self.activation(total)


class Highway(nn.Module):
    """The paper's highway network; made by :func:`highway`."""

    def __init__(self, sizes: tuple[int, ...], activation: Activation, bias: bool) -> None:
        super().__init__()
        final = len(sizes) - 1
        self.layers = nn.ModuleList(
            HighwayLayer(
                last=sizes[t - 1],
                penultimate=sizes[t - 2] if t > 1 else None,
                outputs=sizes[t],
                activation=activation if t < final else "identity",
                bias=bias,
            )
            for t in range(1, len(sizes))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors ``(batch, inputs)`` to ``(batch, outputs)``."""
        penultimate: torch.Tensor | None = None
        for layer in self.layers:
            penultimate, x = x, layer(x, penultimate)
        return x


class GatedLayer(nn.Module):
    r"""One layer :math:`T(x) \circ H(x) + (1 - T(x)) \circ x`.

    The transform is :math:`H(x) = a(W x + w)`, the gate :math:`T(x) = \sigma(V x + v)`.
    """

    def __init__(self, width: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width, bias=bias)
        self.activation = make_activation(activation)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, _GATE_INTERCEPT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each coordinate somewhere between what it was and what the transform says."""
        return x + torch.sigmoid(self.gate(x)) * (self.activation(self.transform(x)) - x)


class GatedHighway(nn.Module):
    """Srivastava's highway network: embedding, gated layers of one width, linear head."""

    def __init__(
        self, inputs: int, width: int, depth: int, outputs: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=bias)
        self.layers = nn.Sequential(*(GatedLayer(width, activation, bias) for _ in range(depth)))
        self.head = nn.Linear(width, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors ``(batch, inputs)`` to ``(batch, outputs)``."""
        return self.head(self.layers(self.embedding(x)))


@register(
    "highway",
    example=lambda inputs: vector(inputs),
    small={"width": 6, "depth": 3, "inputs": 5, "outputs": 3},
    variants={"gated": {"gated": True}},
)
def highway(
    width: int = 32,
    depth: int = 4,
    inputs: int = 16,
    outputs: int = 10,
    activation: Activation = "softplus",
    bias: bool = True,
    gated: bool = False,
) -> Highway | GatedHighway:
    r"""Highway network :math:`x_t = a(W_{t,t-1} x_{t-1} + W_{t,t-2} x_{t-2} + w_t)`: the last two states.

    This is the paper's sense of the word: a dense network that keeps only the last two states. The last
    layer, to ``outputs``, has no activation. With ``gated`` (the variant ``highway-gated``) it is the
    network that the name comes from, Srivastava, Greff and Schmidhuber, "Highway networks", 2015:
    :math:`x_t = T(x_{t-1}) \circ H(x_{t-1}) + (1 - T(x_{t-1})) \circ x_{t-1}`.

    Args:
        width: the size of each hidden state.
        depth: the number of hidden states.
        inputs: the size of the input; a gated network embeds it first if it is not ``width``.
        outputs: the size of the output.
        activation: of the hidden layers, by name or class.
        bias: whether layers have intercepts; gates always have.
        gated: whether states are mixed by gates.
    """
    sizes = check_sizes((inputs, *[width] * depth, outputs), "highway")
    if gated:
        return GatedHighway(inputs, width, depth, outputs, activation, bias)
    return Highway(sizes, activation, bias)
