"""A model whose weights lie with several processes, as an outline: shapes, and where the parts are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.graph.fetched import Fetched
from surefoot.graph.placed import Placed
from surefoot.processes import Processes, answering
from surefoot.torch_private import lies_elsewhere, sharded_modules, unsharded_copy


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
        places: how they lie.
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
        self.places = {path: Placed(value, processes) for path, value in self.parts.items()}

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

    def is_of(self, processes: Processes | None) -> bool:
        """Whether these hold the weights, and no others."""
        return processes is not None and sorted(processes.members) == sorted(self.processes.members)

    def here(self) -> dict[str, Tensor]:
        """The parts of this process, as they are now."""
        return {path: value.detach().to_local() for path, value in self.parts.items()}

    def weights(self, parts: Mapping[str, Tensor] | None = None, *, measured: bool = True) -> Fetched:
        """As they are now, or with other parts of this process, by path."""
        return Fetched(self.processes, self.places, {**self.here(), **(parts or {})}, measured=measured)

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

    def lying(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """DTensors that lie as the weights do, of the parts of this process, by path."""
        return {path: self.places[path].wrapped(part) for path, part in parts.items()}


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
