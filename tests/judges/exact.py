r"""The exact judge: a function that torch computes, evaluated in real arithmetic with 200 bits.

The function is run as it is, with its present modes, attributes and weights; each operation that torch executes
is repeated on balls of python-flint (:mod:`judges.exact_rules`). So nothing of what is judged takes part: no
graph, no rewriting, no double precision. Weights and data are taken as they are stored: numbers of 16, 32 and 64
bits are rationals. A cast between floating-point types is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flint
import numpy as np
import torch
from flint import arb
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from judges.exact_numbers import ZERO, Number, Undecided, derivatives, dot, exactly, norm, value_of
from judges.exact_rules import LAYOUT, RULES, Array, filled, moved

PRECISIONS = (200, 3000)  # bits; the second where the first does not tell
_PLAIN = frozenset(
    """empty zeros ones full arange zeros_like ones_like all any _local_scalar_dense eq ne bitwise_and logical_not
    scalar_tensor""".split()  # noqa: SIM905
)


class _Shadowed(TorchDispatchMode):
    """Repeats what torch executes on exact numbers, which it keeps by the identity of the tensors."""

    def __init__(self, start: Mapping[Tensor, Array]) -> None:
        super().__init__()
        self._shadows = {id(tensor): (tensor, array.reshape(tensor.shape)) for tensor, array in start.items()}

    def array(self, tensor: Tensor) -> Array:
        """The exact numbers of a tensor; what no operation made is a constant."""
        if id(tensor) in self._shadows:
            return self._shadows[id(tensor)][1]
        entries = tensor.detach().reshape(-1).tolist()
        if tensor.is_floating_point():  # one that is not a number may stand where it is not chosen
            entries = [None if math.isnan(entry) else exactly(entry) for entry in entries]
        return filled(tensor.shape, iter(entries))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in _PLAIN or not self._touches((args, list(kwargs.values()))):
            return func(*args, **kwargs)
        exact = self._repeated(name, func, args, kwargs)
        result = func(*args, **kwargs)  # after that: it may write into its arguments
        pairs = [(result, exact)] if isinstance(result, Tensor) else zip(result, exact, strict=True)
        for tensor, array in pairs:
            if array is not None:
                self._shadows[id(tensor)] = tensor, np.asarray(array, dtype=object).reshape(tensor.shape)
        return result

    def _repeated(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name in LAYOUT:
            return moved(func, args, kwargs, self.array)
        if name not in RULES:
            raise NotImplementedError(f"the exact judge has no rule for '{name}'")
        named = {key: self._argument(value) for key, value in kwargs.items() if key != "out"}
        given = [self._argument(argument) for argument in args]
        if name != "where" and any(isinstance(a, np.ndarray) and (a == None).any() for a in given):  # noqa: E711
            raise Undecided("a constant is not a number")
        return RULES[name](*given, **named)

    def _touches(self, argument: Any) -> bool:
        if isinstance(argument, list | tuple):
            return any(map(self._touches, argument))
        return isinstance(argument, Tensor) and (argument.is_floating_point() or id(argument) in self._shadows)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.array(argument)
        return [self._argument(item) for item in argument] if isinstance(argument, list | tuple) else argument


@dataclass(frozen=True)
class Truth:
    """What is so at one point.

    Attributes:
        values: the outputs, flat.
        gradient: of the outputs weighted, in all variables.
        bent: the Hessian of the same times the direction.
        size: the norm of the weights.
        length: the norm of the direction.
    """

    values: list[arb]
    gradient: list[arb]
    bent: list[arb]
    size: arb
    length: arb

    @property
    def bound(self) -> arb:
        """The norm of the outputs."""
        return norm(self.values)

    @property
    def lipschitz(self) -> arb:
        """The norm of the Jacobian is at least this."""
        return norm(self.gradient) / self.size

    @property
    def smoothness(self) -> arb:
        """The norm of the second derivative is at least this."""
        return norm(self.bent) / (self.size * self.length)


Point = Mapping[
    Tensor, Any
]  # a tensor of the function, and numbers in its place (nested lists or arrays of balls)


def truth(
    function: Callable[[], Tensor],
    model: nn.Module,
    point: Point,
    direction: Mapping[Tensor, Tensor] | None = None,
    weights: list[float] | None = None,
) -> Truth:
    """Values and derivatives of a function in the tensors of the point.

    Args:
        function: computes the outputs; it reads the tensors of the point.
        model: whose buffers are left as they are.
        point: the variables, with the values they are to have.
        direction: of the second derivative; all ones without.
        weights: of the outputs; all one without.
    """
    leaves: dict[Tensor, Array] = {}
    for tensor, numbers in point.items():
        moves = None if direction is None else direction[tensor].double().reshape(-1).tolist()
        entries = np.asarray(numbers, dtype=object).reshape(-1)
        leaves[tensor] = filled(
            tensor.shape,
            (Number(n, arb(1) if moves is None else exactly(moves[k])) for k, n in enumerate(entries)),
        )
    outputs = run(function, model, leaves)
    variables = [number for array in leaves.values() for number in array.reshape(-1)]
    chosen = [arb(1) if weights is None else exactly(weights[k]) for k in range(len(outputs))]
    gradient, bent = derivatives(dot(outputs, chosen) if outputs else ZERO, variables)
    length = norm(number.tangent for number in variables)
    return Truth([value_of(output) for output in outputs], gradient, bent, norm(chosen), length)


def run(function: Callable[[], Tensor], model: nn.Module, start: Mapping[Tensor, Array]) -> list[Any]:
    """The outputs of a function, flat, from exact numbers in place of some tensors."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mode = _Shadowed(start)
    try:
        with torch.no_grad(), mode:
            result = function()
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
    return list(mode.array(result).reshape(-1))


def stored(tensor: Tensor) -> Array:
    """The numbers of a tensor as they are stored."""
    entries = tensor.detach().double().reshape(-1).tolist()
    return filled(tensor.shape, (exactly(entry) for entry in entries))


def exact_value(function: Callable[[], Tensor], model: nn.Module) -> arb:
    """The value of a real-valued function at the present weights."""
    (number,) = run(function, model, {p: stored(p) for p in model.parameters()})
    return value_of(number)


def settled(question: Callable[[], bool | None]) -> bool | None:
    """The answer to a question of balls, asked with more bits where 200 leave it open; ``None`` if it stays so."""
    for bits in PRECISIONS:
        with flint.ctx.workprec(bits):
            try:
                answer = question()
            except Undecided:
                answer = None
        if answer is not None:
            return answer
    return None


def holds(claim: arb, fact: arb) -> bool | None:
    """Whether fact ≤ claim; ``None`` if the balls do not tell."""
    if fact <= claim:
        return True
    return False if fact > claim else None
