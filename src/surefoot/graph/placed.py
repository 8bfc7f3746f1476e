"""How a tensor lies with several processes: what each has of it, how it is put together, and cut again.

Most lie as ``fully_shard`` cuts them, by rows. Small ones of these are gathered together, in one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surefoot.processes import Processes, answering

SMALL, TOGETHER = 1 << 16, 1 << 19  # numbers of a tensor that is gathered with others, and of all of them


class Placed:
    """Where the parts of a tensor are.

    Args:
        like: a DTensor that lies so.
        processes: all that hold a part, and no others.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        numel: its entries, in all parts together.
        counts: whether this process' part counts in sums over all: of parts that are copies, one does.
        is_copy: whether every process has all of it.
        small: whether it is gathered together with others.
        rows: by rank, where the rows of a process begin and how many it has, if it is cut by rows; else empty.
    """

    def __init__(self, like: Any, processes: Processes) -> None:
        self._mesh, self._placements, self._stride = like.device_mesh, like.placements, like.stride()
        self.shape, self.dtype, self.numel, self._rank = like.shape, like.dtype, like.numel(), processes.rank
        places = zip(self._mesh.get_coordinate(), self._placements, strict=True)
        self.counts = all(place == 0 or not placement.is_replicate() for place, placement in places)
        self.is_copy = all(placement.is_replicate() for placement in self._placements)
        self.rows: list[tuple[int, int]] = []
        if self._mesh.ndim == 1 and self._placements[0].is_shard(0):
            order, most = self._mesh.mesh.tolist(), -(-self.shape[0] // self._mesh.size())
            starts = [min(order.index(member) * most, self.shape[0]) for member in processes.members]
            self.rows = [(first, min(most, self.shape[0] - first)) for first in starts]
        self.small = bool(self.rows) and self.numel <= SMALL

    @property
    def sizes(self) -> list[int]:
        """How many entries each process has, if it is cut by rows."""
        return [count * math.prod(self.shape[1:]) for _, count in self.rows]

    def wrapped(self, part: Tensor, *more: int) -> Any:
        """A DTensor that lies so, with this part here; it may have more dimensions behind those of the tensor."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((*self.shape, *more))
        form: dict[str, Any] = {"shape": shape, "stride": self._stride}
        if more:
            form["stride"] = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self._mesh, self._placements, run_check=False, **form)

    def is_here(self, value: Any) -> bool:
        """Whether the part that a DTensor has is that of this process."""
        mesh = value.device_mesh
        return bool(mesh.shape == self._mesh.shape and mesh.get_coordinate() == self._mesh.get_coordinate())

    def put_together(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor of the parts of all processes, by rank, if it is cut by rows."""
        ordered = sorted(range(len(parts)), key=lambda rank: self.rows[rank])
        return torch.cat([parts[rank] for rank in ordered if len(parts[rank])]).view(self.shape)

    def part_of(self, whole: Tensor) -> Tensor:
        """What this process has of a tensor that is cut by rows."""
        return whole.narrow(0, *self.rows[self._rank]).clone()

    def summed(self, whole: Tensor) -> Tensor:
        """The part of this process of the sum of such tensors of all of them, which all call this."""
        from torch.distributed.tensor import DTensor, Partial

        with answering():
            parts = DTensor.from_local(whole, self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            found: Tensor = parts.redistribute(self._mesh, self._placements).to_local()
        return found


def norms(processes: Processes, parts: Sequence[Tensor], counts: Sequence[bool]) -> list[float]:
    """The norms of tensors of which these are the parts here, and whether they count; all processes call this."""
    counted = [part if one else part.new_empty(0) for part, one in zip(parts, counts, strict=True)]
    mine = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in counted])
    return [math.hypot(*sizes) for sizes in processes.beside([mine], len(mine)).T.tolist()]


def bundled(places: Sequence[Placed]) -> list[list[int]]:
    """The numbers of tensors that are gathered together: small ones in order, and each large one by itself."""
    found: list[list[int]] = []
    last: dict[torch.dtype, list[int]] = {}
    for number, place in enumerate(places):
        before = last.get(place.dtype, [])
        if place.small and before and sum(places[k].numel for k in before) + place.numel <= TOGETHER:
            before.append(number)
            continue
        found.append([number])
        if place.small:
            last[place.dtype] = found[-1]
    return found


def gathered(processes: Processes, places: Sequence[Placed], parts: Sequence[Tensor]) -> list[Tensor]:
    """Whole tensors of one bundle, on all processes, which all call this."""
    if not places[0].rows:
        processes.sent += parts[0].nbytes
        with answering():
            return [places[0].wrapped(parts[0]).full_tensor().contiguous()]
    sizes = list(zip(*(place.sizes for place in places), strict=True))  # of the parts, by rank
    everyone = processes.beside([part.reshape(-1) for part in parts], max(map(sum, sizes)))
    if len(places) == 1 and len(set(sizes)) == 1 and sorted(places[0].rows) == places[0].rows:
        return [everyone.view(places[0].shape)]
    ends = [list(accumulate(each)) for each in sizes]
    return [
        place.put_together(
            [row[end[k] - size[k] : end[k]] for row, end, size in zip(everyone, ends, sizes, strict=True)]
        )
        for k, place in enumerate(places)
    ]
