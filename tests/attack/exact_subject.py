"""What the exact judge is given: a model, data, a loss, and what happens between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attack.dice import Dice


@dataclass
class Subject:
    """One network that nobody tuned.

    Attributes:
        name: what it is, in a few words.
        model: the network.
        x: a batch.
        loss: an objective without targets.
        y: the targets.
        wrt: what varies in certificates.
        radii: of the balls.
        change: what happens to the model before step k of an optimizer.
        backward: whether autograd differentiates the model; false for a backward that is not the derivative.
    """

    name: str
    model: nn.Module
    x: Tensor
    loss: Any
    y: Any
    wrt: Literal["params", "input"] = "params"
    radii: Sequence[float] = (0.0, 1e-3)
    change: Callable[[int], None] = field(default=lambda k: None)
    backward: bool = True

    @property
    def variables(self) -> dict[str, Tensor]:
        """The tensors that vary, by name."""
        if self.wrt == "input":
            return {"input": self.x}
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def outputs(self) -> Tensor:
        """The network on its batch."""
        return self.model(self.x)

    def objective(self) -> Tensor:
        """The loss of that."""
        return self.loss(self.model(self.x), self.y)


class Material(Dice):
    """Dice that also throw tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normally distributed numbers in double precision."""
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale + mean

    def classes(self, rows: int, count: int) -> Tensor:
        """Labels."""
        return torch.randint(count, (rows,), generator=self._generator)

    def power(self, low: float, high: float) -> float:
        """A power of ten with an exponent between the two."""
        return 10.0 ** self.between(low, high)

    def weights(self, model: nn.Module, scale: float = 1.0) -> nn.Module:
        """New weights for a model: normal, of this size. Scales of normalisations too."""
        model = model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self.normal(*parameter.shape, scale=scale))
        return model
