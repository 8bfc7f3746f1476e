"""Scalar functions of each entry, and their derivatives as functions of their own.

``1 - tanh(x)**2`` computed as a product loses its sign and its range, and cancels where tanh saturates; as the
derivative of tanh it keeps both. Each formula below is accurate relative to the size of the derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

_PHI = 1 / math.sqrt(2 * math.pi)
_SELU, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_GELU = (math.sqrt(2 / math.pi), 0.044715)  # torch: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))


@dataclass(frozen=True)
class Scalar:
    """A function of one number: the derivative of this order of a named function.

    Attributes:
        name: which function.
        parameters: its parameters, such as the exponent of a power.
        order: 0 for the function, k for its k-th derivative.

    >>> tanh = Scalar("tanh")
    >>> float(tanh.derivative(torch.zeros(())))
    1.0
    """

    name: str
    parameters: tuple[float, ...] = ()
    order: int = 0

    @property
    def derivative(self) -> Scalar:
        """The derivative, again a function of one number."""
        return replace(self, order=self.order + 1)

    def __call__(self, x: Tensor) -> Tensor:
        return SCALARS[self.name](x, self.order, *self.parameters)

    def __str__(self) -> str:
        arguments = f"({', '.join(f'{p:g}' for p in self.parameters)})" if self.parameters else ""
        return self.name + arguments + "'" * self.order


Polynomial = Sequence[float]


def _at(coefficients: Polynomial, x: Tensor) -> Tensor:
    """A polynomial by Horner's rule, from the constant coefficient on."""
    value = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        value = value * x + c
    return value


def _times(p: Polynomial, q: Polynomial) -> list[float]:
    product = [0.0] * (len(p) + len(q) - 1)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            product[i + j] += a * b
    return product


def _plus(p: Polynomial, q: Polynomial) -> list[float]:
    size = max(len(p), len(q))
    p, q = [*p, *[0.0] * (size - len(p))], [*q, *[0.0] * (size - len(q))]
    return [a + b for a, b in zip(p, q, strict=True)]


def _slope(p: Polynomial) -> list[float]:
    return [k * c for k, c in enumerate(p)][1:] or [0.0]


@lru_cache
def _tanh_polynomial(order: int) -> tuple[float, ...]:
    """q with tanh^(k) = sech²·q(tanh): q₁ = 1, q_{k+1} = −2t q + (1 − t²) q′."""
    q: Polynomial = [1.0]
    for _ in range(order - 1):
        q = _plus(_times([0.0, -2.0], q), _times([1.0, 0.0, -1.0], _slope(q)))
    return tuple(q)


@lru_cache
def _sigmoid_polynomial(order: int) -> tuple[float, ...]:
    """q with σ^(k) = σ(1 − σ)·q(σ): q₁ = 1, q_{k+1} = (1 − 2σ) q + (σ − σ²) q′."""
    q: Polynomial = [1.0]
    for _ in range(order - 1):
        q = _plus(_times([1.0, -2.0], q), _times([0.0, 1.0, -1.0], _slope(q)))
    return tuple(q)


@lru_cache
def _hermite(order: int) -> tuple[float, ...]:
    """He_k: the k-th derivative of exp(−x²/2) is (−1)^k He_k(x) exp(−x²/2)."""
    low, high = [1.0], [0.0, 1.0]
    for k in range(1, order + 1):
        low, high = high, _plus(_times([0.0, 1.0], high), [-k * c for c in low])
    return tuple(low)


def _tanh(x: Tensor, order: int) -> Tensor:
    if order == 0:
        return x.tanh()
    sech = 2 * (-x.abs()).exp() / (1 + (-2 * x.abs()).exp())
    return sech * sech * _at(_tanh_polynomial(order), x.tanh())


def _sigmoid(x: Tensor, order: int) -> Tensor:
    s = x.sigmoid()
    return s if order == 0 else s * (-x).sigmoid() * _at(_sigmoid_polynomial(order), s)


def _softplus(x: Tensor, order: int, beta: float) -> Tensor:
    y = beta * x
    if order == 0:
        return (y.clamp(min=0) + (-y.abs()).exp().log1p()) / beta
    return beta ** (order - 1) * _sigmoid(y, order - 1)


def _logsigmoid(x: Tensor, order: int) -> Tensor:
    """log σ(x) = −softplus(−x)."""
    return (-1) ** (order + 1) * _softplus(-x, order, 1.0)


