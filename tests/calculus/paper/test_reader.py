"""Reading a torch model as the paper's layers, and Algorithm 4 on it."""

from __future__ import annotations

import math

import pytest
import torch
from paper_judges import Balls, attack, normal
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import Chain, zoo
from surefoot.calculus import paper
from surefoot.calculus.certify import certify
from surefoot.calculus.paper.layers import CONVOLUTION_BIAS, OVERLAPPING_MAX_POOL, RESIDUAL_BOUND
from surefoot.calculus.paper.operations import UNEVEN_AVERAGE, is_rearrangement
from surefoot.calculus.paper.reader import certify_as_printed, read
from surefoot.domains import Ball, DomainError, ProductBall
from surefoot.errors import UnsupportedOperation
from surefoot.graph import Node, Ref, Spec
from surefoot.magnitude import Magnitude

UNIT = ProductBall(1.0)
SMOOTH = {"activation": "softplus", "pooling": "average"}


def mlp(*sizes: int, activation: type[nn.Module] = nn.Softplus, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return zoo.mlp(sizes, activation, bias).double()


def batch(*shape: int) -> Tensor:
    return normal(*shape, seed=5)


def same(certificate, result: paper.Result) -> bool:
    found = (certificate.bound, certificate.lipschitz, certificate.smoothness)
    return (
        found == (result.bound, result.lipschitz, result.smoothness) and tuple(certificate.flags) == result.flags
    )


def close(certificate, result: paper.Result) -> None:
    for found, expected in (
        (certificate.bound, result.bound),
        (certificate.lipschitz, result.lipschitz),
        (certificate.smoothness, result.smoothness),
    ):
        assert float(found) == pytest.approx(float(expected), rel=1e-12)


@pytest.fixture(scope="module")
def study() -> paper.Application:
    return paper.application()


def norms_of(model: nn.Sequential) -> list[float]:
    """The norm of the parameters of each fully connected layer."""
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in model if isinstance(m, nn.Linear)]
    return [float(vector.detach().norm()) for vector in vectors]


class TestVGG:
    """The paper's application on ``zoo.vgg16``, on meta: the numbers of ``paper.application`` exactly."""

    @staticmethod
    def certify(keep_value_at_zero: bool = True, **options):
        with torch.device("meta"):
            model, x = zoo.vgg16(**options), zoo.example_input("vgg16", batch=128)
        return certify_as_printed(model, x, domain=UNIT, input_norm=1.0, keep_value_at_zero=keep_value_at_zero)

    def test_vgg(self, study):
        certificate = self.certify()
        assert same(certificate, study.vgg)
        assert float(certificate.lipschitz) == pytest.approx(1.6275e12, rel=1e-4)
        assert certificate.flags == (CONVOLUTION_BIAS,)
        assert len(certificate.rows) == 16
        assert len(certificate.reasons) == 13 + 5 + 2  # ReLU and max-pooling

    def test_smooth_vgg_with_and_without_the_value_at_zero(self, study):
        assert same(self.certify(**SMOOTH), study.smooth_kept)
        assert same(self.certify(False, **SMOOTH), study.smooth_dropped)

    def test_batch_normalisation_and_the_four_inequalities(self, study):
        found = {}
        for keep in (True, False):
            for epsilon in (1e-2, 1e2):
                found[keep, epsilon] = self.certify(keep, batch_norm=epsilon, **SMOOTH)
                (expected,) = (
                    entry.normalised
                    for entry in study.batch_norm
                    if (entry.keep_value_at_zero, entry.epsilon, entry.reading.name)
                    == (keep, epsilon, "every entry, main text")
                )
                assert same(found[keep, epsilon], expected)
        for keep, plain in ((True, study.smooth_kept), (False, study.smooth_dropped)):
            assert found[keep, 1e2].lipschitz <= plain.lipschitz <= found[keep, 1e-2].lipschitz
            assert found[keep, 1e2].smoothness <= plain.smoothness <= found[keep, 1e-2].smoothness

    def test_computations_are_those_of_the_appendix(self):
        with torch.device("meta"):
            chain = Chain(zoo.vgg16(), zoo.example_input("vgg16", batch=128))
        expected = [(layer.biaffine, layer.nonlinear) for layer in paper.vgg()]
        assert [(layer.biaffine, layer.nonlinear) for layer in read(chain)] == expected


