"""Networks of fully connected layers: the perceptron, and the paper's dense, highway and residual networks.

Srivastava's gated highway network stands beside the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation
from surefoot.zoo.registry import register, vector

# The gates start nearly closed, so that a deep network starts near the identity (Srivastava et al. suggest
# intercepts such as −1 or −3).
_GATE_INTERCEPT = -2.0


@register("mlp", example=lambda sizes: vector(sizes[0]), small={"sizes": (5, 7, 6, 3)})
def mlp(
    sizes: Sequence[int] = (16, 32, 32, 10), activation: Activation = "softplus", bias: bool = True
) -> nn.Sequential:
    r"""Multi-layer perceptron :math:`x_t = a(W_t x_{t-1} + w_t)`, without activation on the last layer.

    Args:
        sizes: the size of the input, then that of each layer's output.

    >>> sf.zoo.mlp((2, 8, 1), "tanh")
    Sequential(
      (0): Linear(in_features=2, out_features=8, bias=True)
      (1): Tanh()
      (2): Linear(in_features=8, out_features=1, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(check_sizes(sizes, "mlp")):
        layers += [nn.Linear(inputs, outputs, bias=bias), make_activation(activation)]
    return nn.Sequential(*layers[:-1])


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

    def forward(self, states: list[Tensor]) -> Tensor:
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

    def forward(self, x: Tensor) -> Tensor:
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

    >>> sf.zoo.dense((4, 8, 8, 2))(torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """
    return Dense(check_sizes(sizes, "dense"), activation, bias)


def _through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """The last state, each one computed from the last two; ``None`` stands for :math:`x_{-1} = 0`."""
    penultimate: Tensor | None = None
    for layer in layers:
        penultimate, x = x, layer(x, penultimate)
    return x


class HighwayLayer(nn.Module):
    r"""One layer :math:`\phi_t(x_{t-2:t-1}, v_t) = a(W_{t,t-1} x_{t-1} + W_{t,t-2} x_{t-2} + w_t)`.

    The first layer has no penultimate state.
    """

    def __init__(
        self, last: int, penultimate: int | None, outputs: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.last = nn.Linear(last, outputs, bias=bias)
        self.penultimate = None if penultimate is None else nn.Linear(penultimate, outputs, bias=False)
        self.activation = make_activation(activation)

    def forward(self, last: Tensor, penultimate: Tensor | None) -> Tensor:
        """The next state from the last two."""
        total = self.last(last)
        if self.penultimate is not None:
            total = total + self.penultimate(penultimate)
        return self.activation(total)


class Highway(nn.Module):
    """The paper's highway network; made by :func:`highway`."""

    def __init__(self, sizes: tuple[int, ...], activation: Activation, bias: bool) -> None:
        super().__init__()
        before = (None, *sizes)  # the size of the penultimate state of each layer
        kinds = [activation] * (len(sizes) - 2) + ["identity"]
        self.layers = nn.ModuleList(
            HighwayLayer(last, penultimate, outputs, kind, bias)
            for last, penultimate, outputs, kind in zip(sizes, before, sizes[1:], kinds, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Vectors ``(batch, inputs)`` to ``(batch, outputs)``."""
        return _through(self.layers, x)


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

    def forward(self, x: Tensor) -> Tensor:
        """Each coordinate between its old value and that of the transform."""
        return x + torch.sigmoid(self.gate(x)) * (self.activation(self.transform(x)) - x)


class GatedHighway(nn.Sequential):
    """Srivastava's highway network: embedding, gated layers of one width, linear head."""

    def __init__(
        self, inputs: int, width: int, depth: int, outputs: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=bias)
        self.layers = nn.Sequential(*(GatedLayer(width, activation, bias) for _ in range(depth)))
        self.head = nn.Linear(width, outputs, bias=bias)


@register("highway", example=lambda inputs: vector(inputs),
          small={"width": 6, "depth": 3, "inputs": 5, "outputs": 3},
          variants={"gated": {"gated": True}})  # fmt: skip
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
        bias: whether layers have intercepts; gates always have.
        gated: whether states are mixed by gates.

    >>> sf.zoo.highway(width=8, depth=2, inputs=4, outputs=3)(torch.ones(5, 4)).shape
    torch.Size([5, 3])
    """
    sizes = check_sizes((inputs, *[width] * depth, outputs), "highway")
    if gated:
        return GatedHighway(inputs, width, depth, outputs, activation, bias)
    return Highway(sizes, activation, bias)


class ResidualLayer(nn.Module):
    r"""One layer :math:`a(b(x_{t-1}, u_t) + x_{t-2})`, where :math:`b` is a matrix product."""

    def __init__(self, width: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=bias)
        self.activation = make_activation(activation)

    def forward(self, last: Tensor, penultimate: Tensor | None) -> Tensor:
        """The next state from the last two."""
        total = self.map(last)
        return self.activation(total if penultimate is None else total + penultimate)


class Residual(nn.Module):
    """A residual network; made by :func:`residual`."""

    def __init__(
        self, width: int, depth: int, inputs: int, outputs: int | None, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.embedding = nn.Identity() if inputs == width else nn.Linear(inputs, width, bias=bias)
        self.layers = nn.ModuleList(ResidualLayer(width, activation, bias) for _ in range(depth))
        self.head = nn.Identity() if outputs is None else nn.Linear(width, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors ``(batch, inputs)`` to ``(batch, outputs)``."""
        return self.head(_through(self.layers, self.embedding(x)))


@register(
    "residual", example=lambda inputs: vector(inputs), small={"width": 6, "depth": 3, "inputs": 5, "outputs": 3}
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

    This is the paper's eq. chain_res_def. All states have one size, so an input of another size is embedded first,
    and a linear head follows; ``inputs=width, outputs=None`` is the bare chain.

    Args:
        width: the size of each state.
        depth: the number of residual layers.
        outputs: the size of the output of the head; ``None`` for no head.

    >>> sf.zoo.residual(width=8, depth=2, inputs=4, outputs=3)(torch.ones(5, 4)).shape
    torch.Size([5, 3])
    """
    check_sizes((inputs, *[width] * depth, width if outputs is None else outputs), "residual")
    return Residual(width, depth, inputs, outputs, activation, bias)
