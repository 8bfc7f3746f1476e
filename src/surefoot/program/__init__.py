"""A model with its objective as a list of primitives.

A *program* is a list of *nodes*; each is one tensor, computed by a *primitive* from earlier ones. A *costate* is
the derivative of the value in a tensor; the *transpose* of a primitive maps the costate of its result to those of
its inputs, and so a program becomes one of value and gradient.

* ``ir``: programs and their nodes.
* ``primitives``: all that a node can be, how it is run and transposed; ``scalars``: functions of each entry.
* ``builder``: writing a program node by node.
"""

from surefoot.program.builder import Builder
from surefoot.program.ir import Node, Program
from surefoot.program.primitives import PRIMITIVES, Primitive
from surefoot.program.scalars import SCALARS, Scalar

__all__ = ["PRIMITIVES", "SCALARS", "Builder", "Node", "Primitive", "Program", "Scalar"]


def __dir__() -> list[str]:
    return list(__all__)
