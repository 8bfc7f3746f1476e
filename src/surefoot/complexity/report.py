r"""The cost of a chain: the paper's complexities next to PyTorch's own counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

from torch import nn

from surefoot.chain import Chain
from surefoot.complexity.counted import Counted, counted
from surefoot.complexity.layers import ComputationCost, OracleCost, computation_cost, oracle_costs
from surefoot.complexity.traffic import Traffic
from surefoot.errors import ChainError

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_COUNTS = ("generic", "refined", "structured")  # the ways of counting


def engineering(count: int, unit: str = "") -> str:
    """Three significant digits with a prefix for a power of a thousand; beyond 10²¹, a power of ten.

    >>> engineering(15470264320), engineering(999999), engineering(312), engineering(20480, "B")
    ('15.5 G', '1.00 M', '312', '20.5 kB')
    >>> engineering(5 * 10**23)
    '5.00e+23'
    """
    if count < 1000:
        return f"{count} {unit}".strip()
    power = 0
    value = Decimal(count)  # a float ends at 10³⁰⁸
    while value >= Decimal("999.5"):
        value /= 1000
        power += 1
    if power >= len(_PREFIXES):
        return f"{Decimal(count):.2e} {unit}".strip()
    digits = 2 if value < Decimal("9.995") else 1 if value < Decimal("99.95") else 0
    return f"{value:.{digits}f} {_PREFIXES[power]}{unit}"


def table(rows: list[tuple[str, ...]], left: int = 1) -> list[str]:
    """Lines of aligned columns; the first ``left`` columns are aligned to the left, all others to the right.

    >>> table([("a", "10"), ("bcd", "2")])
    ['a    10', 'bcd   2']
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


@dataclass(frozen=True)
class Passes:
    r"""The forward-backward algorithm under one way of counting.

    Attributes:
        backward: multiplications of the backward pass.
        forward_backward: :math:`\mathcal{T}_{FB}`, those of both passes.
        ratio: :math:`Q = \mathcal{T}_{FB} / \mathcal{T}(f)`: how many values a derivative costs (Baur-Strassen).
    """

    backward: int
    forward_backward: int
    ratio: float


