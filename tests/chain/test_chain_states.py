"""States are the paper's augmented states, and computations the paper's layers: for each kind of network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from judges.models import Halves
from surefoot import zoo
from surefoot.chain import Chain, Computation


def ops(computation: Computation) -> tuple[list[str], list[list[str]]]:
    """Names of the biaffine operations and of those of each non-affine part."""
    short = [node.op.rpartition(".")[2] for node in computation.biaffine]
    return short, [[node.op.rpartition(".")[2] for node in part] for part in computation.nonaffine]


def blocks(chain: Chain) -> list[tuple[str, ...]]:
    return [computation.blocks for computation in chain]


def shapes(chain: Chain) -> list[list[tuple[int, ...]]]:
    return [[tuple(value.shape) for value in state.values()] for state in chain.states()]


def test_a_plain_network_has_one_tensor_per_state() -> None:
    chain = Chain(zoo.mlp(sizes=(3, 4, 5, 2)), torch.ones(7, 3))
    assert shapes(chain) == [[(7, 3)], [(7, 4)], [(7, 5)], [(7, 2)]]
    assert [ops(computation) for computation in chain] == [
        (["linear"], [["softplus"]]),
        (["linear"], [["softplus"]]),
        (["linear"], []),
    ]


def test_a_residual_network_has_the_last_two_states() -> None:
    """Eq. chain_res_def: x_t = a(b(x_{t-1}, u_t) + x_{t-2}), on (x_{t-2}; x_{t-1}), with x_{-1} = 0."""
    chain = Chain(zoo.residual(width=4, depth=4, inputs=4, outputs=None), torch.randn(3, 4))
    x, *activations = [chain.graph.inputs[0].name, *(n.name for n in chain.graph.nodes if n.op == "aten.softplus")]
    assert [computation.before for computation in chain] == [
        (x,),
        (x, activations[0]),
        (activations[0], activations[1]),
        (activations[1], activations[2]),
    ]
    assert chain[-1].after == (activations[3],)
    assert ops(chain[0]) == (["linear"], [["softplus"]])
    assert all(ops(computation) == (["linear", "add"], [["softplus"]]) for computation in chain[1:])


def test_a_highway_network_has_both_blocks_in_one_biaffine_part() -> None:
    """x_t = a(W_{t,t-1} x_{t-1} + W_{t,t-2} x_{t-2} + w_t), on (x_{t-2}; x_{t-1})."""
    chain = Chain(zoo.highway(width=4, depth=3, inputs=5, outputs=2), torch.randn(3, 5))
    assert blocks(chain) == [
        ("layers.0.maps.0",),
        *((f"layers.{t}.maps.0", f"layers.{t}.maps.1") for t in (1, 2, 3)),
    ]
    assert shapes(chain) == [[(3, 5)], [(3, 5), (3, 4)], [(3, 4), (3, 4)], [(3, 4), (3, 4)], [(3, 2)]]
    assert ops(chain[1]) == (["linear", "linear", "add"], [["softplus"]])
    assert ops(chain[3]) == (["linear", "linear", "add"], [])


def test_a_dense_network_has_all_states_so_far() -> None:
    """Eq. dense_net: x_t = a(Σ_{s<t} W_{t,s} x_s + w_t), on (x_0; …; x_{t-1})."""
    chain = Chain(zoo.dense(sizes=(2, 3, 4, 5, 6)), torch.randn(7, 2))
    assert shapes(chain) == [
        [(7, 2)],
        [(7, 2), (7, 3)],
        [(7, 2), (7, 3), (7, 4)],
        [(7, 2), (7, 3), (7, 4), (7, 5)],
        [(7, 6)],
    ]
    assert blocks(chain)[2] == ("layers.2.maps.0", "layers.2.maps.1", "layers.2.maps.2")
    assert ops(chain[2]) == (["linear", "linear", "add", "linear", "add"], [["softplus"]])


def test_convolutions_with_pooling() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Unflatten(1, (3, 1)),
        nn.AvgPool1d(1),
    )  # fmt: skip
    chain = Chain(model, torch.randn(2, 1, 6, 6))
    assert blocks(chain) == [("0",), ("4",)]
    assert ops(chain[0]) == (["conv2d"], [["relu"], ["max_pool2d", "flatten"]])
    assert ops(chain[1]) == (["linear", "unflatten", "avg_pool1d"], [])


def test_batch_norm_is_not_affine_while_it_trains_and_affine_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(5, 3)
    training = Chain(model, x)
    assert [ops(computation) for computation in training] == [
        (["linear"], [["batch_norm"]]),
        (["scale_shift"], [["tanh"]]),
        (["linear"], []),
    ]
    evaluating = Chain(model.eval(), x)
    assert [ops(computation) for computation in evaluating] == [
        (["linear", "batch_norm"], []),
        (["scale_shift"], [["tanh"]]),
        (["linear"], []),
    ]


def test_batch_norm_without_parameters_is_the_end_of_its_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softplus(), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    chain = Chain(model, torch.randn(5, 3))
    assert ops(chain[0]) == (["linear"], [["softplus"], ["batch_norm"]])
    assert blocks(chain) == [("0",), ("3",)]


def test_attention_has_three_products_in_one_biaffine_part() -> None:
    chain = Chain(zoo.gpt(**zoo.small_options("gpt")), zoo.example_input("gpt", **zoo.small_options("gpt")))
    with_attention = [c for c in chain if any("scaled_dot" in n.op for part in c.nonaffine for n in part)]
    assert with_attention
    for computation in with_attention:
        biaffine, parts = ops(computation)
        assert "linear" in biaffine
        assert parts[0][0] == "scaled_dot_product_attention"

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
            return x + self.out(y)

    chain = Chain(Attention(), torch.randn(2, 3, 4))
    assert blocks(chain) == [("q", "k", "v"), ("out",)]
    assert ops(chain[0]) == (["linear"] * 3, [["scaled_dot_product_attention"]])
    assert ops(chain[1]) == (["linear", "add"], [])
    assert shapes(chain) == [[(2, 3, 4)], [(2, 3, 4), (2, 3, 4)], [(2, 3, 4)]]


def test_attention_written_as_products_is_not_biaffine() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.q(x) @ self.k(x).mT, dim=-1) @ x

    (computation,) = Chain(Attention(), torch.randn(2, 3, 4))
    assert ops(computation) == (["linear", "linear", "mT"], [["matmul"], ["softmax"], ["matmul"]])


def test_ids_are_part_of_the_state_and_do_not_vary() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.mix, self.again = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Embedding(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return torch.tanh(self.mix(self.word(ids))) + self.again(ids)

    chain = Chain(Twice(), torch.tensor([[1, 2]]))
    assert blocks(chain) == [("word",), ("mix", "again")]
    assert ops(chain[0]) == (["embedding"], [])
    assert ops(chain[1]) == (["linear", "embedding"], [["tanh"], ["add"]])
    assert chain[1].before == (chain.graph.inputs[0].name, "embedding")


def test_masks_of_the_input_do_not_make_a_product_nonaffine() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(torch.where(mask, x, 0.0)).masked_fill(~mask, 0.0)

    (computation,) = Chain(Masked(), (torch.randn(2, 3), torch.ones(2, 3, dtype=torch.bool)))
    assert ops(computation) == (["where", "linear", "bitwise_not", "masked_fill"], [])


def test_a_decision_by_the_state_is_not_affine() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.where(y > 0, y, 0.1 * y)

    (computation,) = Chain(Sparse(), torch.randn(2, 3))
    assert ops(computation) == (["linear", "mul"], [["gt", "where"]])


def test_functions_of_parameters_belong_to_their_computation() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)
    )
    chain = Chain(model, torch.randn(4, 3, 1))
    assert blocks(chain) == [("1.parametrizations.weight", "1"), ("3",)]
    assert ops(chain[0]) == (["flatten"], [["_weight_norm"], ["linear"], ["tanh"]])


def test_a_frozen_layer_is_an_affine_map_of_the_state() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Tanh())
    model[0].requires_grad_(False)
    (computation,) = Chain(model, torch.randn(2, 3))
    assert computation.blocks == ("1",)
    assert ops(computation) == (["linear", "linear"], [["tanh"]])


def test_two_linear_maps_in_a_row_are_two_computations() -> None:
    chain = Chain(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), torch.randn(2, 3))
    assert blocks(chain) == [("0",), ("1",)]


def test_pieces_of_a_split_may_live_across_cuts() -> None:
    chain = Chain(Halves(), torch.randn(3, 5))
    assert blocks(chain) == [("left",), ("right",)]
    assert shapes(chain) == [[(3, 5)], [(3, 2), (3, 1), (3, 2)], [(3, 2)]]
