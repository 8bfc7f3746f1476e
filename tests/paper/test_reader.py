"""Reading a torch model as the paper's layers, and Algorithm 4 on it."""

from __future__ import annotations

import math

import pytest
import torch
from paper_judges import Balls, attack
from reader_models import UNIT, batch, close, mlp, same
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import Chain, implicit, paper, zoo
from surefoot.certifying import certify
from surefoot.domains import Ball, DomainError, ProductBall
from surefoot.errors import UnsupportedOperation
from surefoot.paper.layers import CONVOLUTION_BIAS, OVERLAPPING_MAX_POOL
from surefoot.paper.reader import certify_as_printed, read


def norms_of(model: nn.Sequential) -> list[float]:
    """The norm of the parameters of each fully connected layer."""
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in model if isinstance(m, nn.Linear)]
    return [float(vector.detach().norm()) for vector in vectors]


def test_layers_of_vgg_are_those_of_the_appendix():
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


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t())


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


class Added(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x)


class Ends(nn.Module):
    """A layer whose result is used twice, or not at all, or with a second input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        result = self.a(x)
        if self.kind == "two":
            return result, result.sigmoid()
        return result if y is None else result + y


def only(model: nn.Module, *shape: int) -> paper.Computation:
    (layer,) = read(Chain(model.double(), batch(*shape)))
    return layer


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Conv2d(3, 4, 5, 2), (7, 3, 11, 11), paper.convolution(5, 2, 7, 16)),
        (nn.Conv2d(3, 4, 3), (3, 5, 5), paper.convolution(3, 1, 1, 9)),  # one image without a batch
        (nn.Conv2d(3, 4, 3, bias=False), (2, 3, 5, 5), paper.Biaffine.of(3.0)),
        (nn.Linear(3, 4), (2, 5, 3), paper.fully_connected(10)),
        (nn.Linear(3, 4, bias=False), (2, 3), paper.Biaffine.of(1.0)),
        (Transposed(), (2, 3), paper.Biaffine.of(1.0)),
        (nn.Sequential(nn.Flatten(), nn.Sigmoid(), nn.Softmax(dim=1), nn.Dropout(0.0)), (2, 3, 4),
         (paper.sigmoid(24), paper.softmax(12, 2))),
        (Mean(), (2, 3, 4, 4), (paper.average_pool(),)),
        (nn.BatchNorm2d(3, eps=0.1, affine=False), (5, 3, 4, 4), (paper.batch_norm(3 * 16, 5, 0.1),)),
    ],
)  # fmt: skip
def test_constants_of_operations(model, shape, expected):
    layer = only(model, *shape)
    if isinstance(expected, paper.Biaffine):
        assert (layer.biaffine, layer.nonlinear) == (expected, ())
    else:
        assert (layer.biaffine, layer.nonlinear) == (paper.Biaffine.of(0.0, lipschitz_state=1.0), expected)


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
        (nn.AvgPool2d(2, padding=1, count_include_pad=False), ()),
        (nn.AdaptiveAvgPool2d(1), ()),
        (nn.AdaptiveAvgPool2d(3), ()),
    ],
)
def test_pooling_is_flagged_exactly_where_it_is_expansive(pool, flags):
    (function,) = only(pool, 1, 1, 6, 6).nonlinear
    assert (float(function.lipschitz), function.unsound) == (1.0, flags)
    jacobian = torch.func.jacrev(lambda z: pool(z.reshape(1, 1, 6, 6)).reshape(-1))
    starts = [torch.zeros(36, dtype=torch.float64)] if "Avg" in str(pool) else []
    peak = torch.zeros(6, 6, dtype=torch.float64)
    peak[2, 2] = 1.0  # one entry is the maximum of every patch over it
    norms = [float(torch.linalg.matrix_norm(jacobian(point), ord=2)) for point in (*starts, peak.reshape(-1))]
    assert (max(norms) > 1 + 1e-9) is bool(flags)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (2, 3), "'aten.tanh' as used in module '1': in the paper"),
        (nn.Sequential(nn.Linear(3, 3), nn.GELU()), (2, 3), "'aten.gelu' as used in module '1'"),
        (nn.Softplus(beta=2.0), (2, 3), "soft-plus has β = 1, here it has β = 2"),
        (nn.Softplus(threshold=1.0), (2, 3), "here it is linear above 1"),
        (nn.BatchNorm1d(3), (4, 3), "scale_shift.*no scale and shift of their own"),
        (nn.BatchNorm1d(3, affine=False).eval(), (4, 3), "uses the statistics of the batch"),
        (nn.LayerNorm(3, elementwise_affine=False), (4, 3), "'aten.layer_norm'"),
        (nn.Conv2d(2, 3, (3, 1)), (4, 2, 9, 9), "k × k patches"),
        (nn.Conv2d(2, 3, 3, dilation=2), (4, 2, 9, 9), "k × k patches"),
        (nn.MaxPool2d(2, dilation=2), (1, 1, 6, 6), "neighbouring entries"),
        (nn.AvgPool2d(2, divisor_override=1), (1, 1, 4, 4), "divides by the size of its patch"),
        (nn.AvgPool2d(3, 1, padding=1, count_include_pad=False), (1, 1, 6, 6), "divides by the size of its patch"),
        (nn.AvgPool2d(4, 3, ceil_mode=True), (1, 1, 6, 6), "divides by the size of its patch"),
        (nn.AdaptiveAvgPool2d(4), (1, 1, 6, 6), "of one size"),
        (nn.Sequential(*[nn.Linear(3, 3)] * 2), (2, 3), "shared with an earlier layer"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (2, 3), "here they are computed by"),
        (Added(), (2, 3), "on an earlier one or on several"),
        (Ends("two"), (2, 3), "one input and one output, this model 2"),
        (implicit.ArgMin(lambda x, b: (b - x).square().sum(), 3), (2, 3), "constants of their own"),
    ],
)
def test_what_the_paper_does_not_list_is_refused(model, x, message):
    with pytest.raises(UnsupportedOperation, match=message) as refusal:
        certify_as_printed(model.double(), batch(*x), domain=UNIT, wrt="input")
    assert 'constants="certified"' in str(refusal.value)
    with pytest.raises(UnsupportedOperation, match="one input and one output, this model 2"):
        certify_as_printed(Ends("").double(), (batch(2, 3), batch(2, 3)), domain=UNIT)


def on_meta(**options):
    with torch.device("meta"):
        model, x = zoo.mlp((3, 4, 2)), torch.empty(5, 3)
    return certify_as_printed(model, x, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: on_meta(domain=UNIT), "pass input_norm"),
        (lambda: on_meta(domain=Ball(1.0), input_norm=1.0), r"'0\.weight' is on the meta device"),
        (lambda: on_meta(domain=UNIT, wrt="input", input_norm=1.0), r"'0\.weight' is on the meta device"),
        (lambda: certify_as_printed(mlp(3, 2).requires_grad_(False), batch(5, 3), domain=UNIT), "nothing varies"),
        (lambda: certify_as_printed(mlp(3, 2), batch(5, 3), domain=ProductBall(1.0, {})), r"no entry for '0\.w"),
        (lambda: certify_as_printed(
            mlp(3, 2), batch(5, 3),
            domain=ProductBall(1.0, {"0.weight": torch.zeros(1), "0.bias": torch.zeros(2)})), r"has shape \(1,\)"),
        (lambda: certify_as_printed(mlp(3, 2), batch(5, 3), domain=ProductBall({"1": 1.0})), "do not name"),
        (lambda: certify_as_printed(mlp(3, 2), batch(5, 3), domain="everywhere"), "for balls, not for str"),
    ],
)  # fmt: skip
def test_domains_that_do_not_fit_are_refused(call, message):
    with pytest.raises(DomainError, match=message):
        call()


def test_the_table_never_calls_a_flagged_number_guaranteed():
    text = str(certify_as_printed(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Softplus()).double(), batch(1, 1, 6, 6),
                                  domain=UNIT))  # fmt: skip
    assert text.startswith("Nothing is proved about steps: ")
    assert f"not a bound: {CONVOLUTION_BIAS}" in text
    assert "guaranteed step size" not in text
    assert "guaranteed step size 1/L" in str(certify_as_printed(mlp(3, 4, 1), batch(1, 3), domain=UNIT))
    assert "step size" not in str(certify_as_printed(mlp(3, 4, 2), batch(5, 3), domain=UNIT))
    kinks = str(certify_as_printed(mlp(3, 4, 2, activation=nn.ReLU), batch(5, 3), domain=UNIT))
    assert "L is infinite:\n  1 (relu): the paper defines no smoothness" in kinks
