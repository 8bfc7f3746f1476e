r"""Weights that lie with several processes, whole only while they are read.

Each process runs the operations of a model on its own data, and reads one weight after the other, on the way
forward and back. A weight is gathered for that, and dropped when others are. The gradient in it is summed up over
all processes as soon as it is known, and each keeps its part. Both take all processes. But these need not do the
same: they may have more batches or fewer, or none, and look at weights again where others do not. So they meet in
*rounds*. In each, every process says what it wants next, a weight or a sum; what is wanted by anyone is done by
all, in the order of numbers. Who has finished, or failed, goes on meeting the others until all are done. Processes
with batches of the same kind want the same, and gather a weight once for each of its readers.

At one time a process holds the last two matrices it read, those that an operation is reading, and one that another
process wants. Vectors (biases, scales) are kept until all are done. What is computed from weights alone, such as
one that is divided by its norm, stays as long as its readers need it.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.processes import Processes, ProcessLost, answering
from surefoot.torch_private import Deferred, Known, lies_elsewhere, sharded_modules, unsharded_copy

_NOTHING = -1
_KEPT = 2  # matrices
_CLOSED = "weights that lie with several processes are read where these do not meet"


class Fetched(dict[str, Tensor]):
    """Weights by path, each a tensor whose numbers are gathered when it is read, inside :meth:`open`.

    Args:
        processes: all that hold a part, and no others; all of them make this at the same time.
        parts: by path, in the same order on all, DTensors; not to be changed while these weights are in use.

    Attributes:
        slopes: this process' parts of the sums of what was added, by path.
        most: the most bytes of whole weights that were here at one time.
    """

    def __init__(self, processes: Processes, parts: Mapping[str, Any]) -> None:
        super().__init__()
        self.processes, self.slopes, self.most = processes, dict[str, Tensor](), 0
        self._paths, self._parts = list(parts), [value.detach() for value in parts.values()]
        self._kept, self._alive = OrderedDict[int, Tensor](), list[weakref.ref[Tensor]]()
        self._is_open = False
        for number, (path, known) in enumerate(zip(parts, self._measured(), strict=True)):
            value = self._parts[number]
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            fetch = partial(_fetched, weakref.ref(self), number)
            self[path] = Deferred.made(like, value.to_local().device, fetch, known)

    def _measured(self) -> list[Known]:
        """Norms and largest entries, of the parts of all processes together."""

        def here(value: Any) -> tuple[float, float]:
            part = value.to_local().double()
            peak = float(part.abs().max()) if part.numel() else 0.0
            return float(part.norm()) if counts_here(value) else 0.0, math.inf if math.isnan(peak) else peak

        each = zip(*self.processes.gathered(lambda: [here(value) for value in self._parts]), strict=True)
        return [Known(math.hypot(*sizes), max(peaks)) for sizes, peaks in (zip(*one, strict=True) for one in each)]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Weights may be read and sums added to in the body; all processes are in theirs at the same time.

        Raises:
            ProcessLost: if another process stops, or does not answer.
        """
        self._is_open = True
        try:
            yield
            self._serve()
        except ProcessLost:
            raise
        except Exception:
            self._serve()
            raise
        finally:
            self._is_open = False
            self._kept.clear()

    def add(self, path: str, slope: Tensor) -> None:
        """Add this, whole, to the sum over all processes for a weight."""
        self._round(len(self._paths) + self._paths.index(path), slope)

    def _serve(self) -> None:
        while self._round(_NOTHING):
            pass

    def _whole(self, number: int) -> Tensor:
        if number not in self._kept:
            self._round(number)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _round(self, wanted: int, slope: Tensor | None = None) -> bool:
        """Say what is wanted here and do what is wanted anywhere; whether there was anything."""
        if not self._is_open:
            raise ProcessLost(_CLOSED)
        found = self.processes.announced(wanted, next(iter(self.values())).device)
        for number in sorted({*found} - {_NOTHING}):
            own = number == wanted
            if number < len(self._paths):
                self._gather(number, own)
            else:
                self._sum_up(number - len(self._paths), slope if own else None)
        return any(number != _NOTHING for number in found)

    def _gather(self, number: int, wanted: bool) -> None:
        value = self._parts[number]
        matrices = [k for k in self._kept if self._parts[k].dim() > 1]
        if wanted and value.dim() > 1 and len(matrices) >= _KEPT:
            del self._kept[matrices[0]]
        self.processes.sent += value.to_local().nbytes
        with answering():
            whole: Tensor = value.full_tensor().contiguous()
        self._alive = [one for one in self._alive if one() is not None] + [weakref.ref(whole)]
        self.most = max(self.most, sum(one.nbytes for one in (ref() for ref in self._alive) if one is not None))
        if wanted or value.dim() < 2:
            self._kept[number] = whole

    def _sum_up(self, number: int, slope: Tensor | None) -> None:
        from torch.distributed.tensor import DTensor, Partial

        value, path = self._parts[number], self._paths[number]
        mesh, like = value.device_mesh, value.to_local()
        if slope is None:
            slope = torch.zeros(value.shape, dtype=torch.float64, device=like.device)
        self.processes.sent += slope.nbytes
        with answering():
            whole = DTensor.from_local(slope, mesh, [Partial()] * mesh.ndim, run_check=False)
            part: Tensor = whole.redistribute(mesh, value.placements).to_local()
        self.slopes[path] = self.slopes[path] + part if path in self.slopes else part


