r"""One record per operation, with all that any reading of a graph needs to know about it.

A file of a family registers its operations with one of

* :func:`operation`, on the function that states and proves the bounds; further readings are its keywords;
* :func:`elementwise`, for one scalar function on every entry: that function is all there is to know;
* :func:`declare`, for an operation of which no bounds are known, but other things are.

An operation without a record has no bounds (it is refused by name where they are needed), is of no known form,
mixes all rows and costs one operation per entry of its result and argument.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from torch import Tensor

from surefoot.errors import SurefootError, UnsupportedOperation, describe
from surefoot.graph.structure import Graph, Node, Ref
from surefoot.magnitude import Magnitude
from surefoot.operations.call import Bounds, Call, Moving, Slot, Use
from surefoot.operations.sparsity import Sparsity
from surefoot.scalar import Rounded
from surefoot.taylor import TaylorModel


class Form(Enum):
    """How an operation depends on its tensor arguments.

    >>> sf.operations.records()["aten.tanh"].form
    <Form.ELEMENTWISE: 'one scalar function on every entry'>
    """

    LAYOUT = "moves numbers"  # reshape, permute, slice, …: linear, without arithmetic
    LINEAR = "affine in all its arguments together"
    PRODUCT = "a product of its factors, plus affine terms"
    QUOTIENT = "linear in the numerator, not affine in the denominator"
    ELEMENTWISE = "one scalar function on every entry"
    OTHER = "none of these"


class InSingle(Enum):
    """As what an operation is run in single precision; :mod:`surefoot.valuation.single` proves each.

    >>> sf.operations.records()["aten.conv2d"].single.name
    'MATRIX'
    """

    PERMUTED = "every number of its argument once, and no other"
    MOVED = "numbers of its arguments, each as often as all, or as often as it is chosen"
    MATRIX = "sums of products with a matrix or with kernels"
    PRODUCT = "one product, one sum or both for every entry"
    ENTRIES = "a function of one number, or the largest of several"


Rule = Callable[[Call], Bounds]
Rows = Callable[[Use], Iterable[Slot]]
Scalar = Callable[[dict[str, Any]], Any]  # a scalar function, a condition on one, or None


@dataclass(frozen=True)
class Expansion:
    """Operations in place of one; of several results, the names of all of them.

    The last node bears the name of the one it replaces, unless that had several results.
    """

    nodes: tuple[Node, ...]
    results: tuple[Ref, ...] = ()


Expand = Callable[[Graph, Node], "Expansion | None"]


@dataclass(frozen=True)
class LossFacts:
    r"""Facts about a loss :math:`h(\hat y)` or :math:`h(\hat y, y)`. What is not stated is not claimed."""

    function: Callable[..., Tensor]  # computes it from outputs, targets if it takes any, and options by keyword
    convex: bool = False  # whether it is convex in the outputs
    smooth: bool = False  # whether its gradient is Lipschitz on the whole space
    nonnegative: bool = False  # whether it is never below zero
    quadratic: bool = False  # whether it is a quadratic function of the outputs
    # the options of the function with their usual values
    options: Mapping[str, Hashable] = field(default_factory=dict)


@dataclass(frozen=True)
class Near:
    """A result near the centre, to second order."""

    change: Tensor  # of the result, from a move of the argument; differentiable twice at zero
    first: float  # on the norm of the error of its computed derivative there
    second: float  # the same for its second derivative


@dataclass(frozen=True)
class GramRows:
    """Rows of the Jacobian in a layer's parameters, from what the layer reads and the slopes of its result."""

    slots: tuple[Slot, ...]  # the arguments that may be parameters
    # from arguments, slopes (samples × columns × the rest of the shape of the result) and the slots asked for, the
    # slot of a parameter and some columns of its rows, (samples · columns) × numbers, piece by piece
    pieces: Callable[..., Iterator[tuple[Slot, Any]]]
    covers: Callable[[Use], bool] = lambda use: True  # whether a use of the operation is covered
    # from arguments and all pieces of a parameter side by side, the rows in the order of its entries
    whole: Callable[[dict[str, Any], Tensor], Tensor] = lambda arguments, rows: rows


