"""The names of :mod:`surefoot.program.checks`, until all callers have them from there."""

from surefoot.program.checks import (
    as_inputs,
    as_targets,
    check_inputs,
    check_model,
    differentiable_attention,
    is_loader,
    plainly,
    recordable,
    selected,
    unwrapped,
    with_gradients,
)  # fmt: skip

__all__ = [
    "as_inputs", "as_targets", "check_inputs", "check_model", "differentiable_attention", "is_loader", "plainly",
    "recordable", "selected", "unwrapped", "with_gradients",
]  # fmt: skip
