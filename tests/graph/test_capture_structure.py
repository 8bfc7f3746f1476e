"""What a captured graph says about a model: operations, module paths, blocks, leaves, live sets, outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot import zoo
from surefoot.graph import Graph, Role, Source
from surefoot.operations.captured import capture


class Branches(nn.Module):
    """A residual step between two linear maps, with a buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.register_buffer("shift", torch.ones(3))
        self.scale = torch.full((3,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        return start + self.inner(start) * self.scale + self.shift


class Tied(nn.Module):
    """An embedding whose table is the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.table(ids))))


def operations(graph: Graph) -> list[tuple[str, str]]:
    return [(node.op, node.module) for node in graph.nodes]


def paths(graph: Graph, source: Source) -> list[str]:
    return [leaf.path for leaf in graph.leaves.values() if leaf.source is source]


def test_operations_carry_the_path_of_the_module_that_called_them() -> None:
    graph = capture(Branches(), torch.ones(2, 3))
    assert operations(graph) == [
        ("aten.linear", "first"),
        ("aten.linear", "inner.0"),
        ("aten.tanh", "inner.1"),
        ("aten.mul", ""),
        ("aten.add", ""),
        ("aten.add", ""),
    ]


def test_leaves_are_found_by_where_they_come_from() -> None:
    graph = capture(Branches(), torch.ones(2, 3))
    assert paths(graph, Source.PARAMETER) == ["first.weight", "first.bias", "inner.0.weight", "inner.0.bias"]
    assert paths(graph, Source.BUFFER) == ["shift"]
    assert paths(graph, Source.CONSTANT) == ["scale"]
    assert [leaf.spec.shape for leaf in graph.inputs] == [(2, 3)]


def test_buffers_and_constants_are_held_by_reference() -> None:
    model = Branches()
    graph = capture(model, torch.ones(2, 3))
    held = {graph.leaves[name].path: value for name, value in graph.held.items()}
    assert held["shift"] is model.shift
    assert held["scale"] is model.scale


def test_a_block_is_what_one_module_directly_owns() -> None:
    graph = capture(Branches(), torch.ones(2, 3))
    blocks = {path: [graph.leaves[n].path for n in block.parameters] for path, block in graph.blocks.items()}
    assert blocks == {
        "first": ["first.weight", "first.bias"],
        "inner.0": ["inner.0.weight", "inner.0.bias"],
    }


def test_a_tied_weight_is_one_leaf_in_one_block() -> None:
    graph = capture(Tied(), torch.tensor([[1, 2]]))
    assert paths(graph, Source.PARAMETER) == ["table.weight", "hidden.weight", "hidden.bias", "head.bias"]
    assert graph.aliases == {"head.weight": "table.weight"}
    assert [len(block.parameters) for block in graph.blocks.values()] == [1, 2, 1]
    (table,) = graph.blocks["table"].parameters
    assert {node.module for node in graph.consumers[table]} == {"table", "head"}


def test_a_module_used_twice_is_one_block() -> None:
    shared = nn.Linear(3, 3)
    graph = capture(nn.Sequential(shared, nn.Tanh(), shared), torch.ones(2, 3))
    assert list(graph.blocks) == ["0"]
    assert [node.op for node in graph.nodes] == ["aten.linear", "aten.tanh", "aten.linear"]


def test_a_parameter_that_is_reached_through_a_list_is_still_that_parameter() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False)
            self.weights = [self.layer.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weights[0]

    graph = capture(Listed(), torch.ones(2, 3))
    assert paths(graph, Source.PARAMETER) == ["layer.weight"]
    assert not graph.held


def test_frozen_parameters_are_constants() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    graph = capture(model, torch.ones(2, 3))
    assert paths(graph, Source.FROZEN) == ["0.weight", "0.bias"]
    assert list(graph.blocks) == ["2"]
    assert [leaf.path for leaf in graph.parameters] == ["2.weight", "2.bias"]
    assert graph.held[graph.frozen[0].name] is model[0].weight
    assert graph.roles[graph.nodes[0].name] == Role.INPUT


def test_roles_tell_what_depends_on_what() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    graph = capture(model, torch.ones(2, 3))
    weight, linear = graph.nodes
    assert graph.roles[weight.name] == Role.PARAMETERS
    assert graph.roles[linear.name] == Role.PARAMETERS | Role.INPUT
    assert graph.blocks_read == {linear.name: frozenset({"", "parametrizations.weight"})}


def test_live_set_of_a_plain_network_is_one_tensor() -> None:
    graph = capture(zoo.mlp(sizes=(3, 4, 2)), torch.ones(5, 3))
    assert graph.live == tuple((name,) for name in (graph.inputs[0].name, *(node.name for node in graph.nodes)))


def test_live_set_of_a_residual_step_holds_what_is_read_later() -> None:
    graph = capture(Branches(), torch.ones(2, 3))
    first, inner, tanh, mul, add, shifted = (node.name for node in graph.nodes)
    assert graph.live == (
        (graph.inputs[0].name,), (first,), (first, inner), (first, tanh), (first, mul), (add,), (shifted,),
    )  # fmt: skip


def test_several_outputs_stay_alive_to_the_end() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            early = self.one(x)
            return early, self.two(torch.tanh(early))

    graph = capture(Two(), torch.ones(2, 3))
    assert graph.live[-1] == graph.outputs == ("linear", "linear_1")


def test_what_no_output_depends_on_is_not_in_the_graph() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.idle(x)
            return self.used(x)

    graph = capture(Idle(), torch.ones(2, 3))
    assert operations(graph) == [("aten.linear", "used")]
    assert paths(graph, Source.PARAMETER) == ["used.weight", "used.bias"]


def test_constants_come_first_and_functions_of_parameters_before_their_reader() -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            late = torch.exp(self.b)
            early = x * torch.sin(self.a)
            return early * late + torch.arange(3.0)

    graph = capture(Ordered(), torch.ones(2, 3))
    assert [node.op.removeprefix("aten.") for node in graph.nodes] == ["arange", "sin", "mul", "exp", "mul", "add"]


def test_pieces_of_a_split_follow_it_at_once() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, dim=1)
            return self.right(torch.tanh(self.left(a))) + b

    graph = capture(Halves(), torch.ones(3, 4))
    assert [node.op for node in graph.nodes][:3] == ["aten.chunk", "getitem", "getitem"]


def test_normalisations_are_split_from_their_scale_and_shift() -> None:
    for norm in (nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.RMSNorm(4)):
        graph = capture(norm, torch.randn(3, 4))
        assert [node.op for node in graph.nodes][1:] == ["surefoot.scale_shift"], norm
    plain = capture(nn.LayerNorm(4, elementwise_affine=False), torch.randn(3, 4))
    assert [node.op for node in plain.nodes] == ["aten.layer_norm"]


def test_what_only_takes_a_shape_is_a_constant() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones_like(x) + x.new_full((3,), 2.0) + torch.zeros_like(x)

    graph = capture(Filled(), torch.ones(2, 3))
    assert [node.op for node in graph.nodes if graph.roles[node.name] == Role.CONSTANT] == ["aten.full"] * 3
    (value,) = graph.run({}, [torch.ones(2, 3)])
    assert torch.equal(value, torch.full((2, 3), 4.0))


def test_a_model_without_parameters_is_a_graph() -> None:
    graph = capture(nn.Sequential(nn.ReLU(), nn.Flatten()), torch.ones(2, 3, 1))
    assert not graph.blocks
    assert [node.op for node in graph.nodes] == ["aten.relu", "aten.flatten"]


def test_a_model_that_returns_its_input_is_an_empty_graph() -> None:
    x = torch.ones(2, 3)
    graph = capture(nn.Identity(), x)
    assert not graph.nodes
    assert graph.run({}, [x]) == (x,)
    assert str(graph) == f"Graph: 0 operations, 0 parameter blocks, returns {graph.inputs[0].name}"


def test_several_inputs_keep_their_order() -> None:
    class Difference(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left - 2 * right

    left, right = torch.randn(2, 3), torch.randn(2, 3)
    expected = left - 2 * right
    assert torch.equal(capture(Difference(), (left, right)).run({}, [left, right])[0], expected)
    named = capture(Difference(), {"right": right, "left": left})
    assert [leaf.path for leaf in named.inputs] == ["right", "left"]
    assert torch.equal(named.run({}, [right, left])[0], expected)


def test_a_huge_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(3)), nn.BatchNorm1d(10**6)).eval()
        x = torch.empty(2, 10**6)
    graph = capture(model, x)
    assert len(graph.blocks) == 4
    assert sum(leaf.spec.numel for leaf in graph.parameters) == 3 * (10**12 + 10**6) + 2 * 10**6
    assert {value.device.type for value in graph.held.values()} == {"meta"}
    assert capture(model, x) is graph


def test_a_zoo_model_on_the_meta_device_has_the_graph_of_the_real_one() -> None:
    options = zoo.small_options("vit")
    real = capture(zoo.build("vit", **options), zoo.example_input("vit", **options))
    with torch.device("meta"):
        meta = capture(zoo.build("vit", **options), zoo.example_input("vit", **options))
    assert operations(meta) == operations(real)
    assert [leaf.spec for leaf in meta.parameters] == [leaf.spec for leaf in real.parameters]


def test_arguments_go_by_the_names_of_the_signature() -> None:
    (node,) = capture(nn.Conv2d(2, 3, 3, padding=1), torch.ones(1, 2, 5, 5)).nodes
    assert node.arguments["padding"] == [1, 1]
    assert node.arguments["groups"] == 1
    assert set(node.inputs) == {node.arguments[key].name for key in ("input", "weight", "bias")}
