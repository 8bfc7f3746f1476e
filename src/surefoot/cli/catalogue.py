"""``surefoot rules`` and ``surefoot models``: what is there."""

from __future__ import annotations

import inspect
import re
from typing import Annotated

import typer

from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.frame import Outcome, guarded
from surefoot.cli.names import zoo_names

Search = Annotated[
    str | None, typer.Option("--search", "-s", metavar="TEXT", help="Only those that mention this text.")
]


@guarded
def rules(search: Search = None, json: o.Json = False, quiet: o.Quiet = False, debug: o.Debug = False) -> Outcome:
    """List the operations that certificates know, and what is claimed of each.

    Examples:

      surefoot rules

      surefoot rules --search pool
    """
    with output.working("importing torch"):
        from surefoot.operations import rules as registered

    rows = []
    for operation, rule in sorted(registered().items()):
        rows.append((operation, rule.__module__.rpartition(".")[2], plain(inspect.getdoc(rule) or "")))
    rows = [row for row in rows if not search or search.lower() in " ".join(row).lower()]
    if json:
        output.document([dict(zip(("operation", "family", "claim"), row, strict=True)) for row in rows])
    elif rows:
        output.table(("operation", "family", "claim"), rows, left=3)
        output.result(f"\n{len(rows)} operations")
    if not rows:
        output.note(f"no rule mentions '{search}'; CONTRIBUTING.md shows how to add one")
    return Outcome.CERTIFIED


@guarded
def models(search: Search = None, json: o.Json = False, quiet: o.Quiet = False, debug: o.Debug = False) -> Outcome:
    """List the models of the zoo.

    Options of a model stand behind its name: mlp@sizes=64,32,10@activation=tanh.

    Example:

      surefoot models --search vgg
    """
    rows = [(name, f"{plain(about)} {preset}".strip()) for name, (about, preset) in zoo_names().items()]
    rows = [row for row in rows if not search or search.lower() in " ".join(row).lower()]
    if json:
        output.document([{"name": name, "summary": about} for name, about in rows])
    elif rows:
        output.table(("model", "summary"), rows, left=2)
    if not rows:
        output.note(f"no model mentions '{search}'")
    return Outcome.CERTIFIED


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
