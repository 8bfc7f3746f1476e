"""Enclosures that know how far single entries may move."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from surefoot.enclosure import Enclosure
from surefoot.magnitude import Magnitude, minimum


@dataclass(frozen=True)
class Entrywise(Enclosure):
    """An enclosure with one more claim.

    Attributes:
        entries: for each row, how far any of its entries may be from the centre. A row that moves by s in norm may
            move by as much in one entry, but the result of a linear layer moves by less in each than in all.
    """

    entries: Magnitude | None = None

    @classmethod
    def of(cls, enclosure: Enclosure, entries: Magnitude) -> Entrywise:
        """The same enclosure with that claim."""
        return cls(**{field.name: getattr(enclosure, field.name) for field in fields(Enclosure)}, entries=entries)

    def radius(self) -> Tensor | None:
        """How far each entry may be from the centre: a tensor that broadcasts against the value."""
        if self.entries is None or not isinstance(self.value, Tensor):
            return super().radius()
        rows = minimum(self.entries, self.row_spread(len(self.entries))).tensor(self.value)
        return rows.reshape(-1, *[1] * (self.value.dim() - 1))
