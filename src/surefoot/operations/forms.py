r"""The algebraic form of an operation, and what it makes of degrees.

The form says how the degree of a result in the state :math:`x` and the parameters :math:`u` follows from the
degrees of the arguments. That is all a chain needs to find the biaffine part :math:`b_t` of a computation:
what is at most of degree one in each of the two, as in the paper's
:math:`b(x, u) = \beta(x, u) + \beta^u(u) + \beta^x(x) + \beta^0`.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

from surefoot.graph.structure import Node, Ref
from surefoot.operations.record import Form, record_of


@dataclass(frozen=True)
class Degree:
    """Degree of a tensor as a polynomial of the state and of the parameters; ``None`` if it is none."""

    state: int | None = 0
    parameters: int | None = 0

    @property
    def is_biaffine(self) -> bool:
        """At most of degree one in the state and at most of degree one in the parameters."""
        return self.state in (0, 1) and self.parameters in (0, 1)

    @property
    def is_constant(self) -> bool:
        """Depends on neither."""
        return self.state == 0 and self.parameters == 0

    def __add__(self, other: Degree) -> Degree:
        return Degree(_total(self.state, other.state), _total(self.parameters, other.parameters))

    def __or__(self, other: Degree) -> Degree:
        return Degree(_largest(self.state, other.state), _largest(self.parameters, other.parameters))


NOT_POLYNOMIAL = Degree(None, None)


def _total(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _largest(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def form_of(node: Node) -> Form:
    """The form of an operation; :attr:`Form.OTHER` for one that is not known."""
    return record_of(node).form_of(node)


def degree_of(node: Node, degrees: dict[str, Degree]) -> Degree:
    """The degree of a result from the degrees of its arguments (missing ones are constants)."""
    known = {name: degrees.get(name, Degree()) for name in node.inputs}
    if all(degree.is_constant for degree in known.values()):
        return Degree()
    record, arguments = record_of(node), node.arguments
    form = record.form_of(node)
    if form in (Form.LAYOUT, Form.LINEAR):
        if not all(spec.is_real for spec in node.specs):
            return NOT_POLYNOMIAL  # rounding to integers
        chosen_by = _argument_degree([arguments.get(key) for key in record.selects], known)
        if None in (chosen_by.state, chosen_by.parameters):
            return NOT_POLYNOMIAL  # decided by real numbers; ids and masks of the data are not
        if not _argument_degree([arguments.get(key) for key in record.fixed], known).is_constant:
            return NOT_POLYNOMIAL
        ignored = (*record.lends, *record.selects)
        return _argument_degree([value for key, value in arguments.items() if key not in ignored], known)
    if form is Form.PRODUCT:
        product = Degree()
        for key in record.factors:
            argument = arguments.get(key)
            for factor in argument if isinstance(argument, list | tuple) else [argument]:
                product = product + _argument_degree(factor, known)
        return product | _argument_degree([v for key, v in arguments.items() if key not in record.factors], known)
    if form is Form.QUOTIENT and _argument_degree(arguments["other"], known).is_constant:
        return _argument_degree(arguments["self"], known)
    return NOT_POLYNOMIAL


def _argument_degree(argument: Any, known: dict[str, Degree]) -> Degree:
    """The degree of a tensor, or the largest of those in a list; numbers are constants."""
    if isinstance(argument, Ref):
        return known[argument.name]
    if not isinstance(argument, list | tuple):
        return Degree()
    return functools.reduce(operator.or_, (_argument_degree(item, known) for item in argument), Degree())
