"""What PyTorch keeps private and surefoot needs: every use of it is here, with the reason.

A new release of PyTorch may move any of these names; then this is the one file to mend.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import profiler as _profiler
from torch.distributions import Distribution
from torch.nn import functional
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _NormBase as BatchNormalisation
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.optim import optimizer as _optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# OpOverload, OpOverloadPacket, HigherOrderOperator: the types of what ``torch.ops`` holds; it names none of them.
# FakeTensor, FakeTensorMode: tensors with a shape and a device and no entries, which tracing leaves behind; the
#   public ``meta`` device would lose the true one.
# BatchNormalisation, Dropout: the common base of all batch and instance normalisations, and that of all dropouts;
#   listing the public classes would miss the ones to come.

_Module = TypeVar("_Module", bound=nn.Module)
_Step = TypeVar("_Step", bound=Callable[..., Any])
_STEP_HOOKS = _optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks
_GLOBAL_HOOKS = tuple(key for key in vars(_module) if key.startswith("_global_"))

TABLES = ("_modules", "_parameters", "_buffers")
"""Attributes in which a module keeps what it owns; a walk over plain attributes meets them under these names."""

STANDARD_TABLES = frozenset(key for key, item in vars(nn.Module()).items() if isinstance(item, dict | set))
"""Names of all containers that every module has, those of its hooks among them."""


def norms_together(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norms of many small tensors in one call, Euclidean ones by default; in public there is one for each."""
    return list(torch._foreach_norm(list(tensors), order, dtype)) if tensors else []


