"""Which operations the reader knows, which domains it takes, and what it prints."""

from __future__ import annotations

import math

import pytest
import torch
from reader_models import UNIT, batch, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from surefoot import Chain, paper, zoo
from surefoot.domains import Ball, DomainError, ProductBall
from surefoot.errors import UnsupportedOperation
from surefoot.graph import Graph, Leaf, Node, Ref, Source, Spec
from surefoot.graph.structure import assemble
from surefoot.paper.layers import CONVOLUTION_BIAS, OVERLAPPING_MAX_POOL
from surefoot.paper.operations import UNEVEN_AVERAGE, is_rearrangement
from surefoot.paper.reader import certify_as_printed, read

aten = torch.ops.aten


def single(target, spec: Spec, *arguments, shape: tuple[int, ...] = (2, 3)) -> tuple[Graph, Node]:
    """A graph of one operation on one tensor."""
    node = Node("y", str(target.overloadpacket), target, (Ref("x"), *arguments), {}, "", spec)
    leaf = Leaf("x", "x", Source.INPUT, Spec(shape, torch.float32))
    return assemble({"x": leaf}, [node], ("y",), {}, {}), node


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
        for target, kind, expected in (
            (aten.to.dtype, torch.float32, True),
            (aten.to.dtype, torch.int64, False),
            (aten.view.dtype, torch.float32, False),
        ):
            assert is_rearrangement(*single(target, Spec((2, 3), kind), kind)) is expected

    @pytest.mark.parametrize(
        ("target", "shape", "arguments"),
        [
            (aten.roll.default, (6,), ([2], [0])),
            (aten.flip.default, (2, 3), ([1],)),
            (aten.mT.default, (2, 3), ()),
            (aten.movedim.int, (2, 3, 4), (0, 2)),
            (aten.expand.default, (2, 1), ([2, 3],)),
            (aten.expand.default, (2, 3), ([1, 2, 3],)),
            (aten.repeat.default, (3,), ([2],)),
            (aten.select.int, (2, 3), (0, 1)),
            (aten.unfold.default, (6,), (0, 3, 2)),  # as many numbers, one of them twice and one not at all
            (aten.im2col.default, (1, 1, 1, 6), ([1, 3], [1, 1], [0, 0], [1, 2])),
            (aten.tril.default, (3, 3), ()),
            (aten.diagonal.default, (3, 3), ()),
            (aten.constant_pad_nd.default, (4,), ([1, -1], 5.0)),
            (aten.pixel_shuffle.default, (1, 4, 2, 2), (2,)),
            (aten.channel_shuffle.default, (1, 4, 2, 2), (2,)),
            (aten.squeeze.default, (1, 4), ()),
        ],
    )
    def test_a_rearrangement_returns_every_number_once(self, target, shape, arguments):
        numbers = torch.arange(1.0, 1.0 + math.prod(shape)).reshape(shape)
        result = target(numbers, *arguments)
        graph, node = single(target, Spec(tuple(result.shape), result.dtype), *arguments, shape=shape)
        every = torch.equal(result.flatten().sort().values, numbers.flatten().sort().values)
        assert is_rearrangement(graph, node) is every

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
        assert text.startswith("Nothing is proved about steps: ")
        assert "\nConstants as the paper prints them with respect to parameters: each block" in text
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
