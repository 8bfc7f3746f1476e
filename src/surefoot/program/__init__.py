"""A model with its objective as a list of primitives.

A *program* is a list of *nodes*; each is one tensor, computed by a *primitive* from earlier ones. A *costate* is
the derivative of the value in a tensor; the *transpose* of a primitive maps the costate of its result to those of
its inputs, and so a program becomes one of value and gradient.

* ``ir``: programs and their nodes.
* ``primitives``: all that a node can be, how it is run and transposed; ``scalars``: functions of each entry.
* ``builder``: writing a program node by node; ``symbol``: arithmetic on nodes as on tensors.
* ``tracing``: a model as a program; ``decompositions``, ``layout``, ``layers``: operations of torch in
  terms of primitives.
* ``transpose``: from a program of a value to one of the value and its gradient.
* ``fusion``: formulas that are written out, as what they are.
* ``capturing``: the program of a model, once per model and shape; ``fingerprint``: whether it is still the same;
  ``checks``: what a model, its input and its output must be; ``refusals``: what goes wrong, in the user's terms;
  ``faithful``: what is noticed on the way that would make a program untrue.
* ``labels``: which samples of a batch each entry depends on.
"""

from surefoot.program import layers as _layers  # noqa: F401 -- declares its rules
from surefoot.program.builder import Builder
from surefoot.program.capturing import capture, values_of
from surefoot.program.ir import Node, Program
from surefoot.program.labels import interacting, samples
from surefoot.program.primitives import PRIMITIVES, Primitive
from surefoot.program.scalars import SCALARS, Scalar
from surefoot.program.symbol import Symbol
from surefoot.program.tracing import trace
from surefoot.program.transpose import differentiate

__all__ = [
    "PRIMITIVES", "SCALARS", "Builder", "Node", "Primitive", "Program", "Scalar", "Symbol", "capture",
    "differentiate", "interacting", "samples", "trace", "values_of",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
