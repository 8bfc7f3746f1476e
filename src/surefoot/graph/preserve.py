"""Leaving the user's model as it was found, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore the model's attributes, mode, gradient flags and the random state on leaving.

    What is restored is the shallow content of every module: its attributes, parameters, buffers, children
    and hooks, and the gradient flag and ``.grad`` of every parameter. Values of tensors are not copied:
    nothing that runs inside may write to them.
    """
    modules = list(model.modules())
    attributes = [_snapshot(module) for module in modules]
    gradients = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    cpu_state = torch.random.get_rng_state()
    gpu_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        yield
    finally:
        for module, snapshot in zip(modules, attributes, strict=True):
            _restore(module, snapshot)
        for parameter, requires_grad, grad in gradients:
            parameter.requires_grad_(requires_grad)
            parameter.grad = grad
        torch.random.set_rng_state(cpu_state)
        if gpu_states:
            torch.cuda.set_rng_state_all(gpu_states)
        torch.backends.mha.set_fastpath_enabled(fast_attention)


def _snapshot(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with its tables (parameters, buffers, children, hooks) copied one level deep."""
    return {key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()}


def _restore(module: nn.Module, snapshot: dict[str, Any]) -> None:
    """Put the attributes back; tables are refilled in place, as others may hold a reference to them."""
    current = vars(module)
    for key in set(current) - set(snapshot):
        del current[key]
    for key, saved in snapshot.items():
        table = current.get(key)
        if isinstance(saved, dict) and isinstance(table, dict):
            if table != saved or list(table) != list(saved):
                table.clear()
                table.update(saved)
        elif table is not saved:
            current[key] = saved
