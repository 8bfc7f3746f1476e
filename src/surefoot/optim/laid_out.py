"""What an optimizer saves where each process has a part of the weights: vectors that lie as the weights do.

They are DTensors by the names of parameters, with dimensions such as those of pairs behind. So
``torch.distributed.checkpoint`` loads them on any number of processes. It fills in what is there: an optimizer
that took no step has zeros where vectors will be. All else is the same on all processes, and is one entry.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.graph.held_parts import HeldParts
from surefoot.optim.vectors import Kinds
from surefoot.torch_private import sharded_modules

_Left = tuple[str, dict[str, Tensor]]


def laid_out(
    own: dict[str, Any], kinds: Kinds, here: Mapping[str, Tensor], parts: HeldParts, left: _Left | None
) -> dict[str, Any]:
    """The state of an optimizer, to be saved.

    Args:
        own: the state, with the parts of vectors that this process has.
        kinds: where these stand.
        here: what this process has of the parameters that are optimised.
        parts: of the model.
        left: settings and weights after the last step.
    """
    places = parts.outline.places
    device, length = next(iter(here.values())).device, sum(part.numel() for part in here.values())
    vectors: dict[str, dict[str, Any]] = {}
    rest = own
    for path, (kind, lead) in kinds.items():
        found, rest = _replaced(rest, path, True)
        value = torch.zeros(*lead, length, dtype=kind, device=device) if found is None else found
        pieces = value.split([part.numel() for part in here.values()], dim=-1)
        vectors[_name(path)] = {
            name: places[name].wrapped(_copied(piece.movedim(-1, 0)).view(*part.shape, *lead), *lead)
            for (name, part), piece in zip(here.items(), pieces, strict=True)
        }
    present = {name: value for name, value in parts.plain.named_parameters() if name in places}
    weights = {name: torch.zeros_like(value) for name, value in present.items()} if left is None else left[1]
    vectors["weights"] = {name: places[name].wrapped(_copied(value.detach())) for name, value in weights.items()}
    file = io.BytesIO()
    torch.save({**rest, "settings": None if left is None else left[0]}, file)
    return {"kind": own["kind"], "rest": file.getvalue(), "vectors": vectors}


def taken_up(
    saved: Mapping[str, Any], kinds: Kinds, here: Mapping[str, Tensor], parts: HeldParts | None
) -> tuple[dict[str, Any], _Left | None]:
    """The inverse, and what the last step left; vectors that are not parts of this process are not taken."""
    if parts is None:
        raise ValueError("this is the state of sharded weights: load it for such, on any number of processes")
    places = parts.outline.places
    rest = torch.load(io.BytesIO(saved["rest"]))
    settings, vectors = rest.pop("settings"), saved["vectors"]
    fits = all(
        one.keys() <= places.keys() and all(places[name].is_here(value) for name, value in one.items())
        for one in vectors.values()
    )
    rest["part"] = parts.part if fits else None
    for path, (_, lead) in kinds.items() if fits else ():
        if _replaced(rest, path, None)[0]:
            held = vectors[_name(path)]
            pieces = [held[name].to_local().reshape(n.numel(), *lead).movedim(0, -1) for name, n in here.items()]
            rest = _replaced(rest, path, torch.cat(pieces, dim=-1))[1]
    weights = {name: value.to_local() for name, value in vectors["weights"].items()}
    return rest, (settings, weights) if fits and settings is not None else None


def training_laid_out(own: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state of a training in mini-batches, to be saved; that of its optimizer is by the names of parameters.

    An optimizer that took no step is given zeros for this, and loses them again.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    for module in sharded_modules(model):
        module.reshard()  # after a forward pass some keep whole weights, which no optimizer has
    began = bool(optimizer.state)
    states = get_optimizer_state_dict(model, optimizer)
    if not began:
        optimizer.state.clear()
    file = io.BytesIO()
    torch.save(own, file)
    return {"rest": file.getvalue(), "optimizer": states}


def training_taken_up(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, but for the optimizer."""
    if "rest" not in saved:
        raise ValueError("this is the state of whole weights, or of an earlier version: begin anew")
    rest: dict[str, Any] = torch.load(io.BytesIO(saved["rest"]))
    return rest


def _copied(value: Tensor) -> Tensor:
    """In memory of its own, from its beginning: others cannot be pickled in a DTensor."""
    return value.clone(memory_format=torch.contiguous_format)


def _name(path: tuple[Any, ...]) -> str:
    return "".join(map(str, path))


def _replaced(tree: Any, path: tuple[Any, ...], value: Any) -> tuple[Any, Any]:
    """What stands at a path, ``None`` if nothing does; and a copy of the tree with something else there if so."""
    if not path:
        return tree, tree if tree is None else value
    if tree is None:
        return None, None
    other = copy(tree)
    found, other[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return found, other
