"""Reading networks that add earlier states as the paper's layers."""

from __future__ import annotations

import pytest
import torch
from paper_judges import Balls, attack
from reader_models import UNIT, batch, same
from torch import Tensor, nn

from surefoot import Chain, certify, implicit, paper, zoo
from surefoot.errors import UnsupportedOperation
from surefoot.magnitude import Magnitude
from surefoot.paper.layers import RESIDUAL_BOUND
from surefoot.paper.reader import certify_as_printed, read


class Added(nn.Module):
    """Networks with additions of earlier states, on states of size 3."""

    def __init__(self, kind: str, activation: type[nn.Module] = nn.Softplus) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.a, self.b, self.c = (nn.Linear(3, 3).double() for _ in range(3))
        if kind in ("dense", "highway", "joined twice", "joined without the last"):
            self.d = nn.Linear(6, 3).double()
        if kind == "dense":
            self.e = nn.Linear(9, 2).double()
        if kind == "highway":
            self.d2 = nn.Linear(6, 3).double()
        used = {
            "dense": ["a", "d", "e"],
            "highway": ["a", "d", "d2"],
            "joined twice": ["a", "d"],
            "joined without the last": ["a", "b", "d"],
        }
        for name in {"a", "b", "c"} - {*used.get(kind, "abc")}:
            delattr(self, name)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        f = self.activation
        match self.kind:
            case "the state itself":
                return f(self.a(x) + x)
            case "after the activation":
                return self.b(x + f(self.a(x)))
            case "branch of two layers":
                return f(self.b(f(self.a(x))) + x)
            case "branch of three layers":
                return x + self.c(f(self.b(f(self.a(x)))))
            case "inside a layer":
                y = self.a(x)
                return self.b(f(y) + y)
            case "reshaped":
                y = f(self.a(x))
                return self.b(y).reshape(-1, 3) + x.clone()
            case "every layer":
                first = f(self.a(x))
                second = f(self.b(first) + x)
                return f(self.c(second) + first)
            case "kept and added":
                first = f(self.a(x))
                second = self.b(first) + x
                return self.c(second) + x
            case "two earlier states":
                first = f(self.a(x))
                second = f(self.b(first))
                return self.c(second) + first + x
            case "twice itself":
                return self.a(x + x)
            case "scaled":
                return torch.add(self.a(x), x, alpha=2.0)
            case "broadcast":
                return self.a(x) + x[:1]
            case "dense":
                first = f(self.a(x))
                second = f(self.d(torch.cat([x, first], 1)))
                return self.e(torch.cat([x, first, second], 1))
            case "highway":
                first = f(self.a(x))
                second = f(self.d(torch.cat([x, first], 1)))
                return f(self.d2(torch.cat([first, second], 1)))
            case "joined twice":
                first = f(self.a(x))
                return self.d(torch.cat([first, first], 1))
            case "joined without the last":
                first = f(self.a(x))
                second = f(self.b(first))
                return f(self.d(torch.cat([x, first], 1))) + second
            case "two products of one state":
                return f(self.a(x) + self.b(x) + self.c(x))
            case "product of an earlier state":
                first = f(self.a(x))
                return f(self.b(x)) + first
            case "parameters on an earlier state":
                return f(self.b(f(self.a(x))) + self.c(x))
            case other:
                raise ValueError(other)


READABLE = [
    "the state itself",
    "after the activation",
    "branch of two layers",
    "branch of three layers",
    "inside a layer",
    "reshaped",
    "every layer",
    "two earlier states",
    "parameters on an earlier state",
    "dense",
    "highway",
    "two products of one state",
]


