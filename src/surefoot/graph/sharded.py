r"""Models whose weights lie with several processes (``fully_shard``, ``distribute_tensor``).

Of such a model there is a plain copy, whose weights are gathered one after the other. What is computed with the
copy is written back into the shards as a whole: every process writes its own rows, and nothing crosses.

A certificate that rests on norms alone (``input_norm``) needs no copy. The norm of a matrix comes from the Gram
matrices of its parts, :math:`A^\top A = \sum_rA_r^\top A_r`, which are added up over the processes. A matrix with
more columns than rows is cut along these instead. So what crosses is the square of the shorter side, and at most
the part of each process; beyond a side of 4,096 there are only the norms of the parts, :math:`\|A\|_2^2 \le
\sum_r\|A_r\|_2^2`. Vectors and kernels of convolutions are small, and gathered.

All processes that hold a part call these functions at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.enclosure import Measured, row_norms
from surefoot.errors import CaptureError
from surefoot.norms import LARGEST_EXACT, frobenius_norm, norm_of_gram, spectral_norm
from surefoot.processes import Processes, answering
from surefoot.torch_private import lies_elsewhere, sharded_modules, unsharded_copy


class Sharded:
    """A model whose weights lie with several processes, and its plain copy.

    Args:
        model: with parameters that are DTensors; those that are not are shared by the copy.

    Attributes:
        plain: the copy, of the classes and attributes that the model had before it was sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        for module in sharded_modules(model):
            module.reshard()  # after a forward pass some keep whole weights, which are no parameters of anyone
        self._pairs: dict[int, tuple[Any, Tensor]] = {}
        self.plain = unsharded_copy(model, self._whole)

    def _whole(self, value: Tensor) -> Tensor:
        if not lies_elsewhere(value):
            return value
        if id(value) not in self._pairs:
            whole = _full(value).clone()
            if isinstance(value, nn.Parameter):
                whole = nn.Parameter(whole, requires_grad=value.requires_grad)
            self._pairs[id(value)] = value, whole
        return self._pairs[id(value)][1]

    def stand_ins(self, given: Iterable[Any]) -> list[Any]:
        """Parameters, named parameters, or groups of them, with those of the copy in place of the shards."""

        def one(item: Any) -> Any:
            if isinstance(item, dict):
                held = item["params"]
                return {**item, "params": one(held) if isinstance(held, Tensor) else self.stand_ins(held)}
            if isinstance(item, tuple):
                return item[0], one(item[1])
            return self._pairs[id(item)][1] if id(item) in self._pairs else item

        return [one(item) for item in given]

    @property
    def readable(self) -> nn.Module:
        """The copy that has the shapes of the model, so that its operations can be read."""
        return self.plain

    def gather(self) -> None:
        """The copy gets the present modes, and the present weights one after the other."""
        self._follow()
        with torch.no_grad():
            for value, whole in self._pairs.values():
                whole.copy_(_full(value))
                whole.requires_grad_(value.requires_grad)

    def _follow(self) -> None:
        modules, copies = list(self.model.modules()), list(self.plain.modules())
        if len(modules) != len(copies) or not all(map(isinstance, modules, map(type, copies))):
            remedy = "Make another optimizer for the model as it is now."
            raise CaptureError("modules of a model with sharded weights were replaced", remedy=remedy)
        for module, copied in zip(modules, copies, strict=True):
            copied.training = module.training
        for module in sharded_modules(self.model):
            module.reshard()

    def write(self) -> None:
        """The model gets the weights of the copy; every process writes what it has of them."""
        from torch.distributed.tensor import DTensor, Replicate

        parts = []
        for value, whole in self._pairs.values():
            mesh = value.device_mesh
            same = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
            parts.append((value.detach().to_local(), same.redistribute(mesh, value.placements).to_local()))
        with torch.no_grad():
            for place, part in parts:
                place.copy_(part)


def norms_of_shards(
    model: nn.Module, *, measured: bool = True
) -> tuple[nn.Module, dict[str, Tensor | Measured], int]:
    """A copy on the meta device, what is known of each parameter by path, and the bytes that this process sent.

    Of matrices it is norms, of everything else the values; nothing at all, if it is not to be measured.
    """
    found, sent = dict[str, Tensor | Measured](), 0
    for module in sharded_modules(model):
        module.reshard()
    for path, value in model.named_parameters() if measured else ():
        if not lies_elsewhere(value):
            found[path] = value.detach()
        elif value.dim() != 2:
            found[path], sent = _full(value), sent + value.to_local().nbytes  # type: ignore[attr-defined]
        else:
            found[path], bytes_ = _measured(value)
            sent += bytes_

    def empty(value: Tensor) -> Tensor:
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return nn.Parameter(like, value.requires_grad) if isinstance(value, nn.Parameter) else like

    return unsharded_copy(model, empty), found, sent


def _full(value: Any) -> Tensor:
    with answering():
        whole: Tensor = value.detach().full_tensor()
    return whole


def _measured(value: Any) -> tuple[Measured, int]:
    """The norms of a matrix whose rows lie with several processes, and the bytes sent."""
    from torch.distributed.tensor import Shard

    mesh, here = value.device_mesh, value.detach().to_local()
    if mesh.ndim > 1 or not value.placements[0].is_shard(0):
        return _norms(_full(value)), here.nbytes
    processes = Processes(mesh.get_group())
    if value.shape[0] >= value.shape[1]:
        part, rows = here, value.shape[0]
    else:  # the columns of the transposed matrix, whose Gram matrix is the smaller one
        with answering():
            part, rows = value.detach().redistribute(mesh, [Shard(1)]).to_local().mT, value.shape[1]
        processes.sent += here.nbytes
    everyone = processes.gathered(lambda: _norms(here, exact=min(value.shape) > LARGEST_EXACT))
    size, strips = (
        math.hypot(*norms) * (1 + 2.0**-50) for norms in ([n.size for n in everyone], [n.matrix for n in everyone])
    )
    if min(value.shape) <= LARGEST_EXACT:
        gram = part.double().mT @ part.double()
        processes.add([gram])
        found = norm_of_gram(gram, rows)
        strips = strips if found is None else found
    peak, longest = max(one.peak for one in everyone), max(one.longest for one in everyone)
    return Measured(size, peak, min(strips, size), longest), processes.sent


def _norms(whole: Tensor, *, exact: bool = True) -> Measured:
    """Of all that is here; without its spectral norm, if that is not asked for."""
    size = frobenius_norm(whole)
    peak = float(whole.abs().max()) if whole.numel() else 0.0
    longest = min(float(row_norms(whole.double()).max()), size) if whole.numel() else 0.0
    return Measured(size, peak, spectral_norm(whole) if exact else size, longest)
