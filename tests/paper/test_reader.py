"""Reading a torch model as the paper's layers, and Algorithm 4 on it: VGG and perceptrons."""

from __future__ import annotations

import math

import pytest
import torch
from paper_judges import Balls, attack
from reader_models import SMOOTH, UNIT, batch, close, mlp, same
from torch import Tensor, nn

from surefoot import Chain, paper, zoo
from surefoot.certifying import certify
from surefoot.domains import Ball, ProductBall
from surefoot.paper.layers import CONVOLUTION_BIAS
from surefoot.paper.reader import certify_as_printed, read


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