@dataclass(frozen=True)
class Operation:
    r"""All that is known about one operation.

    Attributes:
        name: such as ``aten.tanh``.
        bounds: Jacobian, curvature and size over enclosures, with the proof; ``None`` if none are known.
        form: how it depends on its tensors; a function where that depends on its other arguments.
        factors: the slots that multiply each other.
        selects: slots that choose entries (ids, conditions, masks) rather than contribute numbers.
        identity: whether it returns its first argument, perhaps in another precision or place.
        lends: slots that only lend their shape or type.
        fixed: slots that must not vary for the form to hold.
        rows: the slots of which row i alone enters row i of the result, from the shapes.
        scalar: for an element-wise operation, its scalar function from its arguments, of which one or more are
            scalar functions themselves.
        taylor: its result along a segment to any order; ``None`` for second order from the bounds.
        pullback: the transposed Jacobian at the centre times a costate, by slot of the argument, from formulas
            whose error is proved: value and error of every entry. ``None``, or a slot left out, for what automatic
            differentiation computes by adding up products of the costate with numbers of the arguments, so that
            its error is relative to :math:`|J|^\top|\lambda|` (:mod:`surefoot.calculus.adjoint.costates`).
        push: the Jacobian at the centre times tangents, by slot of the argument, from a formula whose error is
            proved. ``None`` where that follows (:mod:`surefoot.operations.pushing`).
        near: the result near the centre as a quadratic function of the move of its one argument that varies, from
            coefficients whose error is proved, in sums and products only. ``None`` where its kernel has to do.
        symmetric: whether its Jacobian in its one argument is a symmetric matrix.
        cost: non-zero entries of its derivatives; ``None`` for what follows from the form.
        gram: rows of the Jacobian in its parameters.
        canonical: itself as simpler operations, for every reading.
        expansions: ways to write it, with what it reads, in operations whose bounds are sharper; see
            :func:`expansion`.
        epsilon: the slot of the number that keeps a normalisation away from zero.
        errata: numbers of the paper's errata about its constants.
        loss: what kind of loss it is, if it is one.
        evaluate: a formula of the same signature that is used in double precision instead of the kernel, because
            the kernel loses digits or leaves the range of doubles; differentiable.
        error: on the norm of the difference between its computed value and the exact one at the same arguments;
            ``None``, or returning ``None``, where that of :mod:`surefoot.operations.evaluation` is proved.
        relative: whether that error is relative to the result alone, however large the arguments are.
        entry_error: the same entry by entry, for arguments that do not vary and are off by at most their radii;
            ``None`` where norms have to do.
        reason: why it has no bounds, and what to write instead.
        jumps: whether its result jumps as its arguments vary, so that nothing bounds its slope.
        rounds: whether computing it rounds; what only moves or selects numbers does not.
        single: as what it is run in single precision; ``None`` if it is run in double.
        in_order: whether its result is all numbers of its first argument in the same order.
        shifts: slots that are added to the result, broadcast.
        evenly: whether all entries of an argument enter equally many entries of the result.
        matched: whether it multiplies two arguments matrix by matrix, along all dimensions but the last two.
        slopes: the least and the largest slope of every entry over the interval that it reaches, for one argument
            that varies; ``None``, or returning ``None``, where that is not known.
        factor: of a loss, the Hessian in the outputs as a product; see :mod:`surefoot.operations.losses.factor`.

    >>> sf.operations.records()["aten.linear"].factors
    ('input', 'weight')
    """

    name: str
    bounds: Rule | None = None
    form: Form | Callable[[Node], Form] = Form.OTHER
    factors: tuple[Slot, ...] = ()
    selects: tuple[Slot, ...] = ()
    identity: bool = False
    lends: tuple[Slot, ...] = ()
    fixed: tuple[Slot, ...] = ()
    rows: Rows = field(default=lambda use: ())
    scalar: Scalar | None = None
    taylor: Callable[[Moving], TaylorModel | None] | None = None
    pullback: Callable[[Call, Tensor], Mapping[Slot, Rounded]] | None = None
    push: Callable[[Call, Mapping[Slot, Tensor]], Rounded | None] | None = None
    near: Callable[[Call, Tensor], Near | None] | None = None
    symmetric: bool = False
    cost: Callable[[Use], Sparsity] | None = None
    gram: GramRows | None = None
    canonical: Callable[[Node], Iterator[Node]] | None = None
    expansions: tuple[Expand, ...] = ()
    epsilon: Slot | None = None
    errata: tuple[int, ...] = ()
    loss: LossFacts | None = None
    factor: Callable[..., Any] | None = None
    evaluate: Callable[..., Any] | None = None
    error: Callable[[Call, Any], Magnitude | None] | None = None
    relative: bool = False
    entry_error: Callable[[Call, Tensor], Tensor] | None = None
    reason: str = ""
    jumps: bool = False
    rounds: bool | Callable[[Node], bool] = True
    single: InSingle | None = None
    in_order: bool = False
    shifts: tuple[Slot, ...] = ()
    evenly: bool = False
    matched: bool = False
    slopes: Callable[[Call, Slot], tuple[Tensor, Tensor] | None] | None = None

    def form_of(self, node: Node) -> Form:
        """The form of one use."""
        return self.form if isinstance(self.form, Form) else self.form(node)

    def rounds_at(self, node: Node) -> bool:
        """Whether computing one use rounds."""
        return self.rounds if isinstance(self.rounds, bool) else self.rounds(node)

    def row_slots(self, use: Use) -> frozenset[Slot]:
        """The slots of which row i alone enters row i of the result."""
        slots = frozenset(self.rows(use))
        if self.loss is not None:  # one number: row i of the outputs enters the i-th summand
            return slots
        return frozenset(slot for slot in slots if use.shapes[slot][:1] == use.shape[:1] != ())

    @property
    def claim(self) -> str:
        """The docstring of the bounds: what is claimed and why."""
        return (self.bounds.__doc__ if self.bounds is not None else "") or ""

    @property
    def family(self) -> str:
        """The module that states the bounds."""
        return self.bounds.__module__ if self.bounds is not None else ""


