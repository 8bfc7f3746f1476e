"""Which sample every entry of a tensor belongs to, where samples do not interact."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.calculus.forward import Pass
from surefoot.operations.evaluation import run_in_double
from surefoot.operations.record import Form, record_of


def sample_labels(result: Pass, count: int) -> dict[str, Tensor]:
    """The sample that each entry of a tensor belongs to, for tensors of which the entries of a sample depend on
    the variables and on the entries of the same sample only.

    Layout operations move the labels as they move numbers. Element by element nothing changes. A linear layer
    mixes the last dimension, other operations whatever is in a row: these must have one label each. What reads
    variables only may be labelled at will.
    """
    labels: dict[str, Tensor] = {}
    variables = set(result.region.variables)
    for step in result.steps:
        node, shape = step.node, step.node.specs[0].shape
        read = {slot: name for slot, name in step.names.items() if name not in variables}
        value = result.enclosures[node.name].value
        if any(name not in labels for name in read.values()):
            continue
        form = record_of(node).form_of(node)
        if not isinstance(value, Tensor):
            if form is Form.LAYOUT and len(read) == len(step.names):
                reads = {n: result.enclosures[n].value for n in node.inputs} | {
                    n: labels[n] for n in read.values()
                }
                labels[node.name] = run_in_double(node, reads)
            continue
        line = torch.arange(count, dtype=torch.float64, device=value.device)
        if not read:
            if shape[:1] == (count,):
                labels[node.name] = line.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
        elif form is Form.LAYOUT and len(read) == len(step.names):
            reads = {n: result.enclosures[n].value for n in node.inputs} | {n: labels[n] for n in read.values()}
            labels[node.name] = run_in_double(node, reads)
        elif form is Form.ELEMENTWISE and len(read) == 1:
            labels[node.name] = labels[next(iter(read.values()))]
        else:
            kept = 1 if node.op != "aten.linear" else len(shape) - 1
            if node.op != "aten.linear" and not read.keys() <= step.row_slots:
                continue
            lines = [labels[name].flatten(kept) for name in read.values()]
            if any(part.shape[:kept] != shape[:kept] or not part.shape[kept] for part in lines) or not shape:
                continue
            first = lines[0][..., 0]
            if all(bool((part == first[..., None]).all()) for part in lines):
                labels[node.name] = first.reshape(*first.shape, *[1] * (len(shape) - kept)).expand(shape)
    return labels
