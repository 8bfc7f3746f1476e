"""Forward passes that are not functions of their input and the weights: they remember, or they draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from surefoot.errors import CaptureError
from surefoot.graph.nodes import Leaf, Source, renamed
from surefoot.graph.preserve import Change
from surefoot.graph.structure import Graph
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
            raise CaptureError(
                f"the forward pass stores a tensor on self, as '{attribute}'",
                where=path,
                remedy="Make forward a pure function: return the tensor, or keep it out of the module.",
            )


def refuse_written(labels: Sequence[str]) -> None:
    """Refuse a forward pass that writes into tensors kept beside the parameters and buffers.

    Raises:
        CaptureError: naming the first of them.
    """
    if labels:
        raise CaptureError(
            f"the forward pass writes into the tensor '{labels[0]}'",
            where="",
            remedy="Make forward a pure function: return new tensors and keep no results on self.",
        )


def refuse_drawn(generators: Sequence[str]) -> None:
    """Refuse a forward pass that draws random numbers outside of the graph.

    Raises:
        CaptureError: naming the generators.
    """
    if generators:
        raise CaptureError(
            f"the forward pass draws random numbers (from {' and '.join(generators)})",
            where="",
            remedy="Call model.eval() if that stops it, or pass the random numbers as an input: a certificate "
            "covers one function.",
        )


def refuse_other(graph: Graph, again: Graph, changes: Sequence[Change], model: nn.Module) -> None:
    """Refuse a forward pass that changes something and computes another function the next time.

    Raises:
        CaptureError: naming what it changes.
    """
    if not same_function(graph, again):
        path, attribute = _split(changes[0].label, model)
        raise CaptureError(
            f"the forward pass changes '{attribute}', and the next one computes something else",
            where=path,
            remedy="Make forward a pure function: pass what changes from call to call as an input.",
        )


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
        args = tuple(renamed(argument, names) for argument in twin.args)
        kwargs = {key: renamed(argument, names) for key, argument in twin.kwargs.items()}
        if (node.target, node.args, node.kwargs, node.spec) != (twin.target, args, kwargs, twin.spec):
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
    return _equal(a.held[leaf.name], b.held[other.name])


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.device.type != "meta" and torch.equal(a, b))


def _computed_by_hook(module: nn.Module, attribute: str) -> bool:
    """Whether a hook of PyTorch sets the attribute before each call, from the parameters."""
    return any(
        isinstance(hook, WeightNorm | SpectralNorm) and hook.name == attribute for hook in pre_hooks_of(module)
    )
