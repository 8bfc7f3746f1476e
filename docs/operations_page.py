"""The page of supported operations, written from the registry of rules when the documentation is built."""

from __future__ import annotations

import inspect
import math
import sys
from decimal import ROUND_UP, Context, Decimal, localcontext

import surefoot.implicit
import surefoot.operations.captured  # noqa: F401  registers the operations
from surefoot.operations.record import Rule, rules
from surefoot.scalar import supremum
from surefoot.scalar.function import ACTIVATIONS, ScalarFunction
from surefoot.scalar.primitives import PRIMITIVES

INTRODUCTION = """Supported operations
====================

What a rule claims, and why it is true, is its docstring; the page is those docstrings. For
:math:`z = f(x_1, …, x_k)` and all arguments within their enclosures, a rule bounds the operator norm of every
Jacobian, the tensor norm of every second derivative, and the norm of the result
(:class:`surefoot.operations.call.Bounds`). An operation without a rule is refused by name;
:doc:`gallery/own_rule` shows how to add one.

"""


def page() -> str:
    """The page, in reStructuredText: one section per family, one entry per rule."""
    families: dict[str, dict[Rule, list[str]]] = {}
    for operation, rule in rules().items():
        families.setdefault(rule.__module__, {}).setdefault(rule, []).append(operation)
    return INTRODUCTION + scalar_functions() + "".join(map(_family, families, families.values()))


def scalar_functions() -> str:
    """The activations with the suprema of their first two derivatives, as computed by ball arithmetic."""
    known = {name for name, make in ACTIVATIONS.items() if _can_be_made(make)}
    known |= {name for name, primitive in PRIMITIVES.items() if primitive.arity == 1} - {*ACTIVATIONS}
    functions = {name: ScalarFunction.named(name) for name in sorted(known)}
    # without its limits a clamp is the identity, and would stand here as if it had no kink
    rows = [_activation(name, f) for name, f in functions.items() if f.affine[-1] is None or name == "neg"]
    head = [
        "Activations",
        "-----------",
        "",
        inspect.cleandoc(_SCALAR),
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
    ]
    return "\n".join([*head, *_cells("activation a", "sup \\|a'\\|", "sup \\|a''\\|"), *rows, "", ""])


_SCALAR = """
Element-wise functions, also those a model writes out by hand, are fused into one scalar function of one variable,
and the suprema of its derivatives over the reachable interval of every entry are found by branch and bound in ball
arithmetic. Over the whole line, with their default options, rounded up:
"""


def _can_be_made(make: object) -> bool:
    parameters = inspect.signature(make).parameters.values()  # type: ignore[arg-type]
    return all(p.default is not inspect.Parameter.empty for p in parameters)


def _activation(name: str, function: ScalarFunction) -> str:
    return "\n".join(_cells(f"``{name}``", *(_up(supremum(function, order)) for order in (1, 2))))


def _up(bound: float) -> str:
    """Five digits: rounded up, unless the nearest number of five digits is within a relative 10⁻⁹."""
    if math.isinf(bound):
        return "∞"
    nearest = float(f"{bound:.5g}")
    if bound <= nearest * (1 + 1e-9):
        return f"{nearest:g}"
    with localcontext(Context(prec=5, rounding=ROUND_UP)):
        return f"{(+Decimal(bound)).normalize():f}"


def _cells(*cells: str) -> list[str]:
    return [f"   {'*' if k == 0 else ' '} - {cell}" for k, cell in enumerate(cells)]


def _family(module: str, members: dict[Rule, list[str]]) -> str:
    title = module.rpartition(".")[2].replace("_", " ").capitalize()
    lines = [title, "-" * len(title), "", inspect.cleandoc(sys.modules[module].__doc__ or ""), ""]
    for rule, operations in members.items():
        names = ", ".join(f"``{name}``" for name in operations)
        lines += [names, *("  " + line for line in inspect.cleandoc(rule.__doc__ or "").splitlines()), ""]
    return "\n".join([*lines, ""])
