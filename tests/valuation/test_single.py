"""Passes in single precision: intervals against exact arithmetic, kernels against those in double, and limits."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from attack.exact_subject import Subject
from surefoot.calculus.leaves import captured
from surefoot.errors import SurefootError
from surefoot.scalar import supremum
from surefoot.valuation.single import KERNEL, PULL, SMALL, UNIT, is_exact_here, pull_of
from surefoot.valuation.tape import Tape, tape_of
from surefoot.valuation.valuer import Evaluation, EvaluationError, Valuer
from valuation.elementwise import OPERATIONS
from valuation.families import FAMILIES
from valuation.test_exact_values import is_within

SEEDS, FURTHER = range(60_000, 60_006), range(20_000, 20_060)  # of each family, four intervals each
ACTIVATIONS = ("relu", "relu6", "leaky_relu", "tanh", "sigmoid", "silu", "gelu", "softplus", "elu")


def narrowed(subject: Subject) -> Subject:
    """The same in single precision."""
    y = subject.y.float() if subject.y.is_floating_point() else subject.y
    x = subject.x.float() if subject.x.is_floating_point() else subject.x
    return replace(subject, model=subject.model.float(), x=x, y=y)


def valuer_of(subject: Subject) -> Valuer | None:
    return Valuer.of(subject.model, subject.x, subject.loss.bound_to(subject.y), single=True).in_single


def evaluations(subject: Subject) -> Iterator[Evaluation]:
    """By reverse mode, by forward mode, with what was learned elsewhere, in short; none without such a pass."""
    here, elsewhere = valuer_of(subject), valuer_of(subject)
    if here is None or elsewhere is None:
        return
    weights = dict(subject.model.named_parameters())
    for derivatives in (True, False):
        yield here.enclosed(here.run(weights, derivatives=derivatives))
    for factor in (0.5, 1.01):
        with suppress(EvaluationError):
            elsewhere.enclosed(elsewhere.run({path: value.detach() * factor for path, value in weights.items()}))
    yield elsewhere.enclosed(elsewhere.run(weights))
    elsewhere._forward_decides = True
    yield elsewhere.enclosed(elsewhere.run(weights, light=True), math.inf)


def judged(family: str, seeds: range) -> int:
    count = 0
    for seed in seeds:
        with suppress(SurefootError):
            subject = narrowed(FAMILIES[family](seed))
            for found in evaluations(subject):
                if math.isfinite(found.error):
                    assert is_within(subject, found) is not False, f"{family}({seed}) [{subject.name}]: {found}"
                    count += 1
    return count


IN_DOUBLE = ("inverses", "attention", "recurrent")  # families without a pass in single precision


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in IN_DOUBLE])
def test_the_exact_value_is_inside(family: str) -> None:
    assert judged(family, SEEDS) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exact_value_is_inside_in_four_thousand_more_cases(family: str) -> None:
    judged(family, FURTHER)


def numbers() -> Tensor:
    """Numbers of single precision of all sizes, one of every 40,000, and their neighbours."""
    bits = torch.arange(0, 2**31 - 2**23, 40_009, dtype=torch.int64)
    positive = torch.cat([bits, bits + 1]).to(torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


class _Behind(nn.Module):
    """A function of an input that a parameter enters, and one number of it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.shift, self.function = nn.Parameter(torch.zeros(1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.shift).sum()


def _narrow(op: str) -> Iterator[tuple[Tape, str, Tensor]]:
    """The single-precision tapes of an activation with its options, its name there, and numbers for it."""
    x = numbers()
    for function in OPERATIONS[op].values():
        tape = tape_of(captured(_Behind(function), x)[0], single=True)
        [name] = [node.name for node in tape.varying if node.op == op]
        if name in tape.narrow:
            yield tape, name, x


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_within_16_units(activation: str) -> None:
    """Against those in double precision, whose error is nothing here and proved elsewhere."""
    tried = 0
    for tape, name, x in _narrow(f"aten.{activation}"):
        node = next(node for node in tape.varying if node.name == name)
        steepest = float(supremum(tape.asked[name].args[1], 1))
        fixed = {**tape.graph.constants, **tape.graph.held}
        for laid in (x, x[: len(x) // 2 * 2].reshape(2, -1).t()):
            computed = tape._compute(node, {**fixed, node.inputs[0]: laid})
            exact = Tape(tape.graph)._compute(node, {**fixed, node.inputs[0]: laid.double()})
            assert computed.dtype is torch.float32
            known = computed.isfinite()
            off = (computed.double() - exact).abs()[known]
            allowed = KERNEL * (exact.abs() + steepest * laid.double().abs())[known] + SMALL
            assert bool((off <= allowed.nan_to_num(nan=math.inf)).all())  # one of them jumps
            tried += int(known.sum())
    assert tried > 100_000 or activation == "leaky_relu"  # whose usual slope is no number of single precision


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pull_backs_of_activations_are_good_to_fourteen_bits(activation: str) -> None:
    torch.manual_seed(0)
    for tape, name, _ in _narrow(f"aten.{activation}"):
        node = next(node for node in tape.varying if node.name == name)
        fixed = {**tape.graph.constants, **tape.graph.held}
        x, costate = torch.randn(20_000) * 4, torch.randn(20_000)
        slopes = []
        for one, t in ((tape, x.clone()), (Tape(tape.graph), x.double())):
            t.requires_grad_()
            value = one._compute(node, {**fixed, node.inputs[0]: t})
            slopes.append(torch.autograd.grad(value, t, costate.to(value.dtype))[0].double())
        assert float((slopes[0] - slopes[1]).norm()) <= PULL * float(costate.norm())


PRODUCTS = {
    "linear": (lambda x, w: F.linear(x, w), (40, 300), (20, 300)),
    "three by three": (lambda x, w: F.conv2d(x, w, padding=1), (20, 16, 12, 12), (16, 16, 3, 3)),
    "one image": (lambda x, w: F.conv2d(x, w, padding=1), (1, 16, 24, 24), (32, 16, 3, 3)),
    "five by five": (lambda x, w: F.conv2d(x, w, padding=2), (1, 8, 30, 30), (8, 8, 5, 5)),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2), (3, 4, 11, 11), (6, 4, 3, 3)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=4), (3, 8, 9, 9), (8, 2, 3, 3)),
    "sequence": (lambda x, w: F.conv1d(x, w, dilation=2), (3, 8, 40), (4, 8, 3)),
    "volume": (lambda x, w: F.conv3d(x, w), (2, 3, 6, 6, 6), (4, 3, 3, 3, 3)),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_sums_of_products(name: str, last: bool) -> None:
    """Entry by entry, with entries of all sizes: methods of Winograd and Fourier mix those that do not meet."""
    function, shape, weights = PRODUCTS[name]
    torch.manual_seed(0)
    x = torch.randn(shape) * 10.0 ** torch.randint(-6, 7, shape)
    w = torch.randn(weights) * 10.0 ** torch.randint(-3, 4, weights)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    count = math.prod(weights[1:])
    with torch.backends.nnpack.flags(enabled=False):
        z = function(x, w)
    off = (z.double() - function(x.double(), w.double())).abs()
    allowed = (count + 8) * UNIT * function(x.double().abs(), w.double().abs()) + count * SMALL
    assert bool((off <= allowed).all())


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)), x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_evaluate_in_single_precision_only_if_that_is_enough(dtype: torch.dtype) -> None:
    model, x, y = network()
    model, x = model.to(dtype), x.to(dtype)
    for given, objective in ((x, sf.CrossEntropy(y)), ([(x[:20], y[:20]), (x[20:], y[20:])], sf.CrossEntropy())):
        exact = sf.evaluate(model, given, objective)
        rough = sf.evaluate(model, given, objective, atol=1e-2)
        assert exact.error < 1e-12 < rough.error <= 1e-2
        assert abs(rough.value - exact.value) <= rough.error + exact.error
        assert sf.evaluate(model, given, objective, atol=1e-9).error < 1e-9
    wide, x = copy.deepcopy(model).double(), x.double()
    assert sf.evaluate(wide, x, sf.CrossEntropy(y), atol=1e-2).error < 1e-12


