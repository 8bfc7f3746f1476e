"""What is assumed of operations and not proved.

Round-off is proved of every operation of this package, on one assumption about torch's elementary functions
(:mod:`surefoot.scalar.rounded`). How an operation that somebody else registered is evaluated nobody knows here: its
value and its derivatives are assumed to be as good as sums of products of so many numbers as its rule says
(``reduction``; see :mod:`surefoot.operations.evaluation`). A certificate that rests on this says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.graph.structure import Node
from surefoot.operations.record import record_of

_PACKAGE = __name__.partition(".")[0]


def assumptions(nodes: Iterable[Node]) -> tuple[str, ...]:
    """One sentence for each operation of which the round-off is assumed."""
    records = {node.op: record_of(node) for node in nodes}
    foreign = {
        name: record.family
        for name, record in records.items()
        if record.bounds is not None and record.rounds is not False
        if record.family.partition(".")[0] != _PACKAGE
    }
    return tuple(
        f"assumed: '{name}', a rule of {module}, and its derivatives are evaluated as accurately as sums of products"
        for name, module in foreign.items()
    )
