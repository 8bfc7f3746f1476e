"""Each primitive: its shape, its transpose against torch.autograd, and the transpose of that."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from surefoot.program import PRIMITIVES, SCALARS, Builder, Scalar

INDEX = torch.tensor([[0, 5, 5], [3, 1, 0]])
ROWS = torch.tensor([2, 0, 2, 1])
MASK = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]).double()
CONV = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}
WINDOWS = {"kernel": (2, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
CASES: list[tuple[str, list[tuple[int, ...] | Tensor], dict]] = [
    ("add", [(2, 3), (2, 3), (2, 3)], {}),
    ("scale", [(2, 3)], {"factor": -0.3}),
    ("weigh", [(2, 3), torch.tensor([1.0, -2.0, 0.5]).double()], {}),
    ("sum", [(2, 3, 4)], {"dims": (0, 2), "keepdim": True}),
    ("sum", [(2, 3, 4)], {"dims": (1,), "keepdim": False}),
    ("expand", [(3, 1)], {"shape": (2, 3, 4)}),
    ("cumsum", [(2, 3)], {"dim": 1}),
    ("reshape", [(2, 6)], {"shape": (3, 4)}),
    ("permute", [(2, 3, 4)], {"dims": (2, 0, 1)}),
    ("flip", [(2, 3)], {"dims": (1,)}),
    ("slice", [(2, 7)], {"dim": 1, "start": 1, "stop": 6, "step": 2}),
    ("embed", [(2, 3)], {"shape": (2, 8), "dim": 1, "start": 1, "step": 2}),
    ("pad", [(2, 3)], {"widths": ((0, 1), (2, 0))}),
    ("cat", [(2, 3), (2, 1)], {"dim": 1}),
    ("gather", [(2, 3), INDEX], {}),
    ("scatter", [(2, 3), INDEX], {"shape": (3, 2)}),
    ("rows", [(3, 2), ROWS], {"dim": 0}),
    ("rows_back", [(2, 4), ROWS], {"dim": 1, "size": 3}),
    ("unfold", [(2, 2, 5, 4)], WINDOWS),
    ("fold", [(2, 8, 6)], {**WINDOWS, "size": (5, 4)}),
    ("mul", [(2, 3), (2, 3)], {}),
    ("matmul", [(2, 3), (3, 4)], {}),
    ("matmul", [(2, 2, 3), (2, 3, 2)], {}),
    ("conv", [(2, 4, 5, 5), (6, 2, 2, 2)], CONV),
    ("conv", [(2, 1, 5), (3, 1, 2)], {"stride": (2,), "padding": (1,), "dilation": (1,), "groups": 1}),
    ("conv_input", [(2, 6, 3, 3), (6, 2, 2, 2)], {**CONV, "shape": (2, 4, 5, 5)}),
    ("conv_weight", [(2, 6, 3, 3), (2, 4, 5, 5)], {**CONV, "shape": (6, 2, 2, 2)}),
    ("solve", [(2, 2), (2, 3)], {}),
    ("scalar", [(2, 3)], {"function": Scalar("tanh")}),
    ("softmax", [(2, 3)], {"dim": 1}),
    ("softmax", [(2, 3), MASK], {"dim": 0}),
    ("softmax_back", [(2, 3), (2, 3)], {"dim": 1}),
    ("logsumexp", [(2, 3, 2)], {"dim": 1, "keepdim": False}),
    ("logsumexp", [(2, 3), MASK], {"dim": 1, "keepdim": True}),
    ("normalize", [(2, 2, 3)], {"dims": (1, 2), "eps": 1e-3}),
    ("rstd", [(2, 2, 3)], {"dims": (0, 2), "eps": 1e-3}),
    ("normalize_back", [(2, 3), (2, 3), (2, 1)], {"dims": (1,)}),
    ("amax", [(2, 3, 4)], {"dims": (0, 2), "keepdim": False}),
    ("select_like", [(2, 1), (2, 3)], {"dims": (1,)}),
    ("pick_like", [(2, 3), (2, 3)], {"dims": (1,)}),
    ("maximum", [(2, 3), (2, 3)], {}),
    ("sort", [(2, 5)], {"dim": 1, "descending": True}),
    ("sort_like", [(2, 5), (2, 5)], {"dim": 1, "descending": False}),
    ("unsort_like", [(5, 2), (5, 2)], {"dim": 0, "descending": True}),
]
IDS = [f"{name}-{k}" for k, (name, _, _) in enumerate(CASES)]


def test_every_primitive_is_tested() -> None:
    assert {name for name, _, _ in CASES} == set(PRIMITIVES) - {"input", "constant"}


@pytest.mark.parametrize(("name", "operands", "options"), CASES, ids=IDS)
def test_a_transpose_is_that_of_autograd_and_so_is_its_own(name: str, operands: list, options: dict) -> None:
    torch.manual_seed(0)
    builder, values = Builder(), {}
    operands = [*operands]
    for k, operand in enumerate(operands):
        if isinstance(operand, Tensor):
            operands[k] = builder.constant(operand)
        else:
            values[f"a{k}"] = torch.randn(operand, dtype=torch.float64, requires_grad=True)
            operands[k] = builder.input(f"a{k}", operand)
    z = builder.emit(name, *operands, **options)
    values["c"] = torch.randn(builder.shape(z), dtype=torch.float64, requires_grad=True)
    costate = builder.input("c", builder.shape(z))
    back = PRIMITIVES[name].transpose(builder, builder.nodes[z], costate)
    assert len(back) == len(operands)
    program = builder.finish([z, *(k for k in back if k is not None)])
    tensors = program.run(values)
    assert all(node.shape == tensor.shape for node, tensor in zip(program.nodes, tensors, strict=True))
    moved = [f"a{operands.index(k)}" for k, c in zip(operands, back, strict=True) if c is not None]
    result, *backs = (tensors[k] for k in program.outputs)
    expected = torch.autograd.grad(result, [values[n] for n in moved], values["c"], create_graph=True)
    for ours, theirs in zip(backs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    # the transposes of the transposes, likewise
    for k in {k for k in back if k is not None}:
        node = builder.nodes[k]
        if node.primitive.kind == "input":
            continue
        slope = builder.input(f"d{k}", node.shape)
        values[f"d{k}"] = torch.randn(node.shape, dtype=torch.float64)
        again = node.primitive.transpose(builder, node, slope)
        second = builder.finish([k, *(j for j in again if j is not None)])
        run = second.run({n: values[n] for n in second.inputs})
        node = second.nodes[second.outputs[0]]
        apart = [run[j].detach().requires_grad_(run[j].is_floating_point()) for j in node.inputs]
        reals = [t for t, j in zip(apart, again, strict=True) if j is not None]
        result = node.primitive.run(apart, **node.options)
        theirs = torch.autograd.grad(result, reals, values[f"d{k}"], allow_unused=True)
        for j, expected_slope in zip(second.outputs[1:], theirs, strict=True):
            zero = torch.zeros_like(run[j])
            torch.testing.assert_close(
                run[j], zero if expected_slope is None else expected_slope, rtol=1e-11, atol=1e-12
            )


LIKE = {
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "power": lambda x, p: x**p, "square": torch.square, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "softplus": lambda x, beta: torch.nn.functional.softplus(x, beta, 100), "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "silu": torch.nn.functional.silu,
    "logsigmoid": torch.nn.functional.logsigmoid, "mish": torch.nn.functional.mish, "erf": torch.erf,
    "sin": torch.sin, "cos": torch.cos, "sinh": torch.sinh, "cosh": torch.cosh, "atan": torch.atan,
    "arcsinh": torch.asinh, "log1p": torch.log1p, "expm1": torch.expm1, "softsign": torch.nn.functional.softsign,
    "abs": torch.abs, "relu": torch.relu, "leaky_relu": torch.nn.functional.leaky_relu,
    "hardtanh": torch.nn.functional.hardtanh, "relu6": torch.nn.functional.relu6,
    "hardsigmoid": torch.nn.functional.hardsigmoid, "hardswish": torch.nn.functional.hardswish,
    "elu": torch.nn.functional.elu, "celu": torch.nn.functional.celu, "selu": torch.nn.functional.selu,
    "huber": lambda x, d: torch.nn.functional.huber_loss(x, torch.zeros_like(x), delta=d, reduction="none"),
}  # fmt: skip
PARAMETERS = {
    "power": [(3.0,), (-1.5,), (2.0,)], "softplus": [(1.0,), (2.5,)], "leaky_relu": [(0.1,)],
    "hardtanh": [(-0.5, 2.0)], "elu": [(1.3,)], "celu": [(0.7,)], "huber": [(0.8,)],
}  # fmt: skip
POSITIVE = {"log", "sqrt", "rsqrt", "reciprocal", "power"}
FUNCTIONS = [Scalar(name, p) for name in SCALARS for p in PARAMETERS.get(name, [()])]


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_a_scalar_function_and_its_derivatives(function: Scalar) -> None:
    x = torch.tensor([0.1, 0.3, 0.9, 1.7, 4.4, 9.0], dtype=torch.float64)
    x = x if function.name in POSITIVE else torch.cat([x, -x[:3] if function.name == "log1p" else -x])
    x.requires_grad_()
    torch.testing.assert_close(function(x), LIKE[function.name](x, *function.parameters), rtol=2e-14, atol=1e-15)
    for _ in range(4):
        value = function(x)
        slope = torch.autograd.grad(value.sum(), x)[0] if value.requires_grad else torch.zeros_like(x)
        function = function.derivative
        torch.testing.assert_close(function(x), slope, rtol=1e-10, atol=1e-11)


def test_derivatives_of_saturated_functions_keep_their_sign_and_size() -> None:
    x = torch.tensor([-30.0, 30.0], dtype=torch.float64)
    near = {"tanh": 4 * math.exp(-60), "sigmoid": math.exp(-30)}
    for name, expected in near.items():
        slope = Scalar(name, (), 1)(x)
        torch.testing.assert_close(slope, torch.full_like(x, expected), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        Scalar("tanh", (), 2)(x), torch.tensor([2.0, -2.0]).double() * near["tanh"], rtol=1e-12, atol=0
    )


def test_equal_nodes_are_one_and_what_changes_nothing_is_left_out() -> None:
    builder = Builder()
    x, zero = builder.input("x", (2, 3)), builder.constant(torch.zeros(2, 3))
    one = builder.constant(torch.ones(3))
    square = builder.emit("mul", x, x)
    assert builder.emit("mul", x, x) == square
    y = builder.emit("scale", x, factor=2.0)
    assert builder.emit("add", x, y) == builder.emit("add", y, x)
    turned = builder.emit("permute", x, dims=(1, 0))
    for same, node in {
        ("add", (x, zero)): x,
        ("weigh", (x, one)): x,
        ("reshape", (x,), ("shape", (2, 3))): x,
        ("expand", (x,), ("shape", (2, 3))): x,
        ("permute", (turned,), ("dims", (1, 0))): x,
        ("scale", (builder.emit("scale", x, factor=-1.0),), ("factor", -1.0)): x,
        ("weigh", (x, builder.constant(torch.full((3,), 2.0)))): y,
        ("mul", (builder.emit("expand", builder.constant(2.0), shape=(2, 3)), x)): y,
        ("mul", (zero, x)): builder.constant(torch.zeros(2, 3).double()),
    }.items():
        name, inputs, *options = same
        assert builder.emit(name, *inputs, **dict(options)) == node, name
    with pytest.raises(ValueError, match="add of tensors of shapes"):
        builder.emit("add", x, turned)


def test_constants_are_computed_once_and_rounded_ones_keep_their_operation() -> None:
    builder = Builder()
    x, c = builder.input("x", (2, 2)), builder.constant(torch.tensor([[0.1, 2.0], [3.0, 4.0]]))
    moved = builder.emit("permute", c, dims=(1, 0))
    assert builder.nodes[moved].primitive.kind == "constant"
    rounded = builder.emit("scalar", c, function=Scalar("rsqrt"))
    assert builder.nodes[rounded].primitive.kind == "scalar"
    weighed = builder.emit("mul", rounded, x)
    assert builder.nodes[weighed].primitive.name == "weigh"
    program = builder.finish([weighed])
    assert len(program.nodes) == 4  # x, c, its rsqrt and the product; not the permutation
    assert {program.nodes[k].primitive.name for k in program.constants} == {"constant", "scalar"}
    value = torch.rand(2, 2, dtype=torch.float64)
    torch.testing.assert_close(program.results({"x": value})[0], value * c_of(program).rsqrt())
    assert program.run({"x": value.float()})[-1].dtype == torch.float32


def c_of(program) -> Tensor:
    return next(value for k, value in program.constants.items() if program.nodes[k].primitive.kind == "constant")


def test_programs_know_their_readers_and_what_depends_on_an_input() -> None:
    builder = Builder()
    x, w = builder.input("x", (2,)), builder.input("w", (2,), parameter=True)
    square = builder.emit("mul", x, x)
    program = builder.finish([builder.emit("add", square, w)])
    assert program.parameters == ("w",)
    assert program.depends(["w"]) == [False, True, False, True]
    assert program.depends(["x"]) == [True, False, True, True]
    assert program.users() == [[2], [3], [3], []]
    assert str(program).splitlines()[2:] == ["%2: (2,) = mul(%0, %0)", "%3: (2,) = add(%1, %2)", "return %3"]


def test_run_agrees_for_all_orders_of_dimensions() -> None:
    a = torch.rand(2, 3, 4, dtype=torch.float64)
    for dims in itertools.combinations(range(3), 2):
        z, r = (PRIMITIVES[name].run([a], dims=dims, eps=1e-5) for name in ("normalize", "rstd"))
        var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
        torch.testing.assert_close(z, (a - mean) * r)
        torch.testing.assert_close(r, (var + 1e-5).rsqrt())
