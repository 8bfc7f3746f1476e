r"""The same errors by norms alone: one number per tensor, which decides nearly always.
 Of each node: n bounds the norm of its tensor, p its largest entry, and e the norm of its error. What costates are
off by counts only at second order, as :math:`\sum_z\|\delta_z\|e_{\lambda_z}`, so it may be coarse. It grows with
all sizes, and is worked out for sizes twice as large as they are: it holds as long as tensors stay below these.
 With the notation of :mod:`surefoot.value.entries`: a linear primitive has the norm :math:`\sqrt{\text{numbers
added up}\cdot\text{copies}}` at most (Schur); a product :math:`e \le e_a(p_b + e_b) + p_ae_b`, of matrices with
spectral or Frobenius norms in place of p, of convolutions with :math:`\sqrt{\text{taps}}\,\|W\|`; scalar
functions, soft-max and normalisation have their largest slope. With these slopes :math:`L_i`, and a number k of
roundings, every local error is at most

.. math:: \|\delta\| \le ku\,\big(\|z\| + \sum_iL_i\|x_i\|\big) ,
 for scalar functions, of which neither the kernels nor the derivatives of higher order are listed, with k = 512:
this is part of what is assumed of floating point, and tested.
 *Kinks and ties*: where a derivative jumps, the entries that are nearer to the jump than errors reach are counted
at each run; c of them are off by at most :math:`\sqrt c` times the jump.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from surefoot.bounds.scalars import enclose, pieces
from surefoot.program import Node, Program, Scalar
from surefoot.value.rounding import EXACT, additions, gamma, leading, multiplicity, product_terms, rounds

_MOVES = EXACT - {"constant", "input", "amax", "maximum", "sort", "select_like", "pick_like"}


_VIEWS = frozenset(["reshape", "permute", "flip", "expand", "slice", "embed", "pad", "gather", "rows"])


class Norms:
    """What is known of a program by norms.

    Args:
        program: of value and costates.
        nodes: those whose errors are asked for, in order.
        absent: slopes that are not computed.
        units: of rounding, by node.
        given: inputs that are not exact.
        fixed: nodes whose tensors stay the same.

    Attributes:
        measured: the nodes whose sizes are asked for at each run.
    """

    def __init__(
        self, program: Program, nodes: Sequence[int], absent: set[int], units: Sequence[float],
        given: Container[int], fixed: Container[int],
    ) -> None:  # fmt: skip
        self.program, self.order, self.units, self.given = program, nodes, units, given
        self.kinks = {k: at for k in nodes if (at := kinks_of(program.nodes[k]))}
        self.ties = [k for k in nodes if program.nodes[k].primitive.name in ("select_like", "pick_like")]
        names = {k: program.nodes[k].primitive.name for k in nodes}
        sized = [k for k in nodes if names[k] not in _MOVES and names[k] != "scale" and k not in absent]
        self.is_measured = [False] * len(program.nodes)
        for k in sized:
            self.is_measured[k] = True
        self.measured = [k for k in sized if k not in fixed]
        self.small = {k for k in nodes if names[k] == "rstd"}  # whose largest entry is asked for always
        self.peaked = {self.source(k) for node in map(program.nodes.__getitem__, nodes) for k in _peaks(node)}
        self.batched = sorted({
            self.matrix(k) for node in map(program.nodes.__getitem__, nodes)
            if node.primitive.name == "matmul" and len(node.shape) > 2 for k in node.inputs
        })  # fmt: skip
        self.poles = [k for k in nodes if has_pole(program.nodes[k])]
        self.gains = {k: linear_gain(program.nodes[k], program) for k in nodes}
        self.absent = {k for k in absent if names.get(k) == "scalar"}
        self.rounds = {k: rounds(program.nodes[k], program.constants) for k in nodes}
        self.leading = {k: self._leading(program.nodes[k]) for k in nodes}
        self.counts = {k: float(rounding_count(program.nodes[k], program)) for k in nodes}

    def errors(
        self,
        n: list[float],
        p: list[float],
        near: Callable[[int, float], int],
        least: Mapping[int, float],
        spectral: Callable[[int], float],
        batches: Mapping[int, float],
        given: Mapping[int, float],
        upto: int | None = None,
    ) -> tuple[list[float], list[float]]:
        """Norms of the errors and of the local errors of all nodes.

        Args:
            n: bounds of the norms of the measured nodes, of inputs and of constants; others are filled in.
            p: bounds of their largest entries, likewise.
            near: how many entries are as near as this to a kink, or tied, of a node.
            least: the smallest absolute value of what a function with a pole is applied to, by node.
            spectral: a bound of the norm of an exact matrix.
            batches: bounds of the largest norms of matrices of a batch; else their norm together is taken.
            given: bounds of the norms of errors of inputs.
            upto: the last node to look at; all by default.
        """
        nodes, units = self.program.nodes, self.units
        e, local = [0.0] * len(nodes), [0.0] * len(nodes)
        for k, error in given.items():
            e[k] = error
        for k in self.order:
            if upto is not None and k > upto:
                break
            node = nodes[k]
            name, inputs = node.primitive.name, node.inputs
            if not inputs:
                continue
            if not self.is_measured[k]:
                self._fill(node, n, p)
            passed, size = self._rule(node, n, p, e, near, least.get(k), spectral, batches)
            if self.rounds[k]:
                known = self.leading[k]
                if known is not None:
                    local[k] = known[0] * math.prod(n[i] for i in known[1])
                elif k in self.absent:
                    local[k] = 64 * units[k] * n[k]
                elif name in ("softmax", "logsumexp"):
                    count, root = self.counts[k], math.sqrt(node.shape.numel())
                    relative, flat = (count, 0.37) if name == "softmax" else (1.0, count)
                    local[k] = units[k] * 1.01 * (relative * n[k] + flat * root)
                elif name in ("normalize", "rstd", "normalize_back"):
                    local[k] = self._normalisation(node, n, p)
                else:
                    local[k] = self.counts[k] * units[k] * (n[k] + size) * (1 + 1e-6)
            e[k] = (passed + local[k]) * (1 + 1e-12) if passed == passed else math.inf
        return e, local

    def source(self, k: int) -> int:
        """The node whose entries one has that is only moved."""
        node = self.program.nodes[k]
        while node.primitive.name in _VIEWS and node.inputs:
            node = self.program.nodes[node.inputs[0]]
        return node.index

    def matrix(self, k: int) -> int:
        """The node of a batch of matrices, or of the same transposed."""
        node = self.program.nodes[k]
        swapped = (*range(len(node.shape) - 2), len(node.shape) - 1, len(node.shape) - 2)
        return node.inputs[0] if node.primitive.name == "permute" and node.options["dims"] == swapped else k

    def _leading(self, node: Node) -> tuple[float, tuple[int, ...]] | None:
        """The factor and the nodes whose norms multiply to that of the local error."""
        if node.primitive.name == "sum" and node.index in self.program.costates:
            shape = self.program.nodes[node.inputs[0]].shape
            count = math.prod(shape[d] for d in node.options["dims"])
            return gamma(additions(count), self.units[node.index]) * math.sqrt(count) * (1 + 1e-6), node.inputs
        known = None if node.index in self.absent else leading(node)
        if known is None or (len(known[1]) == 2 and len(node.shape) > 2):
            return None
        count = self.program.nodes[node.inputs[0]].shape[-1] + 1 if len(known[1]) == 2 else known[0]
        return gamma(count, self.units[node.index]) * (1 + 1e-6), known[1]

    def _fill(self, node: Node, n: list[float], p: list[float]) -> None:
        """The size of what is only moved or scaled; of a slope, from its range."""
        k, inputs = node.index, node.inputs
        if node.primitive.name == "scalar":
            p[k] = slope_over(node, 0, p[inputs[0]])
            n[k] = p[k] * math.sqrt(node.shape.numel())
        elif node.primitive.name == "cat":
            n[k] = math.sqrt(sum(n[i] * n[i] for i in inputs))
            p[k] = max(p[i] for i in inputs)
        elif node.primitive.name == "scale":
            factor = abs(node.options["factor"])
            n[k], p[k] = n[inputs[0]] * factor, p[inputs[0]] * factor
        elif node.primitive.name == "matmul":
            n[k] = p[k] = n[inputs[0]] * n[inputs[1]]
        else:
            n[k], p[k] = n[inputs[0]] * self.gains[k], p[inputs[0]]

    def _rule(
        self, node: Node, n: list[float], p: list[float], e: list[float], near: Callable[[int, float], int],
        least: float | None,
        spectral: Callable[[int], float], batches: Mapping[int, float],
    ) -> tuple[float, float]:  # fmt: skip
        """What errors of the inputs make of the result, and the sum of slopes times sizes."""
        name, kind, options, inputs = node.primitive.name, node.primitive.kind, node.options, node.inputs
        a, gain = inputs[0], self.gains[node.index]
        b = inputs[1] if len(inputs) > 1 else a
        if kind == "linear" and name != "weigh":
            real = inputs if name in ("add", "cat") else inputs[:1]
            return gain * sum(e[k] for k in real), gain * sum(n[k] for k in real)
        if name in ("mul", "weigh"):
            return e[a] * (p[b] + e[b]) + p[a] * e[b], n[a] * p[b]
        if name == "matmul" and len(node.shape) > 2:
            left, right = (batches.get(self.matrix(k), n[k]) for k in (a, b))
            return e[a] * (right + e[b]) + left * e[b], min(n[a] * right, left * n[b])
        if name == "matmul":
            right = n[b] if e[b] or not e[a] else spectral(b)
            left = n[a] if e[a] or not e[b] else spectral(a)
            return e[a] * (right + e[b]) + left * e[b], n[a] * n[b]
        if kind == "product":  # taps, and the norm of the kernels as a matrix
            other = n[b] if e[b] or not e[a] or name == "conv_weight" else spectral(b)
            return gain * (e[a] * (other + e[b]) + n[a] * e[b]), gain * n[a] * n[b]
        if kind == "scalar":
            low = None if least is None else least - e[a]
            slope = slope_over(node, 1, p[a] + e[a], low)
            if not e[a]:
                return 0.0, slope * n[a]
            size = slope_over(node, 0, p[a] + e[a], low)
            jumps = 2 * size * math.sqrt(near(node.index, e[a])) if node.index in self.kinks else 0.0
            most = 2 * size * math.sqrt(node.shape.numel())
            return min(slope * e[a] + jumps, most), slope_over(node, 1, p[a], least) * n[a]
        root = math.sqrt(node.shape.numel())
        match name:
            case "softmax":
                return min(0.51 * e[a], 2 * root), 0.0
            case "logsumexp" | "amax" | "maximum" | "sort":
                return e[a] + (e[b] if name == "maximum" else 0.0), 0.0
            case "softmax_back":
                width = math.sqrt(node.shape[options["dim"]])
                g = p[a] + e[a]
                return 0.51 * e[a] + e[b] * (2 * g + min(n[a] + e[a], width * g)), 2 * n[a]
            case "normalize" | "rstd":
                count = math.prod(self.program.nodes[a].shape[d] for d in options["dims"])
                r = p[self.deviation(node)]
                shift = r * e[a] / math.sqrt(count)
                gain = r / (1 - shift) if shift < 0.5 else math.inf
                gain = gain if name == "normalize" else 4 * r * gain / math.sqrt(count)
                return (gain * e[a] if e[a] else 0.0), 0.0
            case "normalize_back":
                r, z = inputs[2], b
                count = math.prod(node.shape[d] for d in options["dims"])
                g, row = p[a] + e[a], min(n[a] + e[a], math.sqrt(count) * (p[a] + e[a]))
                scale = p[r] + e[r]
                return scale * (1.01 * e[a] + 2.02 * e[z] * g) + 2.02 * e[r] * row, 0.0
            case "select_like" | "pick_like":
                tied = near(node.index, e[b]) if e[b] else 0
                return e[a] + 2 * (p[a] + e[a]) * math.sqrt(2 * tied), 0.0
        return (math.inf if any(e[k] for k in inputs) else 0.0), math.inf

    def _normalisation(self, node: Node, n: list[float], p: list[float]) -> float:
        """The norm of the local error of a normalisation, or of its transpose (:mod:`surefoot.value.rounding`)."""
        a, unit = node.inputs[0], self.units[node.index]
        count = math.prod(self.program.nodes[a].shape[d] for d in node.options["dims"])
        if node.primitive.name == "normalize_back":  # means in any order
            return gamma(count + 8, unit) * 3 * p[node.inputs[2]] * n[a]
        r, k = p[self.deviation(node)], additions(count)
        shift = gamma(k + 3, unit) * r * n[a] * (1 + 1e-3)  # of all groups, times the root of their size
        rest = gamma(k / 2 + 12, unit) * n[node.index] * (1 + 1e-3)
        return r * shift / math.sqrt(count) + rest if node.primitive.name == "rstd" else 2 * shift + rest

    def deviation(self, node: Node) -> int:
        """The node of 1/σ that belongs to a normalisation."""
        if node.primitive.name == "rstd":
            return node.index
        for other in self.program.nodes[node.index :]:
            if other.primitive.name == "rstd" and other.inputs == node.inputs and other.options == node.options:
                return other.index
        return node.index  # not there: of a normalised tensor no entry is larger than that of its group's root


def _peaks(node: Node) -> tuple[int, ...]:
    """The inputs of which the largest entry counts."""
    name = node.primitive.name
    if name in ("mul", "weigh"):
        return node.inputs
    if name in ("softmax_back", "normalize_back", "select_like", "pick_like"):
        return node.inputs[:1]
    if name == "scalar" and node.options["function"].name in _UNBOUNDED:
        return node.inputs
    return ()


_UNBOUNDED = frozenset(["exp", "expm1", "power", "square", "sinh", "cosh"])


def kinks_of(node: Node) -> tuple[float, ...]:
    """Where a scalar function of a node jumps, or where its slope is not bounded."""
    function = node.options.get("function") if node.primitive.name == "scalar" else None
    if function is None:
        return ()
    return tuple(kink for kink, smoothness in pieces(function.name, function.parameters).kinks
                 if function.order + 1 > smoothness)  # fmt: skip


def count_near(node: Node, t: Callable[[int], Tensor], reach: float) -> int:
    """How many entries are as near as this to a kink; of a selection, how many may be the largest but for those
    that are.
    """
    if node.primitive.name == "scalar":
        x, count = t(node.inputs[0]), 0
        for kink in kinks_of(node):
            distance = (x - kink if kink else x).abs()
            reach = reach + abs(kink) * 2.0**-22  # in single precision the kink is rounded
            count += int((distance <= reach).sum()) if float(distance.min()) <= reach else 0
        return count
    by, dims = t(node.inputs[1]), list(node.options["dims"])
    top = by.amax(dims, keepdim=True)
    return int((by >= top - 2 * reach).sum()) - top.numel()


_POLES = frozenset(["log", "log1p", "sqrt", "rsqrt", "reciprocal"])


def has_pole(node: Node) -> bool:
    """Whether a function of a node has no bounded derivatives near 0."""
    function = node.options.get("function") if node.primitive.name == "scalar" else None
    if function is None or function.name == "log1p":
        return False
    exponent = function.parameters[0] if function.name == "power" else 1.0
    return function.name in _POLES or exponent < 0 or exponent != int(exponent)


def slope_over(node: Node, order: int, reach: float, least: float | None = None) -> float:
    """The largest absolute value of a derivative of a node's function on [-reach, reach], kinks left out; or on
    [least, reach] and, if it is defined there, on the negative numbers likewise.
    """
    if not (least is None or least > 0) or reach != reach:
        return math.inf
    upper = 2.0 ** math.ceil(math.log2(reach)) if 0 < reach < 2.0**1000 else reach
    return _supremum(node.options["function"], order, upper, least and 2.0 ** math.floor(math.log2(least)))


@lru_cache(maxsize=2**16)
def _supremum(function: Scalar, order: int, reach: float, least: float | None) -> float:
    if least is not None:  # all of these are monotone in the absolute value, as are their derivatives
        ends = torch.tensor([least, reach], dtype=torch.float64)
        low, high = enclose(function, order, ends, ends)
    else:
        cuts = [kink for kink, _ in pieces(function.name, function.parameters).kinks if abs(kink) < reach]
        low = torch.tensor([-reach, *(math.nextafter(c, math.inf) for c in cuts)], dtype=torch.float64)
        high = torch.tensor([*(math.nextafter(c, -math.inf) for c in cuts), reach], dtype=torch.float64)
        low, high = enclose(function, order, low, high)
    return float(torch.maximum(low.abs(), high.abs()).max())


def linear_gain(node: Node, program: Program) -> float:
    """The norm of a linear primitive, for one of its real inputs alone; of a convolution, the root of its taps."""
    name, options, size = node.primitive.name, node.options, float(node.shape.numel())
    match name:
        case "scale":
            return float(abs(options["factor"]))
        case "sum" | "expand":
            other = float(program.nodes[node.inputs[0]].shape.numel())
            return math.sqrt(max(size, other) / max(min(size, other), 1.0))
        case "cumsum":
            return float(node.shape[options["dim"]])
        case "gather" | "scatter" | "rows" | "rows_back":
            return math.sqrt(multiplicity(program.constants[node.inputs[1]]))
        case "unfold" | "fold":
            return math.sqrt(math.prod(options["kernel"]))
        case "conv" | "conv_input" | "conv_weight":
            kernel = node.shape if name == "conv_weight" else program.nodes[node.inputs[1]].shape
            return math.sqrt(math.prod(kernel[2:]))
    return 1.0


def rounding_count(node: Node, program: Program) -> int:
    """How many roundings, and units of error of kernels, an entry has; sums in any order."""
    name, options = node.primitive.name, node.options
    shapes = [program.nodes[k].shape for k in node.inputs]
    match name:
        case "add":
            return len(shapes)
        case "sum":
            return math.prod(shapes[0][d] for d in options["dims"]) + 1
        case "cumsum":
            return node.shape[options["dim"]] + 1
        case "scatter" | "rows_back":
            return multiplicity(program.constants[node.inputs[1]]) + 1
        case "fold":
            return math.prod(options["kernel"]) + 1
        case "matmul" | "conv" | "conv_input" | "conv_weight":
            return product_terms(node, *shapes) + 2
        case "scalar":
            return 512
        case "softmax" | "logsumexp" | "softmax_back":
            size = shapes[0][options["dim"]]
            return int(1.4 * size + 16 * math.log(size)) + 48
    return 4