def _density(x: Tensor, order: int) -> Tensor:
    """Derivatives of the normal density."""
    return (-1) ** order * _PHI * _at(_hermite(order), x) * (-x * x / 2).exp()


def _erf(x: Tensor, order: int) -> Tensor:
    """erf(x) = 2 Φ(√2 x) − 1."""
    root = math.sqrt(2)
    return x.erf() if order == 0 else 2 * root**order * _density(root * x, order - 1)


def _gelu(x: Tensor, order: int) -> Tensor:
    """x Φ(x), by the rule of Leibniz: x Φ^(k) + k Φ^(k−1)."""
    cumulative = torch.erfc(-x / math.sqrt(2)) / 2
    if order == 0:
        return x * cumulative
    return x * _density(x, order - 1) + (cumulative if order == 1 else order * _density(x, order - 2))


def _silu(x: Tensor, order: int) -> Tensor:
    return x * _sigmoid(x, order) + (order * _sigmoid(x, order - 1) if order else 0)


def _power(x: Tensor, order: int, exponent: float) -> Tensor:
    factor = math.prod(exponent - k for k in range(order))
    exponent = exponent - order
    if factor == 0:
        return torch.zeros_like(x)
    return torch.full_like(x, factor) if exponent == 0 else factor * x**exponent


def _rsqrt(x: Tensor, order: int) -> Tensor:
    return x.rsqrt() if order == 0 else _power(x, order, -0.5)


def _log(x: Tensor, order: int) -> Tensor:
    return x.log() if order == 0 else _power(x, order - 1, -1.0)


def _pieces(x: Tensor, order: int, cuts: Sequence[float], polynomials: Sequence[Polynomial]) -> Tensor:
    """A polynomial between cuts; at a cut, the one on its left."""
    value = torch.zeros_like(x)
    for k, polynomial in enumerate(polynomials):
        for _ in range(order):
            polynomial = _slope(polynomial)
        piece = _at(polynomial, x)
        value = piece if k == 0 else torch.where(x > cuts[k - 1], piece, value)
    return value


def _abs(x: Tensor, order: int) -> Tensor:
    return x.abs() if order == 0 else x.sign() if order == 1 else torch.zeros_like(x)


def _elu(x: Tensor, order: int, alpha: float) -> Tensor:
    """x above 0; α (exp(x) − 1) below."""
    below = alpha * (x.clamp(max=0).expm1() if order == 0 else x.clamp(max=0).exp())
    return torch.where(x > 0, x if order == 0 else torch.full_like(x, float(order == 1)), below)


def _celu(x: Tensor, order: int, alpha: float) -> Tensor:
    """x above 0; α (exp(x/α) − 1) below."""
    return alpha ** (1 - order) * _elu(x / alpha, order, 1.0)


def _huber(x: Tensor, order: int, delta: float) -> Tensor:
    """x²/2 between −δ and δ; δ (|x| − δ/2) outside."""
    tails = [-delta * delta / 2, -delta], [-delta * delta / 2, delta]
    return _pieces(x, order, [-delta, delta], [tails[0], [0.0, 0.0, 0.5], tails[1]])


class _Jet:
    """A truncated power series c₀ + c₁t + … with tensors as coefficients."""

    def __init__(self, coefficients: Sequence[Tensor]) -> None:
        self.c = list(coefficients)

    def __mul__(self, other: _Jet) -> _Jet:
        n = len(self.c)
        return _Jet([sum((self.c[i] * other.c[k - i] for i in range(k + 1)), self.c[0] * 0) for k in range(n)])

    def composed(self, function: Callable[[Tensor, int], Tensor]) -> _Jet:
        """The series of f(self), from the derivatives of f: Σ f^(k)(c₀)/k! (self − c₀)^k."""
        rest = _Jet([self.c[0] * 0, *self.c[1:]])
        total, power = [function(self.c[0], 0), *(c * 0 for c in self.c[1:])], rest
        for k in range(1, len(self.c)):
            factor = function(self.c[0], k) / math.factorial(k)
            total = [a + factor * b for a, b in zip(total, power.c, strict=True)]
            power = power * rest
        return _Jet(total)


def _around(x: Tensor, order: int) -> _Jet:
    """The series of the identity at x."""
    return _Jet([x, *(torch.full_like(x, float(k == 0)) for k in range(order))])