_RECORDS: dict[str, Operation] = {}
_READINGS = {f.name for f in fields(Operation)} - {"name", "bounds"}


def declare(*names: Any, **readings: Any) -> None:
    """Add readings to the records of operations, and make the records that do not exist yet.

    Args:
        names: the operations, by name (``"aten.tanh"``) or as the ``torch.ops`` object itself.
        readings: fields of :class:`Operation`.

    Raises:
        SurefootError: if something else was given.

    >>> sf.operations.declare("doctest.half", form=sf.operations.Form.LINEAR)
    >>> sf.operations.records()["doctest.half"].form.name
    'LINEAR'
    """
    unknown = readings.keys() - _READINGS - {"bounds"}
    if unknown:
        raise SurefootError(
            f"an operation has no reading '{min(unknown)}': there are {', '.join(sorted(_READINGS))}"
        )
    for operation in names:
        name = name_of(operation)
        _RECORDS[name] = replace(_RECORDS.get(name, Operation(name)), **readings)


def operation(*names: Any, **readings: Any) -> Callable[[Rule], Rule]:
    """Register a rule for the bounds of operations; keywords add what else is known about them.

    A later registration replaces what an earlier one said. The function's docstring states the claim and proves
    it.

    Args:
        names: the operations, by name (``"aten.tanh"``) or as the ``torch.ops`` object itself.
        readings: fields of :class:`Operation`.

    Raises:
        SurefootError: if something else was given.

    >>> from surefoot.magnitude import Magnitude
    >>> @sf.register_rule("doctest.half")
    ... def half(call):
    ...     return sf.operations.Bounds({"self": Magnitude.of(0.5)})  # slope ½, no curvature
    >>> sf.operations.rules()["doctest.half"] is half
    True
    """

    def register(bounds: Rule) -> Rule:
        declare(*names, bounds=bounds, **readings)
        return bounds

    return register


register_rule = operation


def expansion(*names: str) -> Callable[[Expand], Expand]:
    """Register a function that rewrites operations of these names, or returns ``None`` where it does not apply.

    It may look at what the operation reads, and so recognise what frameworks write out by hand.

    >>> @sf.operations.expansion("doctest.half")
    ... def nothing(graph, node):
    ...     return None
    >>> sf.operations.records()["doctest.half"].expansions == (nothing,)
    True
    """

    def register(expand: Expand) -> Expand:
        for name in names:
            known = _RECORDS.get(name, Operation(name)).expansions
            declare(name, expansions=(*known, expand))
        return expand

    return register


def name_of(operation: Any) -> str:
    """The name of an operation as nodes have it: ``aten.tanh`` for ``torch.ops.aten.tanh.default``."""
    if isinstance(operation, str):
        return operation
    packet = getattr(operation, "overloadpacket", operation)
    if hasattr(packet, "overloads"):
        return str(packet)
    if callable(operation) and hasattr(operation, "__name__"):
        return str(operation.__name__)
    raise SurefootError(f"a rule is registered for an operation or its name, got {operation!r}")


def record_of(node: Node) -> Operation:
    """What is known about the operation of a node; one of which nothing is known has an empty record."""
    return _RECORDS.get(node.op) or Operation(node.op)


def records() -> Mapping[str, Operation]:
    """All records, by name, as they are now and will be.

    >>> "aten.tanh" in sf.operations.records()
    True
    """
    return MappingProxyType(_RECORDS)


def rules() -> dict[str, Rule]:
    """The bounds of all operations that have any, by name.

    >>> "aten.linear" in sf.operations.rules()
    True
    """
    return {name: record.bounds for name, record in _RECORDS.items() if record.bounds is not None}


def rule_for(node: Node, graph: Graph) -> Rule:
    """The bounds of an operation."""
    record = record_of(node)
    rule = record.bounds
    if rule is None and record.jumps:
        raise UnsupportedOperation(
            f"'{node.op}' in {describe(node.module)} jumps as its argument varies, and no slope bounds it: use "
            "a continuous function, or apply it only to what does not vary."
        )
    if rule is None and record.reason:
        raise UnsupportedOperation(f"'{node.op}' in {describe(node.module)}: {record.reason}")
    if rule is None:
        shapes = ", ".join(f"{name} {_shapes(graph, name)}" for name in node.inputs) or "no tensors"
        raise UnsupportedOperation(
            f"no rule is known for the operation '{node.op}' in {describe(node.module)} (arguments: {shapes}). "
            f'Register one with surefoot.register_rule("{node.op}"); CONTRIBUTING.md shows how on one page.'
        )
    return rule


def _shapes(graph: Graph, name: str) -> str:
    spec = graph.spec(name)
    specs = spec if isinstance(spec, tuple) else (spec,)
    return " ".join("×".join(map(str, s.shape)) or "scalar" for s in specs)