@dataclass(frozen=True)
class Cost:
    r"""Space and time of the oracles on a chain (paper, "Oracle arithmetic complexity").

    Time is counted in multiplications, space in numbers, both for the whole batch.

    Attributes:
        computations: the cost of each computation :math:`\phi_t`.
        outputs: dimension :math:`d_\tau` of the output.
        counted: multiplications counted by PyTorch, and memory held by autograd.
        traffic: with several processes, the predicted traffic between them and time of a gradient.
    """

    computations: tuple[ComputationCost, ...]
    outputs: int
    counted: Counted
    traffic: Traffic | None = None

    @property
    def space(self) -> int:
        r""":math:`\mathcal{S}_{FB} \leq \sum_t (p_t + d_{t-1}) d_t`."""
        return sum(layer.space for layer in self.computations)

    @property
    def forward(self) -> int:
        r""":math:`\mathcal{T}(f)`, the multiplications of the forward pass."""
        return sum(layer.forward for layer in self.computations)

    @property
    def products(self) -> int:
        """Matrix products and convolutions in ``forward``: the prediction of ``counted.forward``."""
        return sum(layer.products for layer in self.computations)

    @property
    def products_backward(self) -> int:
        """Matrix products and convolutions in the backward pass: the prediction of ``counted.backward``."""
        return sum(layer.products_backward for layer in self.computations)

    @property
    def generic(self) -> Passes:
        r"""With full matrices: :math:`\sum_t \mathcal{T}(\phi_t, \nabla\phi_t) + 2 (d_{t-1} d_t + p_t d_t)`."""
        return self._passes(lambda layer: layer.backward_generic)

    @property
    def refined(self) -> Passes:
        r"""With sparsity; backward is :math:`\sum_t s_{a_t} + 2s_{\beta_t} + s_{\beta^u_t} + s_{\beta^x_t}`."""
        return self._passes(lambda layer: layer.backward_refined)

    @property
    def structured(self) -> Passes:
        """With sparsity, and normalisations, soft-max and attention differentiated in factored form.

        It is the same as ``refined`` if all other parts act on each entry, or are poolings. Baur-Strassen's
        constant is then at most 3 if every operation is a product of two factors or has one argument that varies:
        products cost :math:`s` forward and :math:`2s` backward, a scalar function costs one operation for its
        value, one for its derivative and one for the product with it, and everything else costs less.
        """
        return self._passes(lambda layer: layer.backward_structured)

    @cached_property
    def oracles(self) -> tuple[OracleCost, ...]:
        """The cost of each step: gradient, Gauss-Newton, Newton."""
        return oracle_costs(self.computations, self.outputs)

    def _passes(self, backward_of: Callable[[ComputationCost], int]) -> Passes:
        backward = sum(map(backward_of, self.computations))
        both = backward + sum(layer.forward_with_derivative for layer in self.computations)
        if self.forward:
            return Passes(backward, both, both / self.forward)
        return Passes(backward, both, math.inf if both else 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts."""
        numbers = ("outputs", "space", "forward", "products", "products_backward")
        return {
            "computations": [
                asdict(layer) | {"blocks": list(layer.blocks), "forward": layer.forward, "space": layer.space}
                for layer in self.computations
            ],
            **{name: getattr(self, name) for name in numbers},
            **{name: asdict(getattr(self, name)) for name in _COUNTS},
            "oracles": [asdict(oracle) for oracle in self.oracles],
            "counted": asdict(self.counted),
            "traffic": None if self.traffic is None else asdict(self.traffic),
        }

    @property
    def title(self) -> str:
        """The title of the tables."""
        return f"Cost of a chain of {len(self.computations)} computations, in multiplications"

    @property
    def tables(self) -> list[tuple[int, list[tuple[str, ...]]]]:
        """The tables that are printed: for each the number of text columns, and its rows, titles first."""
        return [
            (2, [_HEADER, *self._layer_rows()]),
            (1, self._pass_rows()),
            (1, [("step", "oracle calls", "multiplications", "gradients"), *map(_step, self.oracles)]),
            (1, [
                ("matrix products and convolutions", "predicted", "counted by PyTorch"),
                ("forward", f"{self.products:,}", f"{self.counted.forward:,}"),
                ("backward", f"{self.products_backward:,}", f"{self.counted.backward:,}"),
            ]),
            (1, [
                ("memory", ""),
                ("all derivatives stored, S_FB", f"{engineering(self.space)} numbers"),
                ("held by autograd after the forward pass", engineering(self.counted.held_bytes, "B")),
            ]),
            *([] if self.traffic is None else [(1, self._traffic_rows(self.traffic))]),
        ]  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(
            [self.title, "\n\n".join("\n".join(table(rows, left=left)) for left, rows in self.tables)]
        )

    def _layer_rows(self) -> list[tuple[str, ...]]:
        numbers = [
            (c.parameters, c.state_after, c.bilinear, c.affine_parameters + c.affine_state, c.nonaffine, c.forward)
            for c in self.computations
        ]
        heads = [(f"φ_{t}", _short(layer.label)) for t, layer in enumerate(self.computations, start=1)]
        totals = [sum(column) for column in zip(*numbers, strict=True)] or [0] * 6
        lines = zip([*heads, ("", "all")], [*numbers, totals], strict=True)
        return [(*head, *map(engineering, line)) for head, line in lines]

    def _pass_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("forward-backward", "backward", "both passes", "Q")]
        for name in _COUNTS:
            passes: Passes = getattr(self, name)
            both = engineering(passes.forward_backward)
            rows.append((name, engineering(passes.backward), both, f"{passes.ratio:.4g}"))
        return rows

    def _traffic_rows(self, traffic: Traffic) -> list[tuple[str, ...]]:
        named = {"pull-back": traffic.pull, "push-forward": traffic.push, "Gauss-Newton, 10 iterations": None}
        rows: list[tuple[str, ...]] = [(f"sent, {traffic.processes} processes", "by process 0", "by each other")]
        for name, sent in named.items():
            rows.append((name, *(engineering(size, "B") for size in sent or traffic.gauss_newton(10))))
        return rows


_HEADER = ("", "computation", "p_t", "d_t", "s_β", "s_βu + s_βx", "s_a", "T(φ_t)")
_WIDTH = 44


def _short(label: str) -> str:
    return label if len(label) <= _WIDTH else label[: _WIDTH - 1] + "…"


def _step(oracle: OracleCost) -> tuple[str, ...]:
    calls = "" if oracle.calls is None else f"{oracle.calls:,}"
    return oracle.name, calls, engineering(oracle.multiplications), f"{oracle.relative:.4g}"


def cost(model: nn.Module, x: Any, processes: int = 1) -> Cost:
    r"""The cost of the oracles on a model: the paper's complexities, next to PyTorch's own counts.

    Nothing is computed, only shapes are read: the model and the input may be on the ``meta`` device. The result
    prints as tables. With several processes that share the samples of x it also predicts the traffic between them
    (:mod:`surefoot.complexity.traffic`).

    >>> mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> cost = sf.cost(mlp, torch.ones(5, 4))
    >>> cost.products == cost.counted.forward == 5 * (4 * 3 + 3 * 2)
    True
    >>> cost.refined.backward == 5 * (2 * 4 * 3 + 3 + 3) + 5 * (2 * 3 * 2 + 2)  # 2 s_β + s_βu + s_a
    True
    """
    if not (isinstance(processes, int) and processes >= 1):
        raise ChainError(f"there is at least one process, got {processes!r}")
    chain = Chain(model, x)
    alone = chain_cost(chain)
    if processes == 1:
        return alone
    leaves = chain.graph.parameters
    size, width = sum(leaf.spec.numel for leaf in leaves), max(leaf.spec.dtype.itemsize for leaf in leaves)
    both = alone.structured.forward_backward
    return replace(alone, traffic=Traffic(processes, size, alone.outputs, width, both))


def chain_cost(chain: Chain) -> Cost:
    """The cost of the oracles on a chain.

    >>> chain_cost(sf.Chain(nn.Linear(4, 3), torch.ones(5, 4))).products
    60
    """
    outputs = sum(chain.graph.numel(name) for name in chain.graph.outputs)
    return Cost(tuple(map(computation_cost, chain)), outputs, counted(chain))