def _fetched(owner: weakref.ref[Fetched], number: int) -> Tensor:
    """A weight; its tensor does not hold the others, so that all parts are freed once nobody reads them."""
    weights = owner()
    if weights is None:
        raise ProcessLost(_CLOSED)
    return weights._whole(number)


def counts_here(value: Any) -> bool:
    """Whether this process' part of a tensor counts in sums over all: of parts that are copies, one does."""
    places = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
    return all(place == 0 or not placement.is_replicate() for place, placement in places)


class Outline:
    """A model whose weights lie with several processes: a copy that has their shapes, and they themselves.

    In the copy a weight that varies is one number, repeated, which nobody reads. Frozen weights are whole, since
    they are constants of every graph.

    Args:
        model: with parameters that are DTensors.
        processes: those of its mesh.

    Attributes:
        plain: the copy.
        parts: the weights that vary, by path.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.model, self.processes, self.parts = model, processes, dict[str, Any]()
        made: dict[int, Tensor] = {}
        self._frozen: list[tuple[Any, Tensor]] = []
        mesh = next(value.device_mesh for value in _varying(model) if lies_elsewhere(value))

        def outlined(value: Tensor) -> Tensor:
            if not lies_elsewhere(value):
                return value
            if id(value) not in made:
                made[id(value)] = _outline_of(value)
                if not value.requires_grad:
                    self._frozen.append((value, made[id(value)]))
            return made[id(value)]

        self.plain = unsharded_copy(model, outlined)
        for path, value in model.named_parameters():
            if value.requires_grad:
                self.parts[path] = value if lies_elsewhere(value) else _copies(value, mesh)

    @staticmethod
    def of(model: nn.Module, group: Any = None) -> Outline | None:
        """If weights that vary lie with several processes, and the group, or that of their mesh, is of these; else
        ``None``.
        """
        for module in sharded_modules(model):
            module.reshard()  # after a forward pass some keep whole weights, which are no parameters of anyone
        meshes = {value.device_mesh for value in _varying(model) if lies_elsewhere(value)}
        holders = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
        if group is not None:
            return Outline(model, Processes(group)) if holders == {_members(group)} else None
        mesh = next(iter(meshes), None)
        return Outline(model, Processes(mesh.get_group())) if mesh and len(meshes) == mesh.ndim == 1 else None

    def is_of(self, group: Any) -> bool:
        """Whether all processes of a group hold the weights, and no others."""
        mesh = next(iter(self.parts.values())).device_mesh
        return group is not None and tuple(sorted(mesh.mesh.flatten().tolist())) == _members(group)

    def weights(self, parts: Mapping[str, Tensor] | None = None) -> Fetched:
        """As they are now, or with other parts of this process, by path."""
        here = {path: self.like(path, part) for path, part in (parts or {}).items()}
        return Fetched(self.processes, {**self.parts, **here})

    def refreshed(self) -> Outline:
        """The same with the present modes and frozen weights; another one, if others are frozen now."""
        varying = {path for path, value in self.model.named_parameters() if value.requires_grad}
        if varying != self.parts.keys():
            return Outline(self.model, self.processes)
        for module, copied in zip(self.model.modules(), self.plain.modules(), strict=True):
            copied.training = module.training
        with torch.no_grad(), answering():
            for value, whole in self._frozen:
                whole.copy_(value.detach().full_tensor())
        return self

    def whole(self) -> dict[str, Tensor]:
        """All parameters by path, gathered one after the other."""
        present = dict(self.plain.named_parameters())
        with answering():
            gathered = {path: nn.Parameter(value.detach().full_tensor()) for path, value in self.parts.items()}
        return {path: gathered.get(path, value) for path, value in present.items()}

    def like(self, path: str, part: Tensor) -> Any:
        """A DTensor that lies as a weight does, of whose part of this process this takes the place."""
        from torch.distributed.tensor import DTensor

        value = self.parts[path]
        form = {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(part, value.device_mesh, value.placements, run_check=False, **form)


def _varying(model: nn.Module) -> Iterator[Any]:
    return (value for value in model.parameters() if value.requires_grad)


def _members(group: Any) -> tuple[int, ...]:
    from torch import distributed

    return tuple(sorted(distributed.get_process_group_ranks(group)))


def is_outline(value: Tensor) -> bool:
    """Whether a tensor is one number, repeated, that stands for the weight of another model."""
    return value.numel() > 1 and not any(value.stride())


def _outline_of(value: Any) -> Tensor:
    if not value.requires_grad:
        with answering():
            whole: Tensor = value.detach().full_tensor()
        return nn.Parameter(whole, requires_grad=False) if isinstance(value, nn.Parameter) else whole
    local = value.to_local()
    return nn.Parameter(torch.zeros((), dtype=local.dtype, device=local.device).expand(value.shape))


def _copies(value: Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
