r"""The objective of auto-encoders: the output compared with the input (the paper's section "Auto-encoders").

.. math:: \min_{u_e, u_d}\ \frac1n\sum_{i=1}^n\|x_i - \psi^d(\psi^e(x_i, u_e), u_d)\|_2^2

The encoder and the decoder are chains of computations, and so is the one after the other (appendix "Auto-encoders,
composition of chains of computations").
"""

from __future__ import annotations

from typing import Any

from torch import nn

from surefoot.chain import Chain
from surefoot.graph.nodes import Spec
from surefoot.objectives.constants import ObjectiveError
from surefoot.objectives.entrywise import Square
from surefoot.objectives.loss import shape_of


class Reconstruction(Square):
    r""":math:`h(\hat x) = \frac1n\sum_i\|\hat x_i - x_i\|^2`, the targets being the input x itself.

    Made with x it is bound to it; without, an optimizer gets it as targets: ``optimizer.step(x, x)``. For data
    between 0 and 1 that are reconstructed as logits, :class:`BinaryCrossEntropy` of x does the same.

    Args:
        targets: x, or ``None``.
        reduction: see :class:`~surefoot.objectives.loss.Loss`.
        scale: a factor of half the squared distance; 2 gives the paper's objective.

    Raises:
        ObjectiveError: if an option is not allowed, or the output does not have the shape of the input.

    >>> import torch
    >>> float(Reconstruction()(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    25.0
    """

    def __init__(self, targets: Any = None, *, reduction: str = "mean", scale: float = 2.0) -> None:
        super().__init__(targets, reduction=reduction, scale=scale)

    def check(self, outputs: Spec, targets: Spec | None) -> None:
        """The output has the shape of the input."""
        if targets is not None and outputs.shape != targets.shape:
            raise ObjectiveError(
                f"a reconstruction has the shape of the input, which is {shape_of(targets)}: the model returns "
                f"{shape_of(outputs)}. Flatten the input, or let the decoder end in its shape (nn.Unflatten)"
            )
        super().check(outputs, targets)


def encode_decode(encoder: nn.Module, decoder: nn.Module, x: Any) -> Chain:
    r"""The composition :math:`\psi^d \circ \psi^e` as one chain, from two models that need not know each other.

    Args:
        encoder: maps x to a code.
        decoder: maps the code to a reconstruction.
        x: a batch.

    Raises:
        CaptureError: if one of the two cannot be read.
        ChainError: if the decoder does not read what the encoder returns.

    >>> import torch
    >>> chain = encode_decode(nn.Linear(4, 2), nn.Linear(2, 4), torch.ones(3, 4))
    >>> len(chain), sorted(chain.parameters)
    (2, ['0.bias', '0.weight', '1.bias', '1.weight'])
    """
    first = Chain(encoder, x)
    return first >> Chain(decoder, first.value())