def products_together(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """The products of the entries of many small tensors in one call, likewise."""
    return list(torch._foreach_mul(list(first), list(second))) if first else []


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A new vector of all entries of tensors of one type, in order, in one call, likewise."""
    with torch.no_grad():
        flat: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
        return flat.clone() if len(tensors) == 1 else flat  # which would be the tensor itself


def parts_of(vector: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of a vector that is laid out like these tensors, as views of their shapes, likewise."""
    parts: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(vector, list(tensors))
    return parts


def differences_together(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """The differences of many small tensors in one call, likewise."""
    return list(torch._foreach_sub(list(first), list(second))) if first else []


def copied_together(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write values into many small tensors in one call, likewise."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))


def hooked(step: _Step) -> _Step:
    """The step of an optimizer as torch wraps it, with its hooks and its name in profiles, where there are any.

    Torch wraps every step that is not marked like this one, and names it even if no profiler runs, which takes a
    tenth of a millisecond where other code was in the caches before.
    """
    wrapped: Any = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *_STEP_HOOKS)
        return (wrapped if any(hooks) or _profiler._is_profiler_enabled else step)(self, *args, **options)

    marked: Any = called
    marked.hooked = True
    return marked


def _lengths(v: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(v, dim=[k for k in range(v.dim()) if dim == -1 or k != dim], keepdim=True)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / _lengths(v, dim))


def _distances(x: Tensor, p: float = 2.0) -> Tensor:
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return torch.linalg.vector_norm(x[first] - x[second], p, dim=-1)


def scattered(
    self: Tensor, dim: int, index: Tensor, src: Any = None, *, reduce: str | None = None, value: Any = None
) -> Tensor:
    """Numbers written, added or multiplied to places along a dimension."""
    given = value if src is None else src
    if reduce is None:
        return self.scatter(dim, index, given)
    given = given if isinstance(given, Tensor) else torch.full_like(index, given, dtype=self.dtype)
    return self.scatter_reduce(dim, index, given, {"add": "sum", "multiply": "prod"}[reduce])


def bags(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Sums, means or maxima of rows of the weight; rows of padding go to bags of their own that are left out."""
    starts = offsets[:-1] if include_last_offset else offsets
    begins = torch.zeros(len(indices) + 1, dtype=torch.long, device=indices.device)
    bag = begins.index_add(0, starts, torch.ones_like(starts, dtype=torch.long))[:-1].cumsum(0) - 1
    if padding_idx is not None:
        beyond = torch.arange(len(starts), len(starts) + len(indices), device=indices.device)
        bag = bag.where(indices != padding_idx % len(weight), beyond)
    rows, empty = weight[indices], weight.new_zeros(len(starts) + len(indices), weight.shape[1])
    if mode == 2:
        sums = empty.scatter_reduce(0, bag.unsqueeze(1).expand_as(rows), rows, "amax", include_self=False)
    else:
        sums = empty.index_add(0, bag, rows if per_sample_weights is None else rows * per_sample_weights[:, None])
    if mode == 1:
        sums = sums / torch.zeros_like(sums).index_add(0, bag, torch.ones_like(rows)).clamp(min=1)
    return sums[: len(starts)], bag, offsets, offsets


def hard_sigmoid(self: Tensor) -> Tensor:
    """A ramp from 0 to 1; the derivative of the kernel holds 1/6 in single precision."""
    return functional.relu6(self + 3) / 6


def _slice_scattered(
    self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A tensor written over a part of another along a dimension; complex ones as pairs of real numbers."""
    if not self.is_complex():
        return torch.slice_scatter(self, src, dim, start, end, step)
    whole, part = (torch.view_as_real(tensor.resolve_conj()) for tensor in (self, src))
    return torch.view_as_complex(torch.slice_scatter(whole, part, dim % self.dim(), start, end, step).contiguous())


FORMULAS: dict[str, Callable[..., Any]] = {
    "aten._weight_norm": _weight_norm, "aten.embedding_bag": bags, "aten.hardsigmoid": hard_sigmoid,
    "aten.pdist": _distances, "aten.scatter": scattered, "aten.slice_scatter": _slice_scattered,
}  # fmt: skip
"""Operations whose kernel lacks a second derivative, or has a wrong one (as of PyTorch 2.13): they are run by a
formula.
"""


def normalisations_written_out() -> dict[Any, Any]:
    """Operations that return a normalised tensor with what it was divided by, in simpler ones.

    ``torch.export.default_decompositions`` leaves them as they are.
    """
    aten: Any = torch.ops.aten

    def group_norm(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, _: int, groups: int, eps: float
    ) -> tuple[Tensor, ...]:  # torch's own formula asks for strides
        rows = x.reshape(n, groups, -1)
        variance, mean = torch.var_mean(rows, dim=-1, correction=0, keepdim=True)
        scale = (variance + eps).rsqrt()
        result, shape = ((rows - mean) * scale).reshape(x.shape), (c, *(1,) * (x.dim() - 2))
        result = result if weight is None else result * weight.reshape(shape)
        result = result if bias is None else result + bias.reshape(shape)
        return result, mean.reshape(n, groups), scale.reshape(n, groups)

    def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
        return _weight_norm(v, g, dim), _lengths(v, dim)

    batch_norm = aten._native_batch_norm_legit
    targets = (
        aten.native_layer_norm.default,
        aten.native_batch_norm.default,
        batch_norm.default,
        batch_norm.no_stats,
    )
    own = {aten.native_group_norm.default: group_norm, aten._weight_norm_interface.default: weight_norm}
    return {**get_decompositions(targets), **own}


def schema_of(target: Any) -> Any:
    """The signature of an operation of ``torch.ops`` (names, defaults, what it writes to), ``None`` for others.

    ``inspect.signature`` knows nothing of these operations.
    """
    return getattr(target, "_schema", None)


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations in terms of simpler ones, those of torch and of layers that it decomposes nowhere in public."""
    aten: Any = torch.ops.aten
    more = (
        aten._scaled_dot_product_flash_attention_for_cpu, aten.nll_loss_forward, aten.nll_loss2d_forward,
        aten.stack, aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
        aten.binary_cross_entropy, aten.native_dropout, aten.logaddexp, aten.soft_margin_loss, aten.dist,
        aten.nll_loss_backward, aten.binary_cross_entropy_backward, aten.mse_loss_backward, aten.logaddexp2,
        aten.trace, aten.glu, aten.native_layer_norm_backward, aten.native_group_norm_backward,
        aten.native_batch_norm_backward, aten.select_backward, aten.slice_backward, aten.diagonal_backward,
        aten.embedding_bag, aten.multi_margin_loss, aten.log_sigmoid_backward, aten.huber_loss_backward,
        aten.smooth_l1_loss_backward, aten.softplus_backward,
    )  # fmt: skip
    own: dict[Any, Any] = {
        aten._weight_norm_interface.default: lambda v, g, dim=0: (_weight_norm(v, g, dim), _lengths(v, dim))
    }
    own[aten._embedding_bag.default] = bags
    return {
        **torch.export.default_decompositions(),
        **core_aten_decompositions(),
        **get_decompositions(more),
        **own,
    }


def out_of_place(target: Any) -> Any:
    """The operation that returns what another one writes into its first argument; None if there is none."""
    packet = getattr(torch.ops.aten, target.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None)


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work, whose tensors say nothing of the gradient."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def python_dispatcher() -> AbstractContextManager[Any]:
    """Run composite operations by the formulas in Python, which know no fused kernels."""
    return enable_python_dispatcher()


@contextmanager
def without_onednn() -> Iterator[None]:
    """No kernels of oneDNN, which has operations of its own for recurrent layers."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def writes_of(value: Tensor) -> int:
    """How often a tensor was written to: what autograd compares before it uses a saved tensor."""
    return value._version


def set_writes_of(value: Tensor, count: int) -> None:
    """Put the counter of writes back: a pending backward pass may go on if the entries are what they were."""
    torch._C._autograd._unsafe_set_version_counter((value,), (count,))


def is_view(value: Tensor) -> bool:
    """Whether it shares its numbers with the tensor it was made from."""
    return value._is_view()


def storage_of(value: Tensor) -> int:
    """A number that two tensors share if and only if they share their storage.

    ``data_ptr`` is 0 for every tensor without entries (meta, fake), so it would call all of those one.
    """
    return int(value.untyped_storage()._cdata)


def pre_hooks_of(module: nn.Module) -> Collection[Any]:
    """The hooks that run before a module's forward; hooks can be added and removed in public, not looked at."""
    return module._forward_pre_hooks.values()


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's children; ``named_children`` leaves out the second name of a module."""
    return module._modules


def with_buffer(module: _Module, name: str, value: Tensor | None) -> _Module:
    """A shallow copy of a module with another value of one buffer; ``copy.copy`` alone shares the table."""
    copied = copy.copy(module)
    copied._buffers = {**module._buffers, name: value}
    return copied


def is_sharded(model: Any) -> bool:
    """Whether weights of a model are sharded over several processes, or would be if they were not just in use.

    Classes are known by their names: to import them takes long.
    """
    if not isinstance(model, nn.Module):
        return False
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    sharding = {"FSDPModule", "FullyShardedDataParallel"}
    return not sharding.isdisjoint(kinds) or any(hasattr(value, "device_mesh") for value in model.parameters())


def global_hooks() -> dict[str, Any]:
    """The tables of hooks that are called on all modules, by name; they cannot be read in public."""
    return {key: getattr(_module, key) for key in _GLOBAL_HOOKS}


def global_forward_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """The tables of hooks called before and after the forward of all modules."""
    return _module._global_forward_pre_hooks, _module._global_forward_hooks


def seeks_shortcut(frame: FrameType) -> bool:
    """Whether this is where transformers of ``torch.nn`` compare a mask with the causal one, for its kernel."""
    return frame.f_code is _detect_is_causal_mask.__code__


def constants_allowed() -> AbstractContextManager[None]:
    """Let ``torch.export`` take tensors that are neither parameters nor buffers; only its configuration can."""
    return torch._export.config.patch(error_on_lifted_constant_tensors=False)


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Let distributions of ``torch.distributions`` take numbers without looking at them, which tracing cannot do;
    only setting this is public.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


__all__ = [
    "STANDARD_TABLES", "TABLES", "BatchNormalisation", "Dropout", "FakeTensor", "FakeTensorMode",
    "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "bags", "children_of",
    "constants_allowed", "decompositions", "distributions_unchecked", "global_forward_hooks", "global_hooks",
    "hard_sigmoid", "in_transform", "is_sharded", "is_view", "out_of_place", "pre_hooks_of",
    "python_dispatcher", "scattered", "schema_of", "seeks_shortcut", "set_writes_of", "storage_of",
    "tree_leaves", "tree_map", "with_buffer", "writes_of",
]  # fmt: skip
