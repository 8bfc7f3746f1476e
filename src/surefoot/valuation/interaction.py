r"""Do the samples of a batch meet in a model? Then its objective on all data is no mean over batches.

Where labels of samples say so (:func:`surefoot.program.interacting`), they do not. Elsewhere the model is asked.
Let a and b be the first and the last rows of a batch, as many of each, and :math:`S(a, b)` a sum over outputs of
something. If outputs are computed sample by sample, wherever in the batch these are,

.. math:: S(a, b) = S(b, a), \qquad S(a, b) + S(b, a) = S(a, a) + S(b, b).

Here S is the sum of the squares of all outputs, or one output that is a mean itself, in double precision. This
proves nothing where both hold: it is there to refuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import tensors_of
from surefoot.errors import EvaluationError
from surefoot.program import Program, capture, interacting, trace, values_of
from surefoot.program.checks import as_inputs

_SMALL = 1e-7  # a relative difference that may be round-off


def refuse_interaction(model: nn.Module, x: Any, y: Tensor) -> None:
    """Refuse a model whose outputs for one sample of a batch depend on the others, or on its place.

    Args:
        model: the network.
        x: the inputs of a batch; tensors that are as long as the targets have a row for each sample.
        y: its targets.

    Raises:
        EvaluationError: in that case.
    """
    tensors, count = tensors_of(x), len(y) if y.dim() else 1
    if count < 2 or len(tensors[0]) != count or any(tensor.is_meta for tensor in model.parameters()):
        return
    program = capture(model, x)
    args, kwargs = as_inputs(x)
    named = {"x" if len(args) == 1 else f"x.{k}": value for k, value in enumerate(args)} | kwargs
    rows = {name: 0 for name, value in named.items() if len(value) == count and name in program.inputs}
    if len(rows) == len(named) and not _by_place(program, rows, count) and interacting(program, rows) is None:
        return
    half = count // 2
    first, middle, last = torch.arange(count).split([half, count - 2 * half, half])

    @torch.no_grad()
    def total(*parts: Tensor) -> float:
        order = torch.cat([parts[0], middle, parts[1]])
        move = lambda value: value[order.to(value.device)] if len(value) == count else value  # noqa: E731
        moved = tuple(map(move, args)), {name: move(value) for name, value in kwargs.items()}
        other = (
            program if len(rows) == len(named) else trace(model, moved[0], kwargs=moved[1])
        )  # ids are constants
        batch = moved[1] or moved[0]
        values = {name: value.double() for name, value in values_of(other, model, batch).items()}
        return sum(float(out.square().sum() if out.dim() else out) for out in other.results(values))

    plain, turned, twice, other = total(first, last), total(last, first), total(first, first), total(last, last)
    size = sum(map(abs, (plain, turned, twice, other)))
    if max(abs(plain - turned), abs(plain + turned - twice - other)) > _SMALL * size:
        raise EvaluationError(
            "the samples of a batch meet in this model: what it computes of one depends on the others or on its "
            "place, so that the objective of all data is not a mean over batches. Pass all data as one batch, or "
            "a list of batches, each of which then counts as it is"
        )


def _by_place(program: Program, rows: dict[str, int], count: int) -> bool:
    """Whether samples meet something that may have a number for each place in the batch."""
    dependent = program.depends(rows)
    met = {k for node in program.nodes if dependent[node.index] for k in node.inputs if not dependent[k]}
    return any(program.nodes[k].shape.numel() % count == 0 for k in met)