def _gelu_tanh(x: Tensor, order: int) -> Tensor:
    """x σ(2a), a = √(2/π)(x + 0.044715 x³): the same as 0.5 x (1 + tanh(a)) without its cancellation."""
    t, (a, b) = _around(x, order), _GELU
    inner = t.composed(lambda y, k: _pieces(y, k, (), [[0.0, 2 * a, 0.0, 2 * a * b]]))
    return (t * inner.composed(_sigmoid)).c[order] * math.factorial(order)


def _mish(x: Tensor, order: int) -> Tensor:
    """x tanh(softplus(x))."""
    t = _around(x, order)
    inner = t.composed(lambda y, k: _softplus(y, k, 1.0))
    return (t * inner.composed(_tanh)).c[order] * math.factorial(order)


def _softsign(x: Tensor, order: int) -> Tensor:
    """x/(1 + |x|) = sign(x)(1 − 1/(1 + |x|)); its derivatives are those of −sign(x)/(1 + |x|)."""
    if order == 0:
        return x / (1 + x.abs())
    side = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    return -(side ** (order + 1)) * _power(1 + x.abs(), order, -1.0)


def _derived(x: Tensor, order: int, square: Polynomial, exponent: float) -> Tensor:
    """Derivatives of this order − 1 of (a polynomial)^exponent: those of a function by its first derivative."""
    inner = _around(x, order - 1).composed(lambda y, k: _pieces(y, k, (), [square]))
    jet = inner.composed(lambda y, k: _power(y, k, exponent))
    return jet.c[order - 1] * math.factorial(order - 1)


def _atan(x: Tensor, order: int) -> Tensor:
    return x.atan() if order == 0 else _derived(x, order, [1.0, 0.0, 1.0], -1.0)


def _arcsinh(x: Tensor, order: int) -> Tensor:
    return x.asinh() if order == 0 else _derived(x, order, [1.0, 0.0, 1.0], -0.5)


def _hardswish(x: Tensor, order: int) -> Tensor:
    return _pieces(x, order, [-3.0, 3.0], [[0.0], [0.0, 0.5, 1 / 6], [0.0, 1.0]])


_CIRCLE = (torch.sin, torch.cos, lambda x: -x.sin(), lambda x: -x.cos())
_Function = Callable[..., Tensor]

SCALARS: dict[str, _Function] = {
    "exp": lambda x, k: x.exp(),
    "log": _log,
    "sqrt": lambda x, k: x.sqrt() if k == 0 else _power(x, k, 0.5),
    "rsqrt": _rsqrt,
    "reciprocal": lambda x, k: _power(x, k, -1.0),
    "power": _power,
    "square": lambda x, k: _power(x, k, 2.0),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "mish": _mish,
    "erf": _erf,
    "sin": lambda x, k: _CIRCLE[k % 4](x),
    "cos": lambda x, k: _CIRCLE[(k + 1) % 4](x),
    "sinh": lambda x, k: x.cosh() if k % 2 else x.sinh(),
    "cosh": lambda x, k: x.sinh() if k % 2 else x.cosh(),
    "atan": _atan,
    "arcsinh": _arcsinh,
    "log1p": lambda x, k: x.log1p() if k == 0 else _log(1 + x, k),
    "expm1": lambda x, k: x.expm1() if k == 0 else x.exp(),
    "softsign": _softsign,
    "abs": _abs,
    "relu": lambda x, k: _pieces(x, k, [0.0], [[0.0], [0.0, 1.0]]),
    "leaky_relu": lambda x, k, slope: _pieces(x, k, [0.0], [[0.0, slope], [0.0, 1.0]]),
    "hardtanh": lambda x, k, low, high: _pieces(x, k, [low, high], [[low], [0.0, 1.0], [high]]),
    "relu6": lambda x, k: _pieces(x, k, [0.0, 6.0], [[0.0], [0.0, 1.0], [6.0]]),
    "hardsigmoid": lambda x, k: _pieces(x, k, [-3.0, 3.0], [[0.0], [0.5, 1 / 6], [1.0]]),
    "hardswish": _hardswish,
    "elu": _elu,
    "celu": _celu,
    "selu": lambda x, k: _SELU * _elu(x, k, _SELU_ALPHA),
    "huber": _huber,
}
"""The functions: each gives the k-th derivative of itself at a tensor, for parameters that follow."""