class TestPerceptrons:
    """Against Algorithm 4 called by hand."""

    layers = (
        paper.Computation(paper.fully_connected(5), (paper.softplus(5 * 4),)),
        paper.Computation(paper.fully_connected(5), (paper.softplus(5 * 6),)),
        paper.Computation(paper.fully_connected(5)),
    )

    def test_on_a_product_of_balls(self):
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        expected = paper.algorithm_4(self.layers, 0.7, 2.0).result
        assert same(certify_as_printed(model, x, domain=ProductBall(0.7), input_norm=2.0), expected)
        close(
            certify_as_printed(model, x, domain=ProductBall(0.7)),
            paper.algorithm_4(self.layers, 0.7, float(x.norm())).result,
        )

    def test_through_certify(self):
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        certificate = certify(model, x, domain=UNIT, input_norm=1.0, constants="paper")
        assert same(certificate, paper.algorithm_4(self.layers, 1.0, 1.0).result)
        assert certificate.constants == "paper"
        assert dict(certificate.block_lipschitz) == {}
        assert certificate.block_smoothness.shape == (0, 0)

    def test_one_radius_per_block(self):
        radii = {"0": 0.5, "2": 2.0, "4": 3.0}
        found = certify_as_printed(mlp(3, 4, 6, 2), batch(5, 3), domain=ProductBall(radii), input_norm=1.0)
        assert same(found, paper.algorithm_4(self.layers, list(radii.values()), 1.0).result)

    def test_corrected_and_without_the_value_at_zero(self):
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        for keep, corrected in ((False, False), (True, True), (False, True)):
            found = certify_as_printed(
                model, x, domain=UNIT, input_norm=1.0, keep_value_at_zero=keep, corrected=corrected
            )
            assert same(found, paper.algorithm_4(self.layers, 1.0, 1.0, keep, corrected).result)
            assert any(flag.startswith("ERRATA 4") for flag in found.flags) is not keep

    @pytest.mark.parametrize("domain", [ProductBall(0.3, center="present"), Ball(0.3)])
    def test_around_the_present_weights(self, domain):
        """A ball lies in the product of balls of its radius."""
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        norms = norms_of(model)
        expected = paper.algorithm_4(paper.around_point(self.layers, norms), 0.3, 1.0).result
        found = certify_as_printed(model, x, domain=domain, input_norm=1.0)
        close(found, expected)
        assert ("read as each layer within" in found.domain) is isinstance(domain, Ball)

    def test_around_a_given_point(self):
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        centre = {path: torch.ones_like(value) for path, value in model.named_parameters()}
        norms = [math.sqrt(count) for count in (16, 30, 14)]
        expected = paper.algorithm_4(paper.around_point(self.layers, norms), 0.3, 1.0).result
        close(certify_as_printed(model, x, domain=ProductBall(0.3, centre), input_norm=1.0), expected)

    def test_in_the_input(self):
        model, x = mlp(3, 4, 6, 2), batch(5, 3)
        norms = norms_of(model)
        pairs = zip(self.layers, norms, strict=True)
        functions = [part for layer, size in pairs for part in paper.fix_parameters(layer, size)]
        at_origin = certify_as_printed(model, x, domain=UNIT, wrt="input")
        close(at_origin, paper.smooth_state(functions, 1.0))
        close(
            certify_as_printed(model, x, domain=Ball(0.25), wrt="input"),
            paper.smooth_state(functions, float(x.norm()) + 0.25),
        )
        last = at_origin.rows[-1]
        assert float(last.lipschitz) == pytest.approx(float(at_origin.lipschitz), rel=1e-12)
        assert float(last.smoothness) == pytest.approx(float(at_origin.smoothness), rel=1e-12)

    def test_in_the_input_without_the_value_at_zero(self):
        found = certify_as_printed(mlp(3, 4, 2), batch(5, 3), domain=UNIT, wrt="input", keep_value_at_zero=False)
        assert [flag[:8] for flag in found.flags] == ["ERRATA 4"]
        assert found.bound < certify_as_printed(mlp(3, 4, 2), batch(5, 3), domain=UNIT, wrt="input").bound

    def test_rows_are_the_layers_of_the_trace(self):
        found = certify_as_printed(mlp(3, 4, 6, 2), batch(5, 3), domain=UNIT, input_norm=1.0)
        trace = paper.algorithm_4(self.layers, 1.0, 1.0)
        assert [(row.module, row.operation, row.shape) for row in found.rows] == [
            ("0", "linear → softplus", (5, 4)),
            ("2", "linear → softplus", (5, 6)),
            ("4", "linear", (5, 2)),
        ]
        assert [(row.bound, row.lipschitz, row.smoothness) for row in found.rows] == [
            (part.bound, part.lipschitz, part.smoothness) for part in trace.layers
        ]

    def test_without_intercept_the_linear_part_is_zero(self):
        (layer, _) = read(Chain(mlp(3, 4, 2, bias=False), batch(5, 3)))
        assert layer.biaffine == paper.Biaffine.of(1.0)

    def test_frozen_weights_and_intercepts_become_constants(self):
        model, x = mlp(3, 4, 2), batch(5, 3)
        weight, bias = float(model[0].weight.detach().norm()), float(model[2].bias.detach().norm())
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        expected = [
            paper.Computation(paper.Biaffine.of(0.0, math.sqrt(5), weight), (paper.softplus(20),)),
            paper.Computation(paper.Biaffine.of(1.0, 0.0, 0.0, math.sqrt(5) * bias)),
        ]
        found = certify_as_printed(model, x, domain=UNIT, input_norm=1.0)
        close(found, paper.algorithm_4(expected, 1.0, 1.0).result)

    def test_around_a_point_with_a_frozen_weight_it_is_a_bound(self):
        model, x = mlp(3, 4, 2), batch(2, 3)
        model[0].weight.requires_grad_(False)
        varying = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
        sizes = {name: value.numel() for name, value in varying.items()}

        def function(vector: Tensor) -> Tensor:
            parts = vector.split(list(sizes.values()))
            values = {name: part.reshape(varying[name].shape) for part, name in zip(parts, sizes, strict=True)}
            return torch.func.functional_call(model, values, (x,)).reshape(-1)

        centre = torch.cat([value.reshape(-1) for value in varying.values()])
        found = certify_as_printed(model, x, domain=ProductBall(0.5, center="present"))
        blocks = [sizes["0.bias"], sizes["2.weight"] + sizes["2.bias"]]
        bound, lipschitz, smoothness = attack(function, Balls(blocks, [0.5, 0.5], centre), starts=3)
        assert 0.05 < bound <= float(found.bound)
        assert 0.05 < lipschitz <= float(found.lipschitz)
        assert 0.01 < smoothness <= float(found.smoothness)

    def test_an_input_that_is_not_read_does_not_count(self):
        class Ignores(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(3, 2).double()

            def forward(self, x: Tensor, unread: Tensor) -> Tensor:
                return self.a(x)

        x = batch(5, 3)
        found = certify_as_printed(Ignores(), (x, 100 * x), domain=UNIT)
        expected = paper.algorithm_4([paper.Computation(paper.fully_connected(5))], 1.0, float(x.norm()))
        close(found, expected.result)


class Added(nn.Module):
    """Networks with additions of earlier states, on states of size 3."""

    def __init__(self, kind: str, activation: type[nn.Module] = nn.Softplus) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.a, self.b, self.c = (nn.Linear(3, 3).double() for _ in range(3))
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
            ("kept and added", "keeps one earlier state besides the last, here it needs more"),
            ("two earlier states", "keeps one earlier state besides the last, here it needs more"),
            (
                "twice itself",
                "'aten.add' as used in the model itself: in the paper the last state is added to one",
            ),
            ("scaled", "the last state is added to one earlier state of the same size"),
            ("broadcast", r"'aten\.(slice|add)'"),
            ("parameters on an earlier state", "'aten.linear' as used in module 'c'"),
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


class TestOperations:
    """One constant at a time."""

    @staticmethod
    def only(model: nn.Module, *shape: int) -> paper.Computation:
        (layer,) = read(Chain(model.double(), batch(*shape)))
        return layer

    def test_square_convolution(self):
        assert self.only(nn.Conv2d(3, 4, 5, 2), 7, 3, 11, 11).biaffine == paper.convolution(5, 2, 7, 16)

    @pytest.mark.parametrize(
        ("model", "shape", "patches"),
        [
            (nn.Conv2d(2, 3, (3, 1), stride=(2, 1)), (4, 2, 9, 9), 2),
            (nn.Conv2d(2, 3, (5, 3), stride=(1, 2)), (4, 2, 9, 9), 10),
            (nn.Conv1d(2, 3, 4, stride=3), (4, 2, 20), 2),
            (nn.Conv3d(1, 2, 2), (4, 1, 4, 4, 4), 8),
            (nn.Conv2d(2, 3, 3, stride=2, dilation=2), (4, 2, 11, 11), 9),
            (nn.Conv2d(4, 6, 3, groups=2), (4, 4, 6, 6), 9),
        ],
    )
    def test_other_convolutions_by_the_lemma_on_patches(self, model, shape, patches):
        layer = self.only(model, *shape)
        assert float(layer.biaffine.smoothness) == pytest.approx(math.sqrt(patches))
        assert float(layer.biaffine.lipschitz_parameters) == pytest.approx(2 * math.sqrt(patches))
        assert layer.unsound == (CONVOLUTION_BIAS,)
        # ‖β(x,w)‖ ≤ L‖x‖‖w‖ at random points and where all entries are equal
        for fill in (torch.randn_like, torch.ones_like):
            x, weight = fill(batch(*shape)), fill(model.weight)
            output = torch.func.functional_call(model, {"weight": weight, "bias": 0 * model.bias}, (x,))
            assert output.norm() <= float(layer.biaffine.smoothness) * x.norm() * weight.norm()

    def test_one_image_without_a_batch(self):
        assert self.only(nn.Conv2d(3, 4, 3), 3, 5, 5).biaffine == paper.convolution(3, 1, 1, 9)

    def test_convolution_without_intercept_is_not_flagged(self):
        assert not self.only(nn.Conv2d(3, 4, 3, bias=False), 2, 3, 5, 5).unsound

    def test_rows_of_a_fully_connected_layer_are_samples_and_positions(self):
        assert self.only(nn.Linear(3, 4), 2, 5, 3).biaffine == paper.fully_connected(10)

    def test_functions_without_a_biaffine_part(self):
        model = nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Softmax(dim=1), nn.Dropout(0.0))
        layer = self.only(model, 2, 3, 4)
        assert layer.biaffine == paper.Biaffine.of(0.0, lipschitz_state=1.0)
        assert layer.nonlinear == (paper.sigmoid(24), paper.softmax(12, 2))

    def test_transposed_weights_are_the_same_layer(self):
        class Transposed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3, 4))

            def forward(self, x: Tensor) -> Tensor:
                return F.linear(x, self.weight.t())

        assert self.only(Transposed(), 2, 3).biaffine == paper.Biaffine.of(1.0)

    @pytest.mark.parametrize(
        ("pool", "flags"),
        [
            (nn.MaxPool2d(2), ()),
            (nn.MaxPool2d(3, 2), (OVERLAPPING_MAX_POOL,)),
            (nn.MaxPool2d((2, 3), (2, 2)), (OVERLAPPING_MAX_POOL,)),
            (nn.MaxPool2d(6, 1), ()),  # one patch
            (nn.AvgPool2d(2), ()),
            (nn.AvgPool2d(3, 1), ()),
            (nn.AvgPool2d(3, 1, padding=1), ()),
            (nn.AvgPool2d(3, 1, padding=1, count_include_pad=False), (UNEVEN_AVERAGE,)),
            (nn.AvgPool2d(4, 3, ceil_mode=True), ()),
            (nn.AdaptiveAvgPool2d(1), ()),
            (nn.AdaptiveAvgPool2d(4), ()),
            (nn.AdaptiveAvgPool2d(7), (UNEVEN_AVERAGE,)),
        ],
    )
    def test_pooling_is_flagged_exactly_where_it_is_expansive(self, pool, flags):
        layer = self.only(pool, 1, 1, 6, 6)
        (function,) = layer.nonlinear
        assert (float(function.lipschitz), function.unsound) == (1.0, flags)
        jacobian = torch.func.jacrev(lambda z: pool(z.reshape(1, 1, 6, 6)).reshape(-1))
        starts = [torch.zeros(36, dtype=torch.float64)] if "Avg" in str(pool) else []
        peak = torch.zeros(6, 6, dtype=torch.float64)
        peak[2, 2] = 1.0  # one entry is the maximum of every patch over it
        norms = [float(torch.linalg.matrix_norm(jacobian(point), ord=2)) for point in (*starts, peak.reshape(-1))]
        assert (max(norms) > 1 + 1e-9) is bool(flags)

    def test_a_mean_over_positions_is_an_average_pooling(self):
        class Mean(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mean(dim=(2, 3))

        assert self.only(Mean(), 2, 3, 4, 4).nonlinear == (paper.average_pool(),)

    def test_batch_normalisation_counts_positions_as_features(self):
        layer = self.only(nn.BatchNorm2d(3, eps=0.1, affine=False), 5, 3, 4, 4)
        assert layer.nonlinear == (paper.batch_norm(3 * 16, 5, 0.1),)

    @pytest.mark.parametrize(
        ("model", "shape", "message"),
        [
            (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (2, 3), "'aten.tanh' as used in module '1': in the paper"),
            (nn.Sequential(nn.Linear(3, 3), nn.GELU()), (2, 3), "'aten.gelu' as used in module '1'"),
            (nn.Softplus(beta=2.0), (2, 3), "soft-plus has β = 1, here it has β = 2"),
            (nn.Softplus(threshold=1.0), (2, 3), "here it is linear above 1"),
            (nn.BatchNorm1d(3), (4, 3), "scale_shift.*no scale and shift of their own"),
            (nn.BatchNorm1d(3, affine=False).eval(), (4, 3), "uses the statistics of the batch"),
            (nn.LayerNorm(3, elementwise_affine=False), (4, 3), "'aten.layer_norm'"),
            (nn.ConvTranspose2d(1, 1, 2), (1, 1, 3, 3), "'aten.conv_transpose2d'"),
            (nn.AvgPool2d(2, divisor_override=1), (1, 1, 4, 4), "divides by the size of its patch"),
            (nn.Sequential(*[nn.Linear(3, 3)] * 2), (2, 3), "shared with an earlier layer"),
            (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (2, 3), "here they are computed by"),
        ],
    )
    def test_what_the_paper_does_not_list_is_refused(self, model, shape, message):
        with pytest.raises(UnsupportedOperation, match=message) as refusal:
            certify_as_printed(model.double(), batch(*shape), domain=UNIT, wrt="input")
        assert 'constants="certified"' in str(refusal.value)

    def test_embeddings_are_refused(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
        with pytest.raises(UnsupportedOperation, match=r"'aten\.embedding' as used in module '0'"):
            certify_as_printed(model, torch.tensor([[1, 2]]), domain=UNIT)

    def test_casts_to_integers_and_views_as_another_type_are_no_rearrangements(self):
        aten = torch.ops.aten
        for target, kind, expected in (
            (aten.to.dtype, torch.float32, True),
            (aten.to.dtype, torch.int64, False),
            (aten.view.dtype, torch.float32, False),
        ):
            operation = str(target.overloadpacket)
            node = Node("y", operation, target, (Ref("x"), kind), {}, "", Spec((2, 3), kind))
            assert is_rearrangement(node) is expected

    def test_several_inputs_or_outputs_are_refused(self):
        class Several(nn.Module):
            def __init__(self, outputs: int) -> None:
                super().__init__()
                self.a, self.outputs = nn.Linear(3, 3).double(), outputs

            def forward(self, x: Tensor, y: Tensor | None = None):
                result = self.a(x)
                if y is not None:
                    return result + y
                return (result, result.sigmoid()) if self.outputs == 2 else (result.sigmoid(), result)[-1]

        with pytest.raises(UnsupportedOperation, match="one input and one output, this model 2"):
            certify_as_printed(Several(1), (batch(2, 3), batch(2, 3)), domain=UNIT)
        with pytest.raises(UnsupportedOperation, match="one input and one output, this model 2"):
            certify_as_printed(Several(2), batch(2, 3), domain=UNIT)


class TestDomains:
    """What does not fit is refused with the remedy."""

    def test_meta_needs_the_norm_of_the_input(self):
        with torch.device("meta"):
            model, x = zoo.mlp((3, 4, 2)), torch.empty(5, 3)
        with pytest.raises(DomainError, match="pass input_norm"):
            certify_as_printed(model, x, domain=UNIT)

    def test_meta_has_no_centre_but_the_origin(self):
        with torch.device("meta"):
            model, x = zoo.mlp((3, 4, 2)), torch.empty(5, 3)
        for options in ({"domain": Ball(1.0)}, {"domain": UNIT, "wrt": "input"}):
            with pytest.raises(DomainError, match=r"'0\.weight' is on the meta device"):
                certify_as_printed(model, x, input_norm=1.0, **options)

    def test_no_parameter_varies(self):
        with pytest.raises(DomainError, match="nothing varies"):
            certify_as_printed(mlp(3, 2).requires_grad_(False), batch(5, 3), domain=UNIT)

    def test_a_centre_must_fit(self):
        model, x = mlp(3, 2), batch(5, 3)
        with pytest.raises(DomainError, match=r"no entry for '0\.weight'"):
            certify_as_printed(model, x, domain=ProductBall(1.0, {}))
        wrong = {"0.weight": torch.zeros(1), "0.bias": torch.zeros(2)}
        with pytest.raises(DomainError, match=r"has shape \(1,\), not \(2, 3\)"):
            certify_as_printed(model, x, domain=ProductBall(1.0, wrong))

    def test_radii_must_name_the_blocks(self):
        with pytest.raises(DomainError, match="do not name exactly the blocks"):
            certify_as_printed(mlp(3, 2), batch(5, 3), domain=ProductBall({"1": 1.0}))

    def test_other_domains_are_refused(self):
        with pytest.raises(DomainError, match="for balls, not for str"):
            certify_as_printed(mlp(3, 2), batch(5, 3), domain="everywhere")


class TestText:
    """The table never calls a flagged number guaranteed."""

    def test_flagged(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Softplus()).double()
        text = str(certify_as_printed(model, batch(1, 1, 6, 6), domain=UNIT))
        assert text.startswith("Constants as the paper prints them with respect to parameters: each block")
        assert f"not a bound: {CONVOLUTION_BIAS}" in text
        assert "no step size is guaranteed" in text
        assert "guaranteed step size" not in text

    def test_not_flagged(self):
        assert "guaranteed step size 1/L" in str(certify_as_printed(mlp(3, 4, 1), batch(1, 3), domain=UNIT))

    def test_no_step_size_for_vectors(self):
        assert "step size" not in str(certify_as_printed(mlp(3, 4, 2), batch(5, 3), domain=UNIT))

    def test_kinks_are_named(self):
        text = str(certify_as_printed(mlp(3, 4, 2, activation=nn.ReLU), batch(5, 3), domain=UNIT))
        assert "L is infinite:\n  1 (relu): the paper defines no smoothness" in text
