"""Values with errors, against 200 bits and against errors that are all as large and as bad as they may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.frozen_values import cases as frozen
from flint import arb, ctx
from torch import Tensor

import surefoot as sf
from program.models import Case, table
from surefoot.bounds.scalars import pieces
from surefoot.program import Builder, Program, Scalar, differentiate, trace
from surefoot.value.entries import Entries
from surefoot.value.joint import Joint
from surefoot.value.norms import slope_over
from surefoot.value.rounding import UNIT, local_error
from surefoot.value.running import Runner
from surefoot.value.valuer import Valuer
from value import exact

CASES = table()
Subject = tuple[Joint, dict[str, Tensor], dict[str, Tensor]]  # with weights and data


def subject(case: Case, dtype: torch.dtype = torch.float64) -> Subject:
    model, args, loss = case
    model, args = model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
    program = trace(model, args, loss)
    names = [name for name in program.inputs if name not in program.parameters]
    data = dict(zip(names, [x for x in args if x.is_floating_point()], strict=True))
    weights = {name: value.detach() for name, value in model.named_parameters() if name in program.parameters}
    return Joint(program, data), weights, data


def truth(joint: Joint, weights: dict[str, Tensor], data: dict[str, Tensor]) -> arb:
    program = joint.value_program
    return exact.run(program, {**weights, **data})[program.outputs[0]].reshape(-1)[0]


def contains(evaluation: Any, value: arb) -> bool:
    old, ctx.prec = ctx.prec, exact.BITS
    try:
        return bool(abs(arb(evaluation.value) - value) <= arb(evaluation.error))
    finally:
        ctx.prec = old


@pytest.mark.parametrize("name", CASES)
def test_the_exact_value_is_within_the_error(name: str) -> None:
    """At first, by entries, at weights further and further away, and from passes without costates."""
    joint, weights, data = subject(CASES[name])
    valuer, value = Valuer(joint), truth(joint, weights, data)
    first = valuer.enclosed(valuer.run(weights))
    assert contains(first, value)
    assert first.error < 1e-10
    by_entries = Valuer(joint)
    by_entries._level = 2
    assert contains(by_entries.enclosed(by_entries.run(weights)), value)
    for factor in (1.001, 1.7):
        moved = {path: w * factor for path, w in weights.items()}
        again = valuer.enclosed(valuer.run(moved))
        assert contains(again, truth(joint, moved, data))
    ahead = valuer.enclosed(valuer.run(weights, derivatives=False), 1e3)
    assert contains(ahead, value)


@pytest.mark.parametrize("name", ["mlp Tanh()", "mlp GELU(approximate='none')", "cnn", "vgg", "encoder"])
def test_single_precision(name: str) -> None:
    joint, weights, data = subject(CASES[name], torch.float32)
    assert joint.fits_single
    valuer = Valuer(joint, single=True)
    evaluation = valuer.enclosed(valuer.run(weights))
    assert contains(evaluation, truth(joint, weights, data))
    assert evaluation.error < 3e-3 * max(1.0, abs(evaluation.value))


def attacked(joint: Joint, clean: list[Any], found: Entries, signs: Any) -> float:
    """The value where every operation is off by its whole local error."""
    program = joint.program
    tensors = [value if not node.inputs else None for node, value in zip(program.nodes, clean, strict=True)]
    for k, e in joint.bound.errors.items():
        tensors[k] = tensors[k] + e * signs(k, e)
    for node in program.nodes[: program.outputs[0] + 1]:
        if node.inputs:
            z = node.primitive.run([tensors[k] for k in node.inputs], **node.options)
            own = found.local.get(node.index) if node.index in program.costates else None
            tensors[node.index] = z if own is None else z + own.expand(z.shape) * signs(node.index, z)
    return float(tensors[program.outputs[0]])


ATTACKED = [name for name in CASES if name not in ("grouped", "local response", "chosen", "pooled")]


@pytest.mark.parametrize("name", ATTACKED)
def test_no_errors_are_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a unit of 2⁻³⁰, every operation is off by all it may be: with its costate's sign, and at random."""
    monkeypatch.setitem(UNIT, torch.float64, 2.0**-30)
    joint, weights, _ = subject(CASES[name])
    valuer = Valuer(joint)
    run = valuer.run(weights)
    by_norms, tensors = (
        valuer.enclosed(run),
        [None if k not in valuer._given else v for k, v in enumerate(run.tensors)],
    )
    valuer._plain.run(tensors)
    program = joint.program
    found = Entries(program, tensors.__getitem__, valuer._judged(), joint.bound.errors, program.costates)
    valuer._level = 2
    by_entries = valuer.enclosed(run)
    costates, worst = joint.program.costates, 0.0
    for turn in (1.0, -1.0):
        signs = lambda k, z: turn * tensors[costates[k]].sign()  # noqa: E731, B023
        worst = max(worst, abs(attacked(joint, tensors, found, signs) - run.value))
    draw = torch.Generator().manual_seed(0)
    noise = lambda k, z: torch.randn(z.shape, generator=draw, dtype=z.dtype).sign()  # noqa: E731
    worst = max(worst, abs(attacked(joint, tensors, found, noise) - run.value))
    assert worst <= by_entries.error
    assert worst <= by_norms.error
    assert worst >= 0.3 * by_entries.error or by_entries.error > 1e-6 * abs(run.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_local_errors(name: str, dtype: torch.dtype) -> None:
    """Of every primitive, at the arguments as they were computed."""
    if name == "lstm" and dtype == torch.float32:
        pytest.skip("oneDNN's recurrent layers have no rule")
    joint, weights, _ = subject(CASES[name], dtype)
    program, costates = joint.program, joint.program.costates
    given = {node.index for node in program.nodes if not node.inputs}
    runner = Runner(program, program.outputs, given, costates, plain=True)
    tensors: list[Any] = [None] * len(program.nodes)
    for k, value in {**program.constants, **joint.bound.tensors}.items():
        tensors[k] = value.to(dtype) if value.is_floating_point() else value
    for path, value in weights.items():
        tensors[program.inputs[path]] = value
    runner.run(tensors)
    old, ctx.prec = ctx.prec, exact.BITS
    try:
        for node in program.nodes:
            if node.inputs and node.index in runner.live:
                judge(node, tensors, local_error(node, tensors.__getitem__, UNIT[dtype], node.index in costates))
    finally:
        ctx.prec = old


def judge(node: Any, tensors: list[Any], error: Tensor | None) -> None:
    try:
        arrays = [exact.exactly(t) if (t := tensors[k]).is_floating_point() else t for k in node.inputs]
        right = np.asarray(exact.computed(node, arrays), dtype=object).reshape(-1)
    except NotImplementedError:
        return
    limit = (torch.zeros(()) if error is None else error).double().expand(node.shape).reshape(-1).tolist()
    for x, z, e in zip(right, tensors[node.index].double().reshape(-1).tolist(), limit, strict=True):
        assert abs(x - arb(z)) <= arb(e) + arb(2) ** -120, str(node)


NAMES = sorted({*exact.JUDGES, "relu", "abs", "relu6", "hardsigmoid", "hardswish", "selu"} - {"softplus"})
PARAMETERS = {"leaky_relu": (0.01,), "hardtanh": (-0.3, 0.7), "elu": (0.7,), "celu": (0.6,), "huber": (0.5,)}
FUNCTIONS = [
    *(Scalar(name, PARAMETERS.get(name, ())) for name in (*NAMES, *PARAMETERS)),
    *(Scalar("softplus", (beta,)) for beta in (1.0, 3.0)),
    *(Scalar("power", (exponent,)) for exponent in (3.0, -1.5)),
]
POSITIVE = {"log", "sqrt", "rsqrt", "power", "log1p"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_kernels_of_scalar_functions(function: Scalar, dtype: torch.dtype) -> None:
    """The local error holds for functions and slopes, and what norms take for it (512 units) is no less."""
    draw = torch.Generator().manual_seed(1)
    sizes = 10 ** torch.empty(120, dtype=torch.float64).uniform_(-6, 1.6, generator=draw)
    x = (sizes * torch.randn(120, generator=draw, dtype=torch.float64).sign()).to(dtype)
    x = x.abs() if function.name in POSITIVE else x
    kinks = [kink for kink, _ in pieces(function.name, function.parameters).kinks]
    x = x[[not any(abs(v - kink) < 1e-3 for kink in kinks) for v in x.tolist()]]
    builder = Builder()
    given = builder.input("x", x.shape)
    functions = function, function.derivative, function.derivative.derivative
    program = builder.finish([builder.emit("scalar", given, function=f) for f in functions])
    tensors: list[Any] = [x, *[None] * 3]
    Runner(program, program.outputs, {0}, (), plain=True).run(tensors)
    low, high = float(x.abs().min()), float(x.abs().max())
    least = low if function.name in POSITIVE else None
    old, ctx.prec = ctx.prec, exact.BITS
    try:
        for k in sorted({*program.outputs} - set(program.constants)):
            node, z = program.nodes[k], tensors[k].double()
            judge(node, tensors, local_error(node, tensors.__getitem__, UNIT[dtype]))
            right = exact.computed(node, [exact.exactly(x)]).reshape(-1)
            off = (torch.tensor([float(v) for v in right], dtype=torch.float64) - z).norm()
            assert not off > 512 * UNIT[dtype] * (z.norm() + slope_over(node, 1, high, least) * x.double().norm())
    finally:
        ctx.prec = old


def test_what_the_data_determine_counts() -> None:
    """An operation on the inputs alone rounds, and its error reaches the value."""
    builder = Builder()
    x, w = builder.input("x", (3,)), builder.input("w", (3,), parameter=True)
    shifted = builder.emit("scalar", x, function=Scalar("exp"))
    product = builder.emit("sum", builder.emit("mul", shifted, w), dims=(0,), keepdim=False)
    data = {"x": torch.tensor([1.0, 30.0, 2.0], dtype=torch.float64)}
    weights = {"w": torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)}
    joint = Joint(builder.finish([product]), data)
    assert list(joint.given) == [joint.program.inputs[f"#{shifted}"]]
    evaluation = Valuer(joint).enclosed(Valuer(joint).run(weights))
    assert contains(evaluation, truth(joint, weights, data))
    assert evaluation.error > 2.0**-53 * math.exp(30)


def test_gradients_are_those_of_the_program() -> None:
    for name in ("mlp Tanh()", "vgg", "encoder", "lstm", "pinn"):
        joint, weights, data = subject(CASES[name])
        valuer = Valuer(joint)
        found = valuer.gradient(valuer.run(weights))
        program: Program = differentiate(joint.value_program)
        for path, right in zip(program.parameters, program.results({**weights, **data})[1:], strict=True):
            assert torch.allclose(found[path], right, rtol=1e-9, atol=1e-12)


def test_what_norms_leave_open_is_decided_by_entries() -> None:
    """A GELU that is written out has slopes in the thousands whose product is 1."""
    pytest.importorskip("transformers")
    (case,) = [case for case in frozen() if case.name == "GPT-2, 2 layers, weights × 4"]
    model, x = case.subject(torch.float64)
    evaluation = sf.evaluate(model, x, case.loss)
    assert evaluation.error < 1e-7
    loss = Valuer.of(model, x, case.loss)
    assert abs(loss.run(dict(model.named_parameters())).value - evaluation.value) <= evaluation.error
