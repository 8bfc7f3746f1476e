"""Reverse mode over primitives: from a program of a value to one of the value and its gradient.

What is trusted is visible: each primitive has its transpose, and what a model says about its own derivatives (a
custom ``backward``) is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from surefoot.program.builder import Builder
from surefoot.program.ir import Program


def differentiate(program: Program, wrt: Iterable[str] | None = None, *, complete: bool = False) -> Program:
    """The program of the value, the first output, and its gradient.

    Args:
        program: its first output is one number.
        wrt: the inputs in which the gradient is taken, by default the parameters.
        complete: whether all tensors that are computed get a costate, also those that depend on none of these
            inputs; their round-off moves the value too.

    Returns:
        A program with the outputs (value, gradient in the first input, …) and with costates. The gradient in an
        input that the value does not depend on is zero.

    Raises:
        ValueError: if the first output is not one number.
    """
    names = program.parameters if wrt is None else tuple(wrt)
    value = program.outputs[0]
    if program.nodes[value].shape.numel() != 1:
        raise ValueError(
            f"the gradient is that of one number, got a tensor of shape {tuple(program.nodes[value].shape)}"
        )
    builder = Builder(program)
    needed = program.depends(names)
    if complete:
        fixed = ("input", "constant")
        needed = [n or node.primitive.kind not in fixed for n, node in zip(needed, program.nodes, strict=True)]
    # integers have no costates
    needed = [
        n and (k not in program.constants or program.constants[k].is_floating_point())
        for k, n in enumerate(needed)
    ]
    moving = [*needed]
    for node in program.nodes:  # a costate passes through all that reads a tensor which needs one
        moving[node.index] = needed[node.index] or any(moving[k] for k in node.inputs)
    parts: dict[int, list[int]] = {value: [builder.constant(torch.ones(program.nodes[value].shape))]}
    costates: dict[int, int] = {}
    for node in reversed(program.nodes):
        if node.index not in parts or not moving[node.index]:
            continue
        terms = parts.pop(node.index)
        builder.path, builder.dtype = node.path, node.dtype
        costates[node.index] = terms[0] if len(terms) == 1 else builder.emit("add", *terms)
        if not any(moving[k] for k in node.inputs):
            continue
        back = node.primitive.transpose(builder, node, costates[node.index])
        for k, costate in zip(node.inputs, back, strict=True):
            if costate is not None and moving[k]:
                parts.setdefault(k, []).append(costate)
    gradients = []
    for name in names:
        k = program.inputs[name]
        zero = torch.zeros(program.nodes[k].shape, dtype=torch.float64, device=builder.device)
        gradients.append(costates[k] if k in costates else builder.constant(zero))
    return builder.finish([value, *gradients], costates)