def flat(model: nn.Module, x: Tensor):
    """The network as a function of one vector of parameters, with the sizes of its blocks."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    owned = [sum(value.numel() for value in child.parameters()) for child in model.children()]

    def function(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        values = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return torch.func.functional_call(model, values, (x,)).reshape(-1)

    return function, [size for size in owned if size]


class TestResidual:
    """Networks that add earlier states."""

    def test_the_papers_network_is_augmented_layer_by_layer(self):
        model, x = zoo.residual(width=4, depth=3, inputs=4, outputs=None).double(), batch(5, 4)
        layer = paper.residual(paper.fully_connected(5), (paper.softplus(5 * 4),))
        expected = paper.algorithm_4([paper.Computation(*layer)] * 3, 1.0, 2.0).result
        assert same(certify_as_printed(model, x, domain=UNIT, input_norm=2.0), expected)

    def test_embedding_and_head_are_plain_layers(self):
        chain = Chain(zoo.residual(width=4, depth=2, inputs=3, outputs=2).double(), batch(5, 3))
        kept = [float(layer.biaffine.lipschitz_state) for layer in read(chain)]
        assert kept == [0.0, 1.0, 1.0, 0.0]

    def test_an_addition_after_the_activation_is_a_layer_of_its_own(self):
        layers = read(Chain(Added("after the activation"), batch(2, 3)))
        assert [float(layer.biaffine.smoothness) for layer in layers] == [1.0, 0.0, 1.0]
        assert [float(layer.biaffine.lipschitz_state) for layer in layers] == pytest.approx([1.0, 2.0, 0.0])

    def test_the_state_itself_is_the_linear_part(self):
        (layer,) = read(Chain(Added("the state itself"), batch(2, 3)))
        assert layer.biaffine == paper.Biaffine.of(1.0, Magnitude.of(2).sqrt(), 1.0)

    @pytest.mark.parametrize("kind", READABLE)
    def test_what_is_not_flagged_is_a_bound(self, kind):
        """Attacked from below on the whole product of balls."""
        model, x = Added(kind), batch(2, 3)
        function, sizes = flat(model, x)
        found = certify_as_printed(model, x, domain=UNIT)
        assert not found.flags
        bound, lipschitz, smoothness = attack(function, Balls(sizes, [1.0] * len(sizes)), starts=3)
        assert 0.05 < bound <= float(found.bound)
        assert 0.05 < lipschitz <= float(found.lipschitz)
        assert 0.01 < smoothness <= float(found.smoothness)

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("kept and added", "a state is added or kept, here it is both"),
            ("joined twice", "here on an earlier one or on several"),
            ("joined without the last", "here on an earlier one or on several"),
            (
                "twice itself",
                "'aten.add' as used in the model itself: in the paper the last state is added to one",
            ),
            ("scaled", "the last state is added to one earlier state of the same size"),
            ("broadcast", r"'aten\.(slice|add)'"),
            ("product of an earlier state", "'aten.linear' as used in module 'b'"),
        ],
    )
    def test_other_structures_are_refused(self, kind, message):
        with pytest.raises(UnsupportedOperation, match=message):
            certify_as_printed(Added(kind), batch(2, 3), domain=UNIT)

    def test_the_bound_of_a_normalisation_is_flagged(self):
        class Normalised(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.a(x)) + x

        found = certify_as_printed(Normalised(), torch.ones(4, 3), domain=UNIT)
        assert found.flags == (RESIDUAL_BOUND,)


class TestDense:
    """Networks whose layers act on several states."""

    def test_the_papers_dense_network_is_augmented_layer_by_layer(self):
        layer = paper.fully_connected(2), (paper.softplus(2 * 3),)
        kept = paper.Computation(*paper.residual(*layer))
        expected = paper.algorithm_4([kept, kept, paper.Computation(layer[0], ())], 1.0, 2.0).result
        assert same(certify_as_printed(Added("dense"), batch(2, 3), domain=UNIT, input_norm=2.0), expected)

    @pytest.mark.parametrize("make", [zoo.dense, zoo.highway])
    def test_networks_of_the_zoo_are_read(self, make):
        model, x = make().double(), batch(2, 16)
        found = certify_as_printed(model, x, domain=UNIT)
        assert not found.flags
        assert found.smoothness.is_finite
        assert certify(model, x, domain=UNIT).smoothness <= found.smoothness


class Energy(nn.Module):
    """½‖β‖² + ½ soft-plus terms of β − x: strongly convex, with known derivatives."""

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return 0.5 * beta.square().sum() + 0.5 * nn.functional.softplus(beta - x).sum()


class TestImplicit:
    """Layers that minimise, with declared constants: L ≤ 1 + ¼, H ≤ √2, μ = 1."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        constants = implicit.Constants(1.0, smoothness=1.25, hessian_lipschitz=1.5)
        layer = implicit.ArgMin(Energy(), 3, constants=constants)
        return nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 2)).double()

    def test_printed_constants_are_bounds(self):
        model, x = self.model(), batch(2, 3)
        function, sizes = flat(model, x)
        found = certify_as_printed(model, x, domain=UNIT)
        assert not found.flags
        bound, lipschitz, smoothness = attack(function, Balls(sizes, [1.0] * len(sizes)), starts=2)
        assert 0.05 < bound <= float(found.bound)
        assert 0.05 < lipschitz <= float(found.lipschitz)
        assert 0.01 < smoothness <= float(found.smoothness)

    def test_without_constants_it_is_refused(self):
        model = nn.Sequential(nn.Linear(3, 3), implicit.ArgMin(Energy(), 3)).double()
        with pytest.raises(UnsupportedOperation, match="constants μ, L and H"):
            certify_as_printed(model, batch(2, 3), domain=UNIT)
