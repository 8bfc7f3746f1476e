"""Networks of fully connected layers: the perceptron, and the paper's dense, highway and residual networks.

All are vectors ``(batch, inputs)`` to ``(batch, outputs)``; the last layer has no activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from surefoot.zoo.parts import Activation, check_sizes, make_activation


def mlp(
    sizes: Sequence[int] = (16, 32, 32, 10), activation: Activation = "softplus", bias: bool = True
) -> nn.Sequential:
    r"""Multi-layer perceptron :math:`x_t = a(W_t x_{t-1} + w_t)`; ``sizes`` are those of the input and the layers.

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


class StatesLayer(nn.Module):
    r"""One layer :math:`a\big(\sum_s W_{t,s} x_s + w_t\big)` of the states :math:`x_s` that it reads.

    ``maps`` are the :math:`W_{t,s}`; the last of them has the intercept, as a sum of intercepts is one intercept.
    """

    def __init__(self, inputs: Sequence[int], outputs: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        last = len(inputs) - 1
        self.maps = nn.ModuleList(nn.Linear(n, outputs, bias=bias and s == last) for s, n in enumerate(inputs))
        self.activation = make_activation(activation)

    def forward(self, states: list[Tensor]) -> Tensor:
        total = self.maps[0](states[0])
        for one_map, state in zip(list(self.maps)[1:], states[1:], strict=True):
            total = total + one_map(state)
        return self.activation(total)


class ResidualLayer(nn.Module):
    r"""One layer :math:`a(b(x_{t-1}, u_t) + x_{t-2})`, where :math:`b` is a matrix product."""

    def __init__(self, width: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=bias)
        self.activation = make_activation(activation)

    def forward(self, states: list[Tensor]) -> Tensor:
        total = self.map(states[-1])
        return self.activation(total if len(states) == 1 else total + states[0])


class States(nn.Module):
    """Layers that each read the last ``memory`` states (all if ``None``), from ``embedding(x)`` to ``head``."""

    def __init__(
        self, layers: Sequence[nn.Module], memory: int | None, embedding: nn.Module | None, head: nn.Module | None
    ) -> None:
        super().__init__()
        self.memory = memory
        self.embedding, self.head = embedding or nn.Identity(), head or nn.Identity()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        states = [self.embedding(x)]
        for layer in self.layers:
            states.append(layer(states if self.memory is None else states[-self.memory :]))
        return self.head(states[-1])


def dense(
    sizes: Sequence[int] = (16, 32, 32, 32, 10), activation: Activation = "softplus", bias: bool = True
) -> States:
    r"""Dense network :math:`x_t = a(\sum_{s<t} W_{t,s} x_s + w_t)` (the paper's eq. dense_net).

    It has one set of parameters per previous state, and matrix products as the bi-affine maps.
    """
    return _states(check_sizes(sizes, "dense"), None, activation, bias)


def highway(
    width: int = 32,
    depth: int = 4,
    inputs: int = 16,
    outputs: int = 10,
    activation: Activation = "softplus",
    bias: bool = True,
) -> States:
    r"""Highway network :math:`x_t = a(W_{t,t-1} x_{t-1} + W_{t,t-2} x_{t-2} + w_t)`.

    This is the paper's sense of the word: a dense network that reads only the last two states.
    """
    return _states(check_sizes((inputs, *[width] * depth, outputs), "highway"), 2, activation, bias)


def _states(sizes: tuple[int, ...], memory: int | None, activation: Activation, bias: bool) -> States:
    kinds = [activation] * (len(sizes) - 2) + ["identity"]
    first = [0 if memory is None else max(0, t - memory) for t in range(1, len(sizes))]
    layers = [
        StatesLayer(sizes[s:t], sizes[t], kind, bias)
        for t, (s, kind) in enumerate(zip(first, kinds, strict=True), start=1)
    ]
    return States(layers, memory, None, None)


def residual(
    width: int = 32,
    depth: int = 4,
    inputs: int = 16,
    outputs: int | None = 10,
    activation: Activation = "softplus",
    bias: bool = True,
) -> States:
    r"""Residual network :math:`x_t = a(W_t x_{t-1} + w_t + x_{t-2})` with :math:`x_{-1} = 0`.

    This is the paper's eq. chain_res_def. All states have one size, so an input of another size is embedded first,
    and a linear head follows; ``inputs=width, outputs=None`` is the bare chain.
    """
    check_sizes((inputs, *[width] * depth, width if outputs is None else outputs), "residual")
    embedding = None if inputs == width else nn.Linear(inputs, width, bias=bias)
    head = None if outputs is None else nn.Linear(width, outputs, bias=bias)
    return States([ResidualLayer(width, activation, bias) for _ in range(depth)], 2, embedding, head)
