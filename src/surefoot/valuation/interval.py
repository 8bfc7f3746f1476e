"""The value of an objective in exact arithmetic, as an interval: :func:`evaluate`."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from surefoot.valuation.streamed import Streamed, StreamedValuer, is_loader
from surefoot.valuation.valuer import Evaluation, EvaluationError, Valuer


def evaluate(model: nn.Module, x: Any, objective: nn.Module) -> Evaluation:
    r"""The value of an objective in exact arithmetic, at the weights as they are stored: value ± error.

    All operations are run in double precision, whatever the type of the model, and the round-off of every one of
    them is bounded and carried to the result by reverse mode (:mod:`surefoot.valuation.propagation`), so that
    depth does not multiply it. The function is the real one that the model stands for: single-precision weights
    are exact numbers, activations are exact functions.

    Args:
        model: the network; it is not changed, and its buffers do not move.
        x: a batch: a tensor, a tuple of tensors or a dict of keyword arguments; or any re-iterable of batches
            ``(x, y)`` such as a ``DataLoader``, for the mean over all samples.
        objective: a loss bound to its targets, ``surefoot.CrossEntropy(y)``; without targets where the batches
            bring them.

    Raises:
        CaptureError: if the model cannot be read.
        ObjectiveError: if the objective does not fit.
        UnsupportedOperation: naming an operation whose error is not known.
        EvaluationError: if the value is not finite, or no error can be proved.

    >>> import torch, surefoot as sf
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = evaluate(model, torch.randn(16, 4), sf.CrossEntropy(torch.arange(16) % 3))
    >>> found.error < 1e-13
    True
    """
    if is_loader(x):
        found = StreamedValuer(model, x, objective).evaluate(derivatives=True).evaluation
    else:
        valuer = Valuer.of(model, x, objective)
        found = valuer.enclosed(valuer.run(dict(model.named_parameters())))
    if not math.isfinite(found.error):
        raise EvaluationError(
            f"no error of the value {found.value:g} can be proved: an operation is too steep at these weights"
        )
    return found


__all__ = ["Evaluation", "EvaluationError", "Streamed", "StreamedValuer", "Valuer", "evaluate"]
