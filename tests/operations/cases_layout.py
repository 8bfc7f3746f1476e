"""Operations that move numbers around."""

from __future__ import annotations

from collections.abc import Callable

import torch

from operations.case import Case, Fixed, operation, pieces
from operations.tensors import real, whole

aten = torch.ops.aten
Thunk = Callable[[], Case]


def _identity(self: torch.Tensor) -> torch.Tensor:
    """What detaching is as a function; its derivative is what autograd leaves out."""
    return self.clone()


CASES: dict[str, list[Thunk]] = {
    "aten.contiguous": [lambda: operation(aten.contiguous.default, real(3, 2).T)],
    "aten.clone": [
        lambda: operation(aten.clone.default, real(3, 2)),
        lambda: operation(aten.clone.default, real()),
    ],
    "aten.alias": [lambda: operation(aten.alias.default, real(3, 2))],
    "aten.detach": [lambda: operation(_identity, real(3, 2), op="aten.detach")],
    "aten.lift_fresh_copy": [lambda: operation(aten.lift_fresh_copy.default, real(3))],
    "aten.to": [
        lambda: operation(aten.to.dtype, real(3, 2), torch.float64),
        lambda: operation(aten.to.dtype, real(3, 2).float(), torch.float64),
    ],
    "aten._to_copy": [lambda: operation(aten._to_copy.default, real(3, 2).float(), dtype=torch.float64)],
    "aten.type_as": [lambda: operation(aten.type_as.default, real(3, 2), Fixed(real(1)))],
    "aten.dropout": [lambda: operation(aten.dropout.default, real(3, 2), 0.5, False)],
    "aten.feature_dropout": [lambda: operation(aten.feature_dropout.default, real(3, 2, 2), 0.5, False)],
    "aten.alpha_dropout": [lambda: operation(aten.alpha_dropout.default, real(3, 2), 0.5, False)],
    "aten.feature_alpha_dropout": [lambda: operation(aten.feature_alpha_dropout.default, real(3, 2), 0.5, False)],
    "aten.neg": [lambda: operation(aten.neg.default, real(3, 2))],
    "aten.reshape": [
        lambda: operation(aten.reshape.default, real(4, 3), [2, 6]),
        lambda: operation(aten.reshape.default, real(2, 6), [4, 3]),
        lambda: operation(aten.reshape.default, real(4, 3), [3, 4]),
        lambda: operation(aten.reshape.default, real(2, 3, 2).transpose(0, 2), [-1, 2]),
        lambda: operation(aten.reshape.default, real(1, 1), []),
        lambda: operation(aten.reshape.default, real(), [1, 1]),
        lambda: operation(aten.reshape.default, real(0, 3), [3, 0]),
    ],
    "aten.view": [lambda: operation(aten.view.default, real(4, 3), [6, 2])],
    "aten._unsafe_view": [lambda: operation(aten._unsafe_view.default, real(4, 3), [2, 6])],
    "aten.flatten": [
        lambda: operation(aten.flatten.using_ints, real(2, 3, 2), 1),
        lambda: operation(aten.flatten.using_ints, real(2, 3, 2), 0, 1),
        lambda: operation(aten.flatten.using_ints, real()),
    ],
    "aten.unflatten": [lambda: operation(aten.unflatten.int, real(4, 3), 0, [2, 2])],
    "aten.view_as": [lambda: operation(aten.view_as.default, real(4, 3), Fixed(real(2, 6)))],
    "aten.reshape_as": [lambda: operation(aten.reshape_as.default, real(4, 3), Fixed(real(2, 6)))],
    "aten.squeeze": [
        lambda: operation(aten.squeeze.default, real(1, 3, 1)),
        lambda: operation(aten.squeeze.dim, real(3, 1), -1),
        lambda: operation(aten.squeeze.dims, real(1, 3, 1), [0, 2]),
    ],
    "aten.unsqueeze": [
        lambda: operation(aten.unsqueeze.default, real(3), 0),
        lambda: operation(aten.unsqueeze.default, real(3, 2), -1),
        lambda: operation(aten.unsqueeze.default, real(), 0),
    ],
    "aten.permute": [
        lambda: operation(aten.permute.default, real(2, 3, 2), [0, -1, 1]),
        lambda: operation(aten.permute.default, real(2, 3, 2), [-1, 0, 1]),
        lambda: operation(aten.permute.default, real(), []),
    ],
    "aten.transpose": [
        lambda: operation(aten.transpose.int, real(3, 3), 0, 1),
        lambda: operation(aten.transpose.int, real(3, 2, 4), -1, -2),
    ],
    "aten.t": [lambda: operation(aten.t.default, real(3, 3))],
    "aten.numpy_T": [lambda: operation(aten.numpy_T.default, real(3, 3))],
    "aten.mT": [lambda: operation(aten.mT.default, real(3, 3)), lambda: operation(aten.mT.default, real(2, 2, 2))],
    "aten.mH": [lambda: operation(aten.mH.default, real(2, 2, 3))],
    "aten.adjoint": [lambda: operation(aten.adjoint.default, real(2, 2, 3))],
    "aten.moveaxis": [
        lambda: operation(aten.moveaxis.int, real(3, 3, 2), 1, 0),
        lambda: operation(aten.moveaxis.int, real(3, 1, 2), 1, 2),
    ],
    "aten.swapdims": [
        lambda: operation(aten.swapdims.default, real(3, 3), 0, 1),
        lambda: operation(aten.swapdims.default, real(1, 1, 3), 0, 1),
    ],
    "aten.fliplr": [lambda: operation(aten.fliplr.default, real(3, 2))],
    "aten.flipud": [lambda: operation(aten.flipud.default, real(3, 2))],
    "aten.rot90": [lambda: operation(aten.rot90.default, real(3, 3))],
    "aten.movedim": [
        lambda: operation(aten.movedim.int, real(3, 3, 2), 0, -1),
        lambda: operation(aten.movedim.intlist, real(2, 3, 2), [1], [2]),
    ],
    "aten.swapaxes": [
        lambda: operation(aten.swapaxes.default, real(3, 3), 0, 1),
        lambda: operation(aten.swapaxes.default, real(2, 3, 3), 1, -1),
    ],
    "aten.flip": [
        lambda: operation(aten.flip.default, real(3, 2), [0]),
        lambda: operation(aten.flip.default, real(3, 2), [-1]),
        lambda: operation(aten.flip.default, real(3, 2), []),
    ],
    "aten.roll": [
        lambda: operation(aten.roll.default, real(3, 2), [1]),
        lambda: operation(aten.roll.default, real(3, 2), [1, 1], [0, 1]),
        lambda: operation(aten.roll.default, real(3, 2), [1], [-1]),
    ],
    "aten.channel_shuffle": [lambda: operation(aten.channel_shuffle.default, real(2, 4, 1, 2), 2)],
    "aten.pixel_shuffle": [
        lambda: operation(aten.pixel_shuffle.default, real(2, 4, 2, 1), 2),
        lambda: operation(aten.pixel_shuffle.default, real(4, 2, 1), 2),
    ],
    "aten.pixel_unshuffle": [lambda: operation(aten.pixel_unshuffle.default, real(2, 1, 4, 2), 2)],
    "aten.slice": [
        lambda: operation(aten.slice.Tensor, real(4, 3), 0, 1, 3),
        lambda: operation(aten.slice.Tensor, real(4, 3), -1, 0, 100, 2),
        lambda: operation(aten.slice.Tensor, real(4, 3), 0, 2, 2),
    ],
    "aten.narrow": [
        lambda: operation(aten.narrow.default, real(4, 3), 0, 1, 2),
        lambda: operation(aten.narrow.default, real(4, 3), 1, 1, 2),
    ],
    "aten.select": [
        lambda: operation(aten.select.int, real(3, 3), 0, -1),
        lambda: operation(aten.select.int, real(3, 3, 2), -2, 1),
        lambda: operation(aten.select.int, real(3), 0, 1),
    ],
    "aten.split": [
        lambda: pieces(aten.split.Tensor, real(5, 3), 2, item=1),
        lambda: pieces(aten.split.Tensor, real(3, 5), 2, -1, item=2),
    ],
    "aten.split_with_sizes": [lambda: pieces(aten.split_with_sizes.default, real(3, 5), [1, 4], 1, item=1)],
    "aten.chunk": [
        lambda: pieces(aten.chunk.default, real(5, 3), 2, item=1),
        lambda: pieces(aten.chunk.default, real(3, 4, 2), 2, 1),
    ],
    "aten.unsafe_split": [
        lambda: pieces(aten.unsafe_split.Tensor, real(3, 4), 2, 1, item=1),
        lambda: pieces(aten.unsafe_split.Tensor, real(5, 2), 2, item=2),
    ],
    "aten.unsafe_split_with_sizes": [
        lambda: pieces(aten.unsafe_split_with_sizes.default, real(3, 4), [1, 3], 1, item=1)
    ],
    "aten.unbind": [
        lambda: pieces(aten.unbind.int, real(2, 3), item=1),
        lambda: pieces(aten.unbind.int, real(2, 3), -1, item=2),
    ],
    "aten.tensor_split": [
        lambda: pieces(aten.tensor_split.sections, real(5, 2), 2, item=1),
        lambda: pieces(aten.tensor_split.indices, real(2, 5), [1, 3], 1, item=1),
    ],
    "getitem": [
        lambda: pieces(aten.unbind.int, real(3, 3), 1, item=1),
        lambda: pieces(aten.split.Tensor, real(4, 3), 2, item=1),
        lambda: pieces(aten.max_pool1d_with_indices.default, real(2, 2, 4), [2]),
    ],
    "aten.diagonal": [
        lambda: operation(aten.diagonal.default, real(3, 3)),
        lambda: operation(aten.diagonal.default, real(3, 3, 2), -1, 1, 2),
        lambda: operation(aten.diagonal.default, real(3, 3, 3), 0, -2, -1),
    ],
    "aten.tril": [
        lambda: operation(aten.tril.default, real(3, 3)),
        lambda: operation(aten.tril.default, real(2, 3, 3), -1),
    ],
    "aten.triu": [
        lambda: operation(aten.triu.default, real(3, 3), 1),
        lambda: operation(aten.triu.default, real(2, 2, 3)),
    ],
    "aten.expand": [
        lambda: operation(aten.expand.default, real(3, 1), [3, 4]),
        lambda: operation(aten.expand.default, real(1, 2), [3, -1]),
        lambda: operation(aten.expand.default, real(2), [2, 2]),
        lambda: operation(aten.expand.default, real(), [2, 2]),
    ],
    "aten.expand_as": [lambda: operation(aten.expand_as.default, real(3, 1), Fixed(real(3, 4)))],
    "aten.broadcast_to": [lambda: operation(aten.broadcast_to.default, real(1, 2), [2, 2])],
    "aten.repeat": [
        lambda: operation(aten.repeat.default, real(2, 2), [1, 3]),
        lambda: operation(aten.repeat.default, real(2), [2, 2]),
        lambda: operation(aten.repeat.default, real(1, 2), [2, 1]),
    ],
    "aten.tile": [
        lambda: operation(aten.tile.default, real(2, 2), [2]),
        lambda: operation(aten.tile.default, real(2, 2), [2, 1]),
    ],
    "aten.repeat_interleave": [
        lambda: operation(aten.repeat_interleave.self_int, real(2, 3), 2),
        lambda: operation(aten.repeat_interleave.self_int, real(2, 3), 2, 0),
        lambda: operation(aten.repeat_interleave.self_int, real(2, 3), 3, -1),
        lambda: operation(aten.repeat_interleave.self_Tensor, real(2, 3), torch.tensor([1, 3]), 0),
        lambda: operation(aten.repeat_interleave.self_Tensor, real(2, 2), torch.tensor([2, 0]), 1),
    ],
    "aten.cat": [
        lambda: operation(aten.cat.default, [real(3, 2), real(3, 1)], 1),
        lambda: operation(aten.cat.default, [real(3, 2), real(1, 2), real(2, 2, seed=1)]),
        lambda: (lambda x: operation(aten.cat.default, [x, x], -1))(real(2, 2)),
        lambda: operation(aten.cat.default, [real(2, 2), 40 + whole(9, 2, 2)], 1),
        lambda: operation(aten.cat.default, [real(2, 2), Fixed(real(2, 2, scale=9.0))], 0),
    ],
    "aten.concat": [lambda: operation(aten.concat.default, [real(3, 2), real(3, 1)], 1)],
    "aten.stack": [
        lambda: operation(aten.stack.default, [real(3, 2), real(3, 2, seed=1)]),
        lambda: operation(aten.stack.default, [real(3, 2), real(3, 2, seed=1)], -1),
        lambda: operation(aten.stack.default, [real(), real(seed=1)]),
    ],
    "aten.hstack": [
        lambda: operation(aten.hstack.default, [real(2, 2), real(2, 1)]),
        lambda: operation(aten.hstack.default, [real(2), real(2, seed=1)]),
    ],
    "aten.dstack": [lambda: operation(aten.dstack.default, [real(2, 2), real(2, 2, seed=1)])],
    "aten.column_stack": [
        lambda: operation(aten.column_stack.default, [real(3), real(3, seed=1)]),
        lambda: operation(aten.column_stack.default, [real(3, 2), real(3)]),
    ],
    "aten.vstack": [lambda: operation(aten.vstack.default, [real(2), real(2, seed=1)])],
    "aten.pad": [
        lambda: operation(aten.pad.default, real(2, 3), [1, 2], "constant", 1.5),
        lambda: operation(aten.pad.default, real(2, 3), [-1, 1], "constant", 2.0),
        lambda: operation(aten.pad.default, real(2, 3), [0, 0, 1, 1], "constant", 2.0),
        lambda: operation(aten.pad.default, real(2, 2, 3), [2, 1], "reflect"),
        lambda: operation(aten.pad.default, real(2, 1, 3, 3), [2, 1, 0, 2], "circular"),
        lambda: operation(aten.pad.default, real(2, 3, 3), [2, 1, 0, 2], "replicate"),
        lambda: operation(aten.pad.default, real(2, 3), [3, 2], "circular"),
    ],
    "aten.constant_pad_nd": [lambda: operation(aten.constant_pad_nd.default, real(3, 2), [1, 1], -2.0)],
    "aten.reflection_pad1d": [lambda: operation(aten.reflection_pad1d.default, real(2, 3), [2, 1])],
    "aten.reflection_pad2d": [
        lambda: operation(aten.reflection_pad2d.default, real(2, 3, 2), [1, 0, 2, 2]),
        lambda: operation(aten.reflection_pad2d.default, real(2, 1, 3, 2), [1, 0, 2, 2]),
    ],
    "aten.reflection_pad3d": [
        lambda: operation(aten.reflection_pad3d.default, real(1, 2, 2, 2, 3), [2, 0, 1, 0, 1, 1])
    ],
    "aten.replication_pad1d": [lambda: operation(aten.replication_pad1d.default, real(2, 1, 3), [4, 1])],
    "aten.replication_pad2d": [lambda: operation(aten.replication_pad2d.default, real(2, 2, 2), [1, 0, 3, 0])],
    "aten.replication_pad3d": [
        lambda: operation(aten.replication_pad3d.default, real(1, 2, 1, 2), [1, 0, 0, 0, 1, 1])
    ],
    "aten.im2col": [
        lambda: operation(aten.im2col.default, real(2, 1, 4, 3), [2, 2], [1, 1], [0, 0], [1, 1]),
        lambda: operation(aten.im2col.default, real(1, 3, 4), [2, 2], [2, 1], [1, 1], [1, 2]),
    ],
    "aten.col2im": [
        lambda: operation(aten.col2im.default, real(2, 4, 6), [4, 3], [2, 2], [1, 1], [0, 0], [1, 1]),
        lambda: operation(aten.col2im.default, real(4, 9), [3, 4], [2, 2], [2, 1], [1, 1], [1, 2]),
    ],
    "aten.unfold": [
        lambda: operation(aten.unfold.default, real(2, 6), 1, 3, 1),
        lambda: operation(aten.unfold.default, real(5, 2), 0, 2, 3),
    ],
}
