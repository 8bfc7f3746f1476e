"""Every operation × every reading: each answers, or refuses by name; what is said about rows is true."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor

import surefoot.clustering
import surefoot.implicit
import surefoot.operations.captured  # noqa: F401  registers the operations
from operations.catalogue import CASES, built
from surefoot.complexity.layers import sparsity
from surefoot.errors import SurefootError, UnsupportedOperation
from surefoot.graph.nodes import Node
from surefoot.graph.structure import Graph
from surefoot.operations.call import Use
from surefoot.operations.forms import Degree, degree_of
from surefoot.operations.record import Form, InSingle, Operation, declare, record_of, records, rule_for

MOVES = InSingle.PERMUTED, InSingle.MOVED
EVERY = [(op, k) for op in sorted(CASES) for k in range(len(CASES[op]))]


@pytest.mark.parametrize("name", sorted(records()))
def test_a_record_is_whole(name: str) -> None:
    record = records()[name]
    assert record.name == name
    assert record.bounds is None or record.claim.strip(), "bounds come with a claim"
    if isinstance(record.form, Form):
        assert (record.form is Form.PRODUCT) == bool(record.factors)
    if record.bounds is None:
        node = Node("z", name, operator.neg, (), {}, "some.layer", ())
        with pytest.raises(UnsupportedOperation, match=f"'{name}' in .*some.layer"):
            rule_for(node, Graph(leaves={}, nodes=(), outputs=(), blocks={}, held={}))


@pytest.mark.parametrize(("op", "k"), EVERY)
def test_every_reading_answers(op: str, k: int) -> None:
    case = built(op, k)
    for node in case.graph.nodes:
        record, use = record_of(node), Use(node, case.graph.spec)
        assert isinstance(record.form_of(node), Form)
        assert isinstance(degree_of(node, {name: Degree(state=1) for name in case.variables}), Degree)
        assert set(record.factors) <= set(node.arguments)
        assert record.row_slots(use) <= set(use.names)
        counts = sparsity(case.graph, node)
        assert min(counts.product, counts.evaluation, counts.jacobian, counts.application) >= 0
        if record.form_of(node) is Form.LAYOUT:
            assert counts == type(counts)()


@pytest.mark.parametrize(("op", "k"), EVERY)
def test_row_i_of_the_result_reads_row_i_alone(op: str, k: int) -> None:
    """Other rows of such an argument are replaced: row i of the result stays what it was."""
    case = built(op, k)
    (node, *_) = case.graph.nodes
    if record_of(node).loss is not None:
        return
    values = {name: value.double() if value.is_floating_point() else value for name, value in case.values.items()}
    use = Use(node, case.graph.spec)
    before = _results(node, values)
    for slot in record_of(node).row_slots(use):
        name = use.names[slot]
        elsewhere = list(use.names.values()).count(name) > 1  # one tensor in two slots
        if not values[name].is_floating_point() or values[name].numel() == 0 or elsewhere:
            continue
        for row in range(len(values[name])):
            others = torch.arange(len(values[name])) != row
            moved = values[name].clone()
            moved[others] = moved[others] * 0.5 + 0.25
            after = _results(node, {**values, name: moved})
            for a, b in zip(before, after, strict=True):
                torch.testing.assert_close(b[row], a[row], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "k"), [(op, k) for op, k in EVERY if op in records() and records()[op].single in MOVES]
)
def test_what_moves_numbers_moves_them(op: str, k: int) -> None:
    """Numbers of the result are numbers of the arguments; each of them once, or in order, where that is said."""
    case = built(op, k)
    (node, *_) = case.graph.nodes
    if node.op != op:  # one of several results of that
        return
    given = [case.values[name].flatten().double() for name in node.inputs]
    found = torch.cat([part.flatten() for part in _results(node, case.values)])
    assert torch.isin(found, torch.cat(given)).all()
    if record_of(node).single is InSingle.PERMUTED:
        assert torch.equal(found.sort()[0], case.values[node.inputs[0]].flatten().sort()[0])
    if record_of(node).in_order:
        assert torch.equal(found, case.values[node.inputs[0]].flatten())


@pytest.mark.parametrize(("op", "k"), [(op, k) for op, k in EVERY if op in records() and records()[op].shifts])
def test_what_shifts_is_added(op: str, k: int) -> None:
    """Moved by a number, it moves the result by its copies."""
    case = built(op, k)
    (node, *_) = case.graph.nodes
    values = {name: value.double() for name, value in case.values.items()}
    names = Use(node, case.graph.spec).names
    factor = abs(float(node.arguments.get("alpha", 1)))
    for slot in record_of(node).shifts:
        if slot in names and list(names.values()).count(names[slot]) == 1:
            moved = {**values, names[slot]: values[names[slot]] + 2.0}
            change = (_results(node, moved)[0] - _results(node, values)[0]).abs()
            steps = 2.0 * (factor if slot == "other" else 1.0)
            torch.testing.assert_close(change, torch.full_like(change, steps))


def _results(node: Node, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    value = node.run(values)
    return (value,) if isinstance(value, Tensor) else tuple(value)


def test_a_reading_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SurefootError, match="no reading 'colour'"):
        declare("aten.tanh", colour="green")


def test_an_unknown_operation_has_an_empty_record() -> None:
    assert record_of(Node("z", "other.thing", operator.neg, (), {}, "", ())) == Operation("other.thing")
