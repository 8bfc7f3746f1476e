"""Models that differentiate inside ``forward``: traced through the derivatives, to one level of operations.

``torch.export`` does not look into ``torch.autograd.grad`` and the transforms of ``torch.func`` (``grad``,
``jvp``, ``jacrev``, ``hessian``, ``vmap``). ``make_fx`` does: run under it, a forward pass becomes a flat list of
operations in which the derivatives are written out. That list is then exported in the place of the model.

Where autograd keeps tensors for later it detaches them and ties them up again, which such a list does not show: it
is no witness of tensors that the user detaches. Derivatives of the list are compared with those of the model
instead (:func:`surefoot.graph.refusals.refuse_other_derivative`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from surefoot.torch_private import HigherOrderOperator, OpOverload

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
    """What derivatives are made of: ``tanh_backward`` is a product, and so on."""
    table = torch.export.default_decompositions()
    return {
        target: formula
        for target, formula in table.items()
        if "backward" in str(target) or target in (_aten.detach.default, _aten.new_empty_strided.default)
    }


def has_transforms(program: ExportedProgram) -> bool:
    """Whether a program contains what ``torch.func`` does instead of operations."""
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    others = [target for target in targets if not isinstance(target, OpOverload | HigherOrderOperator)]
    return any(getattr(target, "__name__", "") in _TRANSFORMS for target in others)
