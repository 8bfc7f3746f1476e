r"""The cost of a chain: the paper's complexities next to PyTorch's own counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from torch import nn

from surefoot.chain import Chain
from surefoot.complexity.counted import Counted, counted
from surefoot.complexity.layers import ComputationCost, OracleCost, computation_cost, oracle_costs

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_WIDTH = 44  # of the column of operations
_COUNTS = ("generic", "refined", "structured")  # the ways of counting


def engineering(count: int, unit: str = "") -> str:
    """Three significant digits with a prefix for a power of a thousand; beyond 10²¹, a power of ten.

    >>> engineering(15470264320), engineering(999999), engineering(20480, "B"), engineering(5 * 10**23)
    ('15.5 G', '1.00 M', '20.5 kB', '5.00e+23')
    """
    if count < 1000:
        return f"{count} {unit}".strip()
    rounded = f"{Decimal(count):.2e}"  # three digits, exactly; a float ends at 10³⁰⁸
    power, rest = divmod(int(rounded.partition("e")[2]), 3)
    if power >= len(_PREFIXES):
        return f"{rounded} {unit}".strip()
    return f"{Decimal(rounded).scaleb(-3 * power):.{2 - rest}f} {_PREFIXES[power]}{unit}"


def table(rows: list[tuple[str, ...]], left: int = 1) -> list[str]:
    """Lines of aligned columns; the first ``left`` columns are aligned to the left, all others to the right.

    >>> table([("a", "10"), ("bcd", "2")])
    ['a    10', 'bcd   2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    ]  # fmt: skip


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
        counted: multiplications counted by PyTorch, and memory of autograd.
    """

    computations: tuple[ComputationCost, ...]
    outputs: int
    counted: Counted

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
        return Passes(backward, both, both / self.forward if self.forward else math.inf if both else 1.0)

    def __str__(self) -> str:
        layers = [("", "computation", "p_t", "d_t", "s_β", "s_βu + s_βx", "s_a", "T(φ_t)")]
        numbers = [
            (c.parameters, c.state_after, c.bilinear, c.affine_parameters + c.affine_state, c.nonaffine, c.forward)
            for c in self.computations
        ]
        labels = [c.label if len(c.label) <= _WIDTH else c.label[: _WIDTH - 1] + "…" for c in self.computations]
        heads = [(f"φ_{t}", label) for t, label in enumerate(labels, start=1)]
        totals = tuple(sum(column) for column in zip(*numbers, strict=True)) or (0,) * 6
        for head, line in zip([*heads, ("", "all")], [*numbers, totals], strict=True):
            layers.append((*head, *map(engineering, line)))  # type: ignore[arg-type]
        passes = [("forward-backward", "backward", "both passes", "Q")]
        for name in _COUNTS:
            one: Passes = getattr(self, name)
            both = engineering(one.forward_backward)
            passes.append((name, engineering(one.backward), both, f"{one.ratio:.4g}"))
        steps = [("step", "oracle calls", "multiplications", "gradients")]
        for step in self.oracles:
            calls = "" if step.calls is None else f"{step.calls:,}"
            steps.append((step.name, calls, engineering(step.multiplications), f"{step.relative:.4g}"))
        tables = [
            table(layers, left=2),  # type: ignore[arg-type]
            table(passes),  # type: ignore[arg-type]
            table(steps),  # type: ignore[arg-type]
            table([
                ("matrix products and convolutions", "predicted", "counted by PyTorch"),
                ("forward", f"{self.products:,}", f"{self.counted.forward:,}"),
                ("backward", f"{self.products_backward:,}", f"{self.counted.backward:,}"),
            ]),
            table([
                ("memory", ""),
                ("all derivatives stored, S_FB", f"{engineering(self.space)} numbers"),
                ("held by autograd after the forward pass", engineering(self.counted.bytes, "B")),
            ]),
        ]  # fmt: skip
        title = f"Cost of a chain of {len(self.computations)} computations, in multiplications\n"
        return title + "\n\n".join(map("\n".join, tables))


def cost(model: nn.Module, x: Any) -> Cost:
    r"""The cost of the oracles on a model: the paper's complexities, next to PyTorch's own counts.

    Nothing is computed, only shapes are read: the model and the input may be on the ``meta`` device. The result
    prints as tables.

    >>> mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> cost = sf.cost(mlp, torch.ones(5, 4))
    >>> cost.products == cost.counted.forward == 5 * (4 * 3 + 3 * 2)
    True
    >>> cost.refined.backward == 5 * (2 * 4 * 3 + 3 + 3) + 5 * (2 * 3 * 2 + 2)  # 2 s_β + s_βu + s_a
    True
    """
    return chain_cost(Chain(model, x))


def chain_cost(chain: Chain) -> Cost:
    """The cost of the oracles on a chain.

    >>> chain_cost(sf.Chain(nn.Linear(4, 3), torch.ones(5, 4))).products
    60
    """
    outputs = sum(chain.graph.numel(name) for name in chain.graph.outputs)
    return Cost(tuple(map(computation_cost, chain)), outputs, counted(chain))
