"""Models that differentiate inside ``forward``: traced through the derivatives, to one level of operations.

``torch.export`` does not look into ``torch.autograd.grad`` and the transforms of ``torch.func`` (``grad``,
``jvp``, ``jacrev``, ``hessian``, ``vmap``). ``make_fx`` does: run under it, a forward pass becomes a flat list of
operations in which the derivatives are written out. That list is then exported in the place of the model.

Where autograd keeps tensors for later it detaches them and ties them up again, which such a list does not show: it
is no witness of tensors that the user detaches. Derivatives of the list are compared with those of the model
instead (:func:`surefoot.graph.refusals.refuse_other_derivative`).

Boolean masks as indices while a model is traced: which entries a fixed mask picks is known, and how many.

A mask that is a buffer is the same for all data. One that is computed stays, and is refused because the shape of
what it picks depends on the data.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from surefoot.torch_private import HigherOrderOperator, OpOverload, normalisations_written_out, seeks_shortcut

_aten: Any = torch.ops.aten
_TRANSFORMS = {
    "_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "_make_dual", "_unpack_dual",
    "_wrap_for_grad",
}  # fmt: skip


class Flat(nn.Module):
    """A model by the operations that its forward pass consists of, with the same parameters and buffers.

    It is made from a module that holds the model as ``model`` and returns a tuple of tensors, and an example.
    """

    def __init__(self, selected: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        super().__init__()
        model = selected.get_submodule("model")
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        names, keys, count = list(tensors), list(kwargs), len(args)

        def run(*given: Tensor) -> Any:
            owned = {f"model.{name}": value for name, value in zip(names, given, strict=False)}
            inputs = given[len(names) :]
            return functional_call(selected, owned, inputs[:count], dict(zip(keys, inputs[count:], strict=True)))

        given = [value.detach().clone().requires_grad_(value.requires_grad) for value in tensors.values()]
        inputs = [value.detach().clone() for value in (*args, *kwargs.values())]
        flat = make_fx(run, decomposition_table=_derivatives())(*given, *inputs)
        for node in flat.graph.find_nodes(op="call_function", target=_aten._efficientzerotensor.default):
            node.target = _aten.zeros.default  # the same numbers, without the promise that they stay zero
        flat.graph.eliminate_dead_code()
        flat.recompile()
        self.model, self._names = model, names
        self._flat = (flat,)  # not a module of this one: it owns nothing

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the operations."""
        tensors = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        return self._flat[0](*(tensors[name] for name in self._names), *args, *kwargs.values())


def _derivatives() -> dict[Any, Any]:
    """What derivatives are made of: ``tanh_backward`` is a product, and so on.

    Formulas of derivatives read what a normalisation returns beside its result, mean and deviation. Written out,
    they are functions of its argument like all else.
    """
    table = torch.export.default_decompositions()
    return normalisations_written_out() | {
        target: formula
        for target, formula in table.items()
        if "backward" in str(target) or target in (_aten.detach.default, _aten.new_empty_strided.default)
    }


def has_transforms(program: ExportedProgram) -> bool:
    """Whether a program contains what ``torch.func`` does instead of operations."""
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    others = [target for target in targets if not isinstance(target, OpOverload | HigherOrderOperator)]
    return any(getattr(target, "__name__", "") in _TRANSFORMS for target in others)


Places = list[list[int]]
_MOST = 2**16  # entries of a mask that is looked at


def _masks(model: nn.Module) -> dict[str, Tensor]:
    """The boolean buffers of a model whose values are known and not too many, by name."""
    buffers = {name: value for name, value in model.named_buffers() if value.dtype == torch.bool and value.dim()}
    return {n: mask for n, mask in buffers.items() if mask.device.type != "meta" and mask.numel() <= _MOST}


def masks_of(model: nn.Module) -> Hashable:
    """Something to compare masks by: a graph holds for these only."""
    return tuple((name, mask.cpu().contiguous().numpy().tobytes()) for name, mask in _masks(model).items())


def places_of(model: nn.Module) -> dict[str, Places]:
    """Where they are true: for each dimension, the index of every such entry."""
    return {
        name: [where.tolist() for where in mask.nonzero(as_tuple=True)] for name, mask in _masks(model).items()
    }


class MasksAsIndices(TorchFunctionMode):
    """Indexing by the places of a mask instead of the mask, and transformers that apply the mask they are given.

    Those of ``torch.nn`` compare it with the causal one, and if it is that they call a kernel that needs none.
    Which of both runs depends on its values, what they compute does not: the answer is no.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, Places]) -> None:
        super().__init__()
        self._places = {id(traced): places[name] for name, traced in model.named_buffers() if name in places}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__bool__ and seeks_shortcut(sys._getframe(1)):
            return False
        if function is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(id(part) in self._places for part in index):
                return args[0][tuple(item for part in index for item in self._indices(part))]
        picks = function in (torch.masked_select, torch.Tensor.masked_select) and len(args) == 2
        if picks and id(args[1]) in self._places and args[0].shape == args[1].shape:
            return args[0][self._indices(args[1])]
        return function(*args, **(kwargs or {}))

    def _indices(self, part: Any) -> tuple[Any, ...]:
        if id(part) not in self._places:
            return (part,)
        return tuple(torch.tensor(where, device=part.device) for where in self._places[id(part)])
