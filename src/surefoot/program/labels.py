r"""Which samples of a batch each entry of a program depends on: labels, carried through the same primitives.

An entry has the first and the last sample that it may depend on. Both are numbers that are joined by taking the
larger one, with 0 for an entry that depends on none: the last sample plus one, and the number of samples minus the
first. Then what moves entries moves labels (zeros that are padded depend on nothing), a sum is a maximum, and a
product :math:`c_{ij} = \sum_k a_{ik}b_{kj}` has :math:`\max(\max_k a_{ik}, \max_k b_{kj})`, as a maximum of maxima
is one. Multiplying by a fixed zero cuts dependence off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.program.ir import Node, Program

_MOVES = {
    "reshape", "permute", "flip", "slice", "embed", "pad", "expand", "gather", "rows", "cat", "unfold"
}  # fmt: skip
_ALONG = {
    "softmax": "dim", "softmax_back": "dim", "logsumexp": "dim", "sort": "dim", "sort_like": "dim",
    "unsort_like": "dim", "normalize": "dims", "rstd": "dims", "normalize_back": "dims", "amax": "dims",
    "select_like": "dims", "pick_like": "dims", "sum": "dims",
}  # fmt: skip
"""Primitives that join all entries along dimensions, by the option that names these."""


def samples(program: Program, dims: Mapping[str, int]) -> list[tuple[Tensor, Tensor]]:
    """The first and the last sample that each entry of each node may depend on.

    Args:
        program: what to look at.
        dims: for each input that holds samples, the dimension along which it does.

    Returns:
        Two integer tensors per node, of its shape: the first sample and the last one. Where the first is larger,
        the entry depends on no sample; where both are equal, on that one alone.
    """
    count = max((program.nodes[program.inputs[name]].shape[dim] for name, dim in dims.items()), default=0)
    sources = {program.inputs[name]: dim for name, dim in dims.items()}
    last: list[Tensor] = []
    first: list[Tensor] = []
    for node in program.nodes:
        for labels, own in ((last, torch.arange(1, count + 1)), (first, torch.arange(count, 0, -1))):
            if node.index in sources:
                wide = [-1 if k == sources[node.index] else 1 for k in range(len(node.shape))]
                labels.append(own[: node.shape[sources[node.index]]].reshape(wide).double().expand(node.shape))
            elif not any(k < len(labels) and bool(labels[k].any()) for k in node.inputs):
                labels.append(torch.zeros((), dtype=torch.float64).expand(node.shape))
            else:
                labels.append(_joined(program, node, [labels[k] for k in node.inputs]).expand(node.shape))
    return [(count - b.long(), a.long() - 1) for a, b in zip(last, first, strict=True)]


def interacting(program: Program, dims: Mapping[str, int]) -> str | None:
    """In what the samples of a batch meet, before the outputs of a program; None if they stay apart.

    Args:
        program: that of a model, without an objective, which would bring the samples together.
        dims: for each input that holds samples, the dimension along which it does.
    """
    labels = samples(program, dims)
    mixed = [bool((first < last).any()) for first, last in labels]
    if not any(mixed[k] for k in program.outputs):
        return None
    node = program.nodes[mixed.index(True)]
    return f"'{node.primitive.name}' in {f'module {node.path!r}' if node.path else 'the model itself'}"


def _joined(program: Program, node: Node, labels: Sequence[Tensor]) -> Tensor:
    """The labels of a node, which may still have size 1 in a dimension, from those of its inputs."""
    name, options = node.primitive.name, node.options
    constant = program.constants.get(node.inputs[-1])
    if name in _MOVES:
        operands = [*labels] if constant is None or name == "cat" else [labels[0], constant.cpu()]
        return node.primitive.run(operands, **options)
    if name in ("scatter", "rows_back", "fold"):
        return _collected(node, labels[0], constant)
    if name == "weigh":
        return labels[0] if constant is None or constant.is_meta else labels[0] * (constant.cpu() != 0)
    if name == "cumsum":
        return labels[0].cummax(options["dim"]).values
    if name in _ALONG:
        joined = _largest(labels)
        dims = options[_ALONG[name]]
        joined = joined.amax(dims, keepdim=True) if dims != () else joined
        small = name in ("sum", "amax", "logsumexp") and not options["keepdim"]
        return joined.reshape(node.shape) if small else joined
    if name == "matmul":
        return torch.maximum(labels[0].amax(-1, keepdim=True), labels[1].amax(-2, keepdim=True))
    if name == "solve":
        whole = labels[0].amax((-1, -2), keepdim=True), labels[1].amax(-2, keepdim=True)
        return torch.maximum(*whole)
    if name == "conv":
        return _windows(node, *labels)
    if name == "conv_input":  # all of a sample, and all kernels
        return torch.maximum(
            labels[0].flatten(1).amax(1).reshape(-1, *[1] * (len(node.shape) - 1)), labels[1].amax()
        )
    if name == "conv_weight":
        return torch.maximum(labels[0].amax(), labels[1].amax()).reshape([1] * len(node.shape))
    return _largest(labels)


def _largest(labels: Sequence[Tensor]) -> Tensor:
    whole = labels[0]
    for other in labels[1:]:
        whole = torch.maximum(whole, other)
    return whole


def _collected(node: Node, labels: Tensor, index: Tensor | None) -> Tensor:
    """What is added up at places: the largest label of each."""
    places: Any
    if node.primitive.name == "scatter":
        assert index is not None
        places = index
    elif node.primitive.name == "rows_back":
        assert index is not None
        wide = torch.arange(node.shape.numel()).reshape(node.shape)
        places = wide.index_select(node.options["dim"], index.cpu())
    else:
        options = {key: value for key, value in node.options.items() if key != "size"}
        wide = torch.arange(1, node.shape.numel() + 1, dtype=torch.float64).reshape(node.shape)
        places = torch.nn.functional.unfold(
            wide, options["kernel"], options["dilation"], options["padding"], options["stride"]
        ).long()
        flat = labels.new_zeros(node.shape.numel() + 1)  # place 0 is padding
        return flat.scatter_reduce(0, places.reshape(-1), labels.reshape(-1), "amax")[1:].reshape(node.shape)
    flat = labels.new_zeros(node.shape.numel())
    return flat.scatter_reduce(0, places.cpu().reshape(-1), labels.reshape(-1), "amax").reshape(node.shape)


def _windows(node: Node, x: Tensor, w: Tensor) -> Tensor:
    """Of a convolution: the largest label within a window, in all channels, and that of the kernels."""
    options, count = node.options, w.dim() - 2
    x = x.amax(1, keepdim=True)
    for k in range(count):  # one dimension after the other
        step, pad, wide = (options[key][k] for key in ("stride", "padding", "dilation"))
        kernel = w.shape[2 + k]
        x = torch.nn.functional.pad(x.movedim(2 + k, -1), (pad, pad))
        starts = torch.arange(node.shape[2 + k]) * step
        x = torch.stack([x[..., starts + j * wide] for j in range(kernel)]).amax(0).movedim(-1, 2 + k)
    kernels = w.flatten(1).amax(1).reshape(1, -1, *[1] * count)
    return torch.maximum(x, kernels)
