"""Hand-written derivatives, masks, sparse tensors, integers, parts of outputs: accepted, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refused import X, assert_refused
from torch import Tensor, nn
from torch.nn import functional

from surefoot.errors import CaptureError
from surefoot.graph import Graph, Node, capture_with
from surefoot.operations.captured import capture


class Reversal(torch.autograd.Function):
    """The identity, whose backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return -5 * slopes[0]


class Quantised(torch.autograd.Function):
    """Rounding with the straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return slopes[0]


class Clamped(torch.autograd.Function):
    """Differs from its backward at large arguments only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-4, 4)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return slopes[0]


class Swish(torch.autograd.Function):
    """x σ(x) in little memory, with the right derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return slopes[0] * (s + x * s * (1 - s))


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(3, 3), nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Any:
        return self.second(self.function.apply(self.first(x)))


@pytest.mark.parametrize("function", [Reversal, Quantised, Clamped])
def test_a_backward_that_is_not_the_derivative_is_refused(function: Any) -> None:
    assert_refused(lambda: Custom(function), X, f"backward of '{function.__name__}'.*derivative", "")


def test_a_backward_that_is_the_derivative_is_accepted() -> None:
    model = Custom(Swish)
    graph = capture(model, X)
    (value,) = graph.run(dict(model.named_parameters()), [X])
    assert torch.equal(value, model(X))


def test_a_backward_without_values_is_refused() -> None:
    with pytest.raises(CaptureError, match="values in memory"):
        capture(Custom(Swish).to("meta"), X.to("meta"))


class Attention(nn.Module):
    """Attention with a mask of padding, True where a key is hidden."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(4, 2, batch_first=True), weights

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.attention(x, x, x, key_padding_mask=mask, need_weights=self.weights)[0]


HIDDEN, PARTLY = torch.tensor([[True] * 3, [False] * 3]), torch.tensor([[True, True, False], [False] * 3])


def test_a_row_of_attention_with_all_keys_masked_is_refused() -> None:
    x, model = torch.randn(2, 3, 4), Attention(weights=True)
    assert model(x, HIDDEN).isnan().any()
    with pytest.raises(CaptureError, match="In module 'attention': a mask hides everything from a row"):
        capture(model, (x, HIDDEN))
    assert isinstance(capture(model, (x, PARTLY)), Graph)
    with pytest.raises(CaptureError, match="a mask hides everything"):  # once captured, too
        capture(model, (x, HIDDEN))


def test_a_masked_row_that_is_zero_is_accepted() -> None:
    x, model = torch.randn(2, 3, 4), Attention(weights=False)
    assert model(x, HIDDEN).isfinite().all()
    assert isinstance(capture(model, (x, HIDDEN)), Graph)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return functional.softmax(self.layer(x).masked_fill(mask, -torch.inf), dim=-1)


def test_a_masked_row_of_a_plain_softmax_is_refused() -> None:
    with pytest.raises(CaptureError, match="a mask hides everything"):
        capture(Filled(), (torch.ones(2, 3), HIDDEN))


class Sparse(nn.Module):
    def __init__(self, parameter: bool = False) -> None:
        super().__init__()
        value = torch.eye(4).to_sparse()
        if parameter:
            self.adjacency = nn.Parameter(value)
        else:
            self.register_buffer("adjacency", value)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(torch.sparse.mm(self.adjacency, x))


def test_sparse_parameters_are_refused() -> None:
    assert_refused(
        lambda: nn.Sequential(Sparse(parameter=True)), torch.ones(4, 3), "'adjacency' is a sparse.*dense", "0"
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_count_as_dense_ones(layout: torch.layout) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model = Sparse()
    model.adjacency = torch.tensor([[0.0, 2, 0, 0], [1, 0, 0, 3], [0, 0, 0, 0], [0, 1, 0, 0]]).to_sparse(
        layout=layout
    )
    graph = capture(model, x)
    (read,) = graph.run(dict(model.named_parameters()), [x])
    torch.testing.assert_close(read, model(x))
    assert capture(model, x) is graph
    model.adjacency.values().mul_(2)
    changed = capture(model, x)
    (read,) = changed.run(dict(model.named_parameters()), [x])
    assert changed is not graph
    torch.testing.assert_close(read, model(x))


class Picks(nn.Module):
    """Some entries, by a mask in a buffer."""

    def __init__(self, pick: Any) -> None:
        super().__init__()
        self.layer, self.pick = nn.Linear(3, 3), pick
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("triangle", torch.ones(2, 3).triu().bool())

    def forward(self, x: Tensor) -> Any:
        return self.pick(self, self.layer(x))


@pytest.mark.parametrize(
    "pick",
    [
        lambda s, z: z[:, s.mask],
        lambda s, z: z[s.triangle],
        lambda s, z: z.masked_select(s.triangle),
        lambda s, z: z[None, ..., s.mask, None],
    ],
)
def test_masks_in_buffers_pick_entries(pick: Any) -> None:
    model, x = Picks(pick), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        (read,) = capture(model, x).run(dict(model.named_parameters()), [x])
        torch.testing.assert_close(read, model(x))
        model.mask[1], model.triangle[1, 0] = True, True  # the same graph would pick too few


def test_masks_that_are_computed_are_refused() -> None:
    assert_refused(lambda: Picks(lambda s, z: z[z > 0]), torch.ones(2, 3), "shape.*data.*torch.where", "")


def test_a_sparse_buffer_that_nothing_reads_is_no_matter() -> None:
    model = Sparse()
    model.forward = model.layer.forward  # type: ignore[method-assign]
    assert len(capture(model, torch.ones(4, 3)).nodes) == 1


def test_tensors_of_a_transformers_output_come_in_order() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Answers(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return outputs.QuestionAnsweringModelOutput(start_logits=y, end_logits=2 * y)

    class Classifies(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return outputs.SequenceClassifierOutput(logits=y, hidden_states=(x, 2 * y))

    assert len(capture(Answers(3, 2), X).outputs) == 2
    assert capture(Classifies(3, 2), X).outputs == ("linear",)


def test_several_results_are_picked_in_the_order_they_are_returned() -> None:
    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            first, second = super().forward(x).chunk(2, -1)
            return second, first

    model = Halves(3, 4)
    expected, read = model(X), capture(model, X).run(dict(model.named_parameters()), [X])
    assert all(torch.equal(a, b) for a, b in zip(expected, read, strict=True))


def test_a_graph_is_kept_per_rewriting() -> None:
    def unchanged(nodes: Any) -> list[Node]:
        return list(nodes)

    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    split, whole = capture(model, X), capture_with(model, X, unchanged)
    assert [node.op for node in whole.nodes] == ["aten.linear", "aten.layer_norm"]
    assert len(split.nodes) == 3
    assert capture(model, X) is split
    assert capture_with(model, X, unchanged) is whole


def test_integers_that_fill_in_for_numbers_are_refused() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return torch.where(ids > 0, self.layer(x), ids)

    assert_refused(Chosen, (torch.ones(2, 3), torch.ones(2, 3).long()), "computes with integers", "")


def test_integers_may_choose() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            y = self.layer(x)
            picked = y.index_select(0, ids) + y[ids] + y.gather(0, ids[:, None].expand(2, 3))
            return picked.index_add(0, ids, y).index_copy(0, ids, y) + torch.where(ids[:, None] > 0, y, -y)

    assert isinstance(capture(Chosen(), (torch.ones(2, 3), torch.tensor([1, 0]))), Graph)
