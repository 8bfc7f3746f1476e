"""Forward passes that are not functions of their input and the weights: they remember, or they draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Leaf, Source
from surefoot.graph.preserve import Change
from surefoot.graph.refusals import NOT_RANDOM
from surefoot.graph.structure import Graph
from surefoot.graph.translate import PURE
from surefoot.torch_private import pre_hooks_of


def refuse_stored(changes: Sequence[Change], model: nn.Module) -> None:
    """Refuse a forward pass that stores a tensor on a module: the next one may read it.

    Raises:
        CaptureError: naming the module and the attribute.
    """
    for change in changes:
        path, attribute = _split(change.label, model)
        hooked = _computed_by_hook(model.get_submodule(path), attribute)
        if change.of_model and change.holds_tensor and not hooked:
            remedy = "Make forward a pure function: return the tensor, or keep it out of the module."
            what = f"the forward pass stores a tensor on self, as '{attribute}'"
            raise CaptureError(what, where=path, remedy=remedy)


def refuse_effects(written: Sequence[str], drawn: Sequence[str]) -> None:
    """Refuse a forward pass that acts outside of the graph.

    Args:
        written: tensors beside the parameters and buffers that it writes into.
        drawn: generators that it draws random numbers from.

    Raises:
        CaptureError: naming them.
    """
    if written:
        raise CaptureError(f"the forward pass writes into the tensor '{written[0]}'", where="", remedy=PURE)
    if drawn:
        what = f"the forward pass draws random numbers (from {' and '.join(drawn)})"
        raise CaptureError(what, where="", remedy=NOT_RANDOM)


def refuse_other(graph: Graph, again: Graph, changes: Sequence[Change], model: nn.Module) -> None:
    """Refuse a forward pass that changes something and computes another function the next time.

    Raises:
        CaptureError: naming what it changes.
    """
    if not same_function(graph, again):
        path, attribute = _split(changes[0].label, model)
        what = f"the forward pass changes '{attribute}', and the next one computes something else"
        remedy = "Make forward a pure function: pass what changes from call to call as an input."
        raise CaptureError(what, where=path, remedy=remedy)


def same_function(a: Graph, b: Graph) -> bool:
    """Whether two graphs are the same up to the names of their tensors."""
    if [len(a.leaves), len(a.nodes), len(a.outputs)] != [len(b.leaves), len(b.nodes), len(b.outputs)]:
        return False
    names: dict[str, str] = {}
    for leaf, other in zip(a.leaves.values(), b.leaves.values(), strict=True):
        names[other.name] = leaf.name
        if not _same_leaf(a, leaf, b, other):
            return False
    for node, twin in zip(a.nodes, b.nodes, strict=True):
        names[twin.name] = node.name
        twin = twin.renamed(names)
        if (node.target, node.args, node.kwargs, node.spec) != (twin.target, twin.args, twin.kwargs, twin.spec):
            return False
    return a.outputs == tuple(names[name] for name in b.outputs)


def _split(label: str, model: nn.Module) -> tuple[str, str]:
    """The path of the module that something was found in, and what it is called there."""
    modules, parts = dict(model.named_modules()), label.split(".")
    depth = max(k for k in range(len(parts) + 1) if ".".join(parts[:k]) in modules)
    return ".".join(parts[:depth]), ".".join(parts[depth:])


def _same_leaf(a: Graph, leaf: Leaf, b: Graph, other: Leaf) -> bool:
    if (leaf.source, leaf.spec) != (other.source, other.spec):
        return False
    if leaf.source is not Source.CONSTANT:
        return leaf.path == other.path
    first, second = a.held[leaf.name], b.held[other.name]
    return first is second or (first.device.type != "meta" and torch.equal(first, second))


def _computed_by_hook(module: nn.Module, attribute: str) -> bool:
    """Whether a hook of PyTorch sets the attribute before each call, from the parameters."""
    return any(
        isinstance(hook, WeightNorm | SpectralNorm) and hook.name == attribute for hook in pre_hooks_of(module)
    )
