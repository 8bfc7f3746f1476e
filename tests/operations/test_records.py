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
from surefoot.operations.record import Form, Operation, declare, record_of, records, rule_for

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


def _results(node: Node, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    value = node.run(values)
    return (value,) if isinstance(value, Tensor) else tuple(value)


def test_a_reading_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SurefootError, match="no reading 'colour'"):
        declare("aten.tanh", colour="green")


def test_an_unknown_operation_has_an_empty_record() -> None:
    assert record_of(Node("z", "other.thing", operator.neg, (), {}, "", ())) == Operation("other.thing")
