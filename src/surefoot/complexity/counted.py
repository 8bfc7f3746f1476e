"""PyTorch's own counts: multiplications by its counter, and bytes held by autograd.

Both come from one run of the automatic-differentiation oracle on tensors that have shapes but no numbers
(``FakeTensorMode``), so that a model of any size is counted quickly and without memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from surefoot.chain import Chain
from surefoot.chain.autodiff import Autodiff
from surefoot.torch_private import FakeTensorMode, storage_of


@dataclass(frozen=True)
class Counted:
    """Counts of one forward and one backward pass.

    Attributes:
        forward: multiplications of matrix products and convolutions in the forward pass.
        backward: the same in the backward pass with respect to the parameters.
        bytes: memory that autograd needs between the two passes: storages that are neither parameters nor inputs
            nor buffers, each once.
    """

    forward: int
    backward: int
    bytes: int


def counted(chain: Chain) -> Counted:
    """Count one call of the oracle ``chain.autodiff()`` and one pull-back."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = {path: _fake(mode, value) for path, value in chain.parameters.items()}
    inputs = [_fake(mode, value) for value in chain.inputs]
    graph = replace(chain.graph, held={name: _fake(mode, value) for name, value in chain.graph.held.items()})
    saved: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(value.detach())  # not the value: a result that refers to itself would never be freed
        return saved[-1]

    with mode:
        constants = [value for value in graph.constants.values() if isinstance(value, Tensor)]
        with _counter() as forward, saved_tensors_hooks(keep, lambda value: value):
            oracle = Autodiff(graph, inputs, parameters)
        values = oracle.value if isinstance(oracle.value, tuple) else (oracle.value,)
        with _counter() as backward:
            if parameters:
                oracle.pullback([torch.ones_like(value) for value in values])
    present = {storage_of(value) for value in (*parameters.values(), *inputs, *constants)}
    sizes = {storage_of(value): value.untyped_storage().nbytes() for value in saved}
    return Counted(
        forward=forward.get_total_flops() // 2,
        backward=backward.get_total_flops() // 2,
        bytes=sum(size for key, size in sizes.items() if key not in present),
    )


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, Tensor) else value


def _counter() -> FlopCounterMode:
    aten: Any = torch.ops.aten
    return FlopCounterMode(display=False, custom_mapping={aten.convolution_backward: _convolution_backward})


def _convolution_backward(
    gradient: Any, x: Any, weight: Any, *options: Any, out_shape: Any = None, **rest: Any
) -> int:
    """PyTorch's count, except that it ignores groups in the derivative along the weight.

    Either derivative uses each coefficient of the weight once for each patch, as the convolution does.
    """
    transposed, mask = options[4], options[7]
    once = int(conv_flop_count(x, weight, gradient, transposed=transposed))
    return once * (int(mask[0]) + int(mask[1]))
