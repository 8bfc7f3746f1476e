"""What ``surefoot rules`` and ``surefoot models`` do: list what is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

import surefoot as sf
from surefoot.cli import output
from surefoot.cli.guard import Outcome
from surefoot.cli.zoo_names import zoo_names

Row = tuple[str, ...]


def list_rules(search: str | None, json: bool) -> Outcome:
    """The operations that certificates know, and what is claimed of each."""
    rows: list[Row] = [
        (operation, rule.__module__.rpartition(".")[2], plain(inspect.getdoc(rule) or ""))
        for operation, rule in sorted(sf.operations.rules().items())
    ]
    rows = _list(("operation", "family", "claim"), rows, search, json)
    if rows and not json:
        output.result(f"\n{len(rows)} operations")
    if not rows:
        output.note(f"no rule mentions '{search}'; CONTRIBUTING.md shows how to add one")
    return Outcome.CERTIFIED


def list_models(search: str | None, json: bool) -> Outcome:
    """The models of the zoo."""
    rows = [(name, f"{plain(about)} {preset}".strip()) for name, (about, preset) in zoo_names().items()]
    title = "name" if json else "model"
    if not _list((title, "summary"), rows, search, json):
        output.note(f"no model mentions '{search}'")
    return Outcome.CERTIFIED


def _list(head: tuple[str, ...], rows: Sequence[Row], search: str | None, json: bool) -> list[Row]:
    """Show the rows that mention a text; returns them."""
    chosen = [row for row in rows if not search or search.lower() in " ".join(row).lower()]
    if json:
        output.document([dict(zip(head, row, strict=True)) for row in chosen])
    elif chosen:
        output.table(head, chosen, left=len(head))
    return chosen


_SIGNS = {
    r"\|": "‖", r"\top": "ᵀ", r"\sum": "Σ", r"\pi": "π", r"\lambda": "λ", r"\alpha": "α", r"\max": "max",
    r"\min": "min", r"\sin": "sin", r"\log": "log", r"\circ": "∘", r"\le": "≤", r"\ge": "≥", r"\cdot": "·",
    r"\times": "×", r"\sqrt": "√", r"\odot": "⊙", r"\dots": "…", r"\in": "∈", r"\,": " ", "^ᵀ": "ᵀ",
}  # fmt: skip


def plain(docstring: str) -> str:
    r"""The first sentence of a docstring without its markup.

    >>> plain(r"The norm :math:`\|W\|^\top`, see :func:`~surefoot.norms.spectral_norm` and ``bound``. More.")
    'The norm ‖W‖ᵀ, see spectral_norm and bound.'
    """
    text = " ".join(docstring.partition("\n\n")[0].split())
    text = re.split(r"(?<=[.])\s+(?=[A-Z])", text)[0].rstrip(":;")
    text = re.sub(r":\w+:`~?((?:[a-z_]+\.)+)(\w+)`", r"\2", text)
    text = re.sub(r":\w+:`([^`]*)`", r"\1", text)
    for sign, shown in _SIGNS.items():
        text = text.replace(sign, shown)
    return text.replace("``", "")
