r"""Do the samples of a batch meet in a model? Then its objective on all data is no mean over batches.

The model is asked. Let a and b be the first and the last rows of a batch, as many of each, and
:math:`S(a, b)` a sum over the outputs of something. If outputs are computed sample by sample, wherever in the
batch these are,

.. math:: S(a, b) = S(b, a), \qquad S(a, b) + S(b, a) = S(a, a) + S(b, b).

Here S is the sum of the squares of all outputs, or one output that is a mean itself, in double precision. This
proves nothing where both hold: it is there to refuse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surefoot.batches import tensors_of
from surefoot.calculus.leaves import captured
from surefoot.errors import EvaluationError
from surefoot.graph.nodes import in_double
from surefoot.operations.evaluation import evaluate_in_double

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
    graph, values = captured(model, x)
    rows = {leaf.name: value for leaf, value in zip(graph.inputs, tensors, strict=True) if len(value) == count}
    half = count // 2
    first, middle, last = torch.arange(count).split([half, count - 2 * half, half])

    @torch.no_grad()
    def total(*parts: Tensor) -> float:
        order = torch.cat([parts[0], middle, parts[1]])
        moved = {name: value[order.to(value.device)] for name, value in rows.items()}
        outputs = evaluate_in_double(graph, {k: in_double(value) for k, value in (values | moved).items()})
        return sum(float(out.square().sum() if out.dim() else out) for out in outputs if out.is_floating_point())

    plain, turned, twice, other = total(first, last), total(last, first), total(first, first), total(last, last)
    size = sum(map(abs, (plain, turned, twice, other)))
    if max(abs(plain - turned), abs(plain + turned - twice - other)) > _SMALL * size:
        raise EvaluationError(
            "the samples of a batch meet in this model: what it computes of one depends on the others or on its "
            "place, so that the objective of all data is not a mean over batches. Pass all data as one batch, or "
            "a list of batches, each of which then counts as it is"
        )