def deep() -> tuple[nn.Module, Tensor, Tensor]:
    """Where second order is too large for single precision."""
    _, x, y = network()
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(6))
    return nn.Sequential(nn.Linear(6, 16), *blocks, nn.Linear(16, 3)), x, y


@pytest.mark.parametrize("kind", ["batch", "loader", "deep"])
def test_steps_are_proved_in_single_precision_if_that_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them descend where the objective is evaluated in double."""
    passes = {True: 0, False: 0}
    run = Tape.run

    def counted(self: Tape, *args, **options):
        passes[self.single] += 1
        return run(self, *args, **options)

    model, x, y = deep() if kind == "deep" else network()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    given = ([(x[:24], y[:24]), (x[24:], y[24:])],) if kind == "loader" else (x, y)
    first = before = sf.evaluate(model, x, sf.CrossEntropy(y))
    for _ in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(Tape, "run", counted)
            optimizer.step(*given)
        record, after = optimizer.history[-1], sf.evaluate(model, x, sf.CrossEntropy(y))
        assert record.step_size > 0
        assert after.upper < before.lower
        assert 0 < record.proved_decrease <= before.upper - after.lower
        before = after
    assert before.value < 0.5 * first.value
    assert passes[True] > 0
    assert (passes[False] > passes[True]) == (kind == "deep")


class _Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1


def test_what_is_not_exact_in_single_precision_is_left_to_double() -> None:
    model, x, y = network()
    assert is_exact_here({"x": x})
    with torch.autocast("cpu"):
        assert not is_exact_here({"x": x})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("medium")
        try:
            assert not is_exact_here({"x": x})
        finally:
            torch.set_float32_matmul_precision("highest")
    mkldnn = torch.backends.mkldnn
    for setting in (torch.backends, mkldnn, mkldnn.matmul, mkldnn.conv):
        before, setting.fp32_precision = setting.fp32_precision, "bf16"
        try:
            assert not is_exact_here({"x": x})
        finally:
            setting.fp32_precision = before
    assert is_exact_here({"x": x})
    objective = sf.CrossEntropy(y)
    assert Valuer.of(model, x, objective, single=True).in_single is not None
    assert Valuer.of(copy.deepcopy(model).double(), x.double(), objective, single=True).in_single is None
    shifted = nn.Sequential(_Shifted(), model)  # by a number that single precision does not have
    assert Valuer.of(shifted, x, objective, single=True).in_single is None


def test_what_is_too_large_for_single_precision_is_told_in_double() -> None:
    model, x, y = nn.Linear(2, 1), torch.full((3, 2), 1e25), torch.zeros(3, 1)
    nn.init.constant_(model.weight, 1e15)
    valuer = Valuer.of(model, x, sf.Square(y), single=True)
    assert valuer.in_single is not None
    assert not math.isfinite(valuer.in_single.run(dict(model.named_parameters())).value)
    assert valuer.evaluate(dict(model.named_parameters()), enough=1e70).value > 1e79


def test_an_id_that_occurs_often_adds_up_many_costates():
    """Eight thousand copies of one row: in single precision the sum of their costates is off by more than 2⁻¹⁴."""
    count = 8192

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 2))

        def forward(self, ids: Tensor) -> Tensor:
            return F.embedding(ids, self.table)

    graph = captured(Lookup(), torch.ones(count, dtype=torch.long))[0]
    (node,) = (node for node in graph.nodes if node.op == "aten.embedding")
    costate = torch.full((count, 2), 0.1)
    table = torch.ones(3, 2, requires_grad=True)
    (pulled,) = torch.autograd.grad(F.embedding(torch.ones(count, dtype=torch.long), table), table, costate)
    exact = costate.double().sum(dim=0)
    off = float((pulled[1].double() - exact).norm() / (math.sqrt(count) * costate.double().norm()))
    assert PULL < off < pull_of(node, graph)
