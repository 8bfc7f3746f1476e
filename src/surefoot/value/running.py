"""How a program of value and gradient is run: by the quickest kernels whose errors are known.
 Sums on the way to the value are taken in stages. Soft-plus is run with threshold 40, beyond which its argument is
off by less than a unit (torch's 20 is off by 2e-9). Where a costate is multiplied by the slope of an activation,
the kernel of torch that does both is called, unless errors of entries are asked for, which need the slopes
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from surefoot.program import Node, Program, Scalar
from surefoot.value.rounding import staged_sum

Kernel = Callable[..., Tensor]
Step = tuple[int, Kernel, tuple[int, ...]]
_aten: Any = torch.ops.aten
_THRESHOLD = 40.0

_FUNCTIONS: dict[str, Kernel] = {
    "relu'": lambda x: (x > 0).to(x.dtype),
    "softplus": lambda x, beta=1.0: functional.softplus(x, beta, _THRESHOLD),
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "mish": functional.mish,
    "logsigmoid": functional.logsigmoid,
    "square": torch.square,
    "reciprocal": torch.reciprocal,
    "leaky_relu": lambda x, slope: functional.leaky_relu(x, slope),
    "hardtanh": lambda x, low, high: functional.hardtanh(x, low, high),
    "relu6": functional.relu6,
}
_BACKWARD: dict[str, Callable[..., Tensor]] = {  # a costate times the slope; from argument and value
    "tanh": lambda g, x, y: _aten.tanh_backward(g, y),
    "sigmoid": lambda g, x, y: _aten.sigmoid_backward(g, y),
    "relu": lambda g, x, y: _aten.threshold_backward(g, x, 0),
    "softplus": lambda g, x, y, beta=1.0: _aten.softplus_backward(g, x, beta, _THRESHOLD),
    "gelu": lambda g, x, y: _aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x, y: _aten.gelu_backward(g, x, approximate="tanh"),
    "silu": lambda g, x, y: _aten.silu_backward(g, x),
    "leaky_relu": lambda g, x, y, slope: _aten.leaky_relu_backward(g, x, slope, False),
}


class Runner:
    """A program made ready to run many times.

    Args:
        program: the program.
        needed: the nodes whose tensors are wanted; what they need is computed as well.
        fixed: the nodes whose tensors are given.
        staged: the nodes whose sums are taken in stages.
        dtypes: the element types of all nodes; double by default.
        plain: run every node by itself, so that all tensors are there; else some are left out.

    Attributes:
        live: the nodes that are computed or given.
        skipped: those of them that have no tensor.
    """

    def __init__(
        self, program: Program, needed: Iterable[int], fixed: Container[int], staged: Container[int],
        dtypes: Sequence[torch.dtype] | None = None, *, plain: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.staged, nodes = program, staged, program.nodes
        needed = set(needed)
        live = set(needed)
        for node in reversed(nodes):
            if node.index in live and node.index not in fixed:
                live.update(node.inputs)
        self.live = live
        self._shared: dict[Any, list[Tensor]] = {}  # 1/σ, from a normalisation to the node that asks for it
        users: dict[int, list[Node]] = {}
        for k in live:
            for i in set(nodes[k].inputs) if k not in fixed else ():
                users.setdefault(i, []).append(nodes[k])
        values = {
            (n.inputs[0], _function(n)): n.index for n in nodes if n.index in live and n.primitive.name == "scalar"
        }
        self.skipped: set[int] = set()
        self.steps: list[Step] = []
        for k in sorted(k for k in live if k not in fixed):
            node = nodes[k]
            step = None if plain else self._joined(node, users, values, needed)
            self.steps.append(step or (k, self._kernel(node), node.inputs))
        self.steps = [_cast(step, dtypes) for step in self.steps if step[0] not in self.skipped]

    def run(self, tensors: list[Any], after: int = -1, upto: int | None = None) -> None:
        """Fill in the tensors of nodes, from one on and up to another, in a list that has those that are given."""
        for index, kernel, operands in self.steps:
            if index > after and (upto is None or index <= upto):
                tensors[index] = kernel(*[tensors[k] for k in operands])

    def _joined(
        self, node: Node, users: Mapping[int, list[Node]], values: Mapping[Any, int], wanted: set[int]
    ) -> Step | None:
        """Two primitives in one kernel."""
        nodes, name = self.program.nodes, node.primitive.name
        if name == "add" and len(node.inputs) == 2:  # into the product itself, which nobody else reads
            for a, b in (node.inputs, node.inputs[::-1]):
                product = nodes[a]
                alone = product.primitive.name == "matmul" and len(users[a]) == 1 and a not in wanted and a != b
                if alone and a in self.live and a not in self.skipped and b < a and len(product.shape) == 2:
                    self.skipped.add(a)
                    return node.index, lambda x, y, c: torch.mm(x, y).add_(c), (*product.inputs, b)
        if name == "mul":
            for g, k in (node.inputs, node.inputs[::-1]):
                slope = nodes[k]
                function = slope.options.get("function")
                if function is None or function.order != 1 or function.name not in _BACKWARD or len(users[k]) != 1:
                    continue
                if k in wanted or g == k or k in self.program.costates:  # of values, errors count in full
                    continue
                x = slope.inputs[0]
                y = values.get((x, Scalar(function.name, function.parameters)), x)
                if y == x and function.name in ("tanh", "sigmoid"):
                    continue
                self.skipped.add(k)
                kernel = _with(_BACKWARD[function.name], function.parameters)
                return node.index, kernel, (g, x, y)
        return None

    def _kernel(self, node: Node) -> Kernel:
        name, options, run = node.primitive.name, node.options, node.primitive.run
        match name:
            case "add" if len(node.inputs) == 2:
                return torch.add
            case "mul" | "weigh":
                return torch.mul
            case "scale":
                factor = options["factor"]
                return lambda x: torch.mul(x, factor)
            case "matmul":
                return torch.mm if len(node.shape) == 2 else torch.matmul
            case "permute":
                dims = options["dims"]
                return torch.t if dims == (1, 0) else lambda x: x.permute(dims)
            case "expand":
                return lambda x: x.expand(node.shape)
            case "reshape":
                return lambda x: x.reshape(node.shape)
            case "sum" if node.index in self.staged:
                dims, keepdim = options["dims"], options["keepdim"]
                return lambda x: staged_sum(x, dims, keepdim)
            case "sum":
                dims, keepdim = list(options["dims"]), options["keepdim"]
                return lambda x: x.sum(dims, keepdim=keepdim)
            case "logsumexp" if len(node.inputs) == 1:
                dim, keepdim = options["dim"], options["keepdim"]
                return lambda x: x.logsumexp(dim, keepdim)
            case "logsumexp" | "softmax" if len(node.inputs) == 2 and node.inputs[1] in self.program.constants:
                return self._masked(node)
            case "softmax_back":
                dim = options["dim"]
                return lambda g, y: _aten._softmax_backward_data(g, y, dim, y.dtype)
            case "normalize" | "rstd":
                return self._normalisation(node)
            case "scalar":
                function: Scalar = options["function"]
                known = _FUNCTIONS.get(function.name + "'" * function.order)
                return function if known is None else _with(known, function.parameters)
        return lambda *t: run(t, **options)

    def _masked(self, node: Node) -> Kernel:
        """Soft-max or log-sum-exp with a mask that stays the same."""
        hidden, options = self.program.constants[node.inputs[1]] == 0, node.options
        dim, keepdim = options["dim"], options.get("keepdim")
        if node.primitive.name == "logsumexp":
            return lambda x, mask: x.masked_fill(hidden, -math.inf).logsumexp(dim, keepdim)
        if bool(hidden.all(dim).any()):  # nothing is left of a row
            return lambda x, mask: x.masked_fill(hidden, -math.inf).softmax(dim).masked_fill(hidden, 0.0)
        return lambda x, mask: x.masked_fill(hidden, -math.inf).softmax(dim)

    def _normalisation(self, node: Node) -> Kernel:
        """What normalises a tensor also knows 1/σ, which the transpose asks for."""
        key = node.inputs[0], node.options["dims"], node.options["eps"]
        shared = self._shared.setdefault(key, [])

        def normalize(x: Tensor) -> Tensor:
            centred, r = _normalized(x, **node.options)
            shared[:] = [r]
            return centred * r

        def rstd(x: Tensor) -> Tensor:
            return shared.pop() if shared else _normalized(x, **node.options)[1]

        return normalize if node.primitive.name == "normalize" else rstd


def _with(kernel: Kernel, parameters: Sequence[float]) -> Kernel:
    return lambda *tensors: kernel(*tensors, *parameters)


def _cast(step: Step, dtypes: Sequence[torch.dtype] | None) -> Step:
    """With operands in the element type of the result."""
    index, kernel, operands = step
    if dtypes is None or all(dtypes[k] == dtypes[index] for k in operands):
        return step
    dtype = dtypes[index]

    def widened(*tensors: Tensor) -> Tensor:
        return kernel(*[t.to(dtype) if t.is_floating_point() else t for t in tensors])

    return index, widened, operands


def _function(node: Node) -> Any:
    return node.options.get("function") if node.primitive.name == "scalar" else None


def _normalized(x: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """A tensor without its mean, and 1/√(variance + ε)."""
    count = math.prod(x.shape[d] for d in dims)
    centred = x - staged_sum(x, dims, True) / count
    return centred, (staged_sum(centred.square(), dims, True) / count).add_(eps).rsqrt_()
