r"""How a bound was built: the rules of the operations that occur, and the errata about their constants.

Docstrings of rules become HTML: ``docutils`` reads them, ``latex2mathml`` their formulas. The elements of the page
are made here, and every text is escaped, so a docstring can put only text and formulas into a page. Without the
packages (``pip install latex2mathml docutils``) paragraphs and formulas are shown as they are written.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup, escape

import surefoot.operations.captured  # noqa: F401  registers the operations
from surefoot.certificate import Certificate, Row
from surefoot.operations.record import Operation, Rule, records

_ROLE = re.compile(r":(?!math:)\w+:`~?([^`]*)`")
_SETTINGS = {
    "_disable_config": True, "doctitle_xform": False, "file_insertion_enabled": False, "raw_enabled": False,
    "report_level": 5, "halt_level": 5,
}  # fmt: skip
_TAGS = {
    "paragraph": "p", "bullet_list": "ul", "enumerated_list": "ol", "list_item": "li", "literal": "code",
    "literal_block": "pre", "emphasis": "em", "strong": "strong",
}  # fmt: skip
_SILENT = ("system_message", "comment", "substitution_definition")
_ATTRIBUTES = (
    "accent", "columnalign", "display", "displaystyle", "fence", "form", "mathvariant", "stretchy", "width",
)  # fmt: skip


def prose(docstring: str | None) -> Markup:
    """A docstring as HTML; sections of arguments and results are left out."""
    text = re.split(r"(?:^|\n)\s*(?:Args|Returns|Raises|Attributes):\n", inspect.cleandoc(docstring or ""))[0]
    return _html(_read(text))


def summary(docstring: str | None) -> tuple[Markup, Markup]:
    """The first paragraph, which is the claim, without its tags; and the rest, which is the proof."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n\n")
    claim = _read(first)
    only = claim.children[0] if len(claim.children) == 1 else claim
    return Markup("").join(map(_html, only.children)) if only.tagname == "paragraph" else _html(claim), prose(rest)


class _Plain:
    """A node of a document without ``docutils``: its paragraphs, as they are written."""

    def __init__(self, tagname: str, children: list[Any], text: str = "") -> None:
        self.tagname, self.children, self.text = tagname, children, text

    def astext(self) -> str:
        return self.text


def _read(text: str) -> Any:
    """A tree of nodes with ``tagname``, ``children`` and ``astext()``."""
    try:
        from docutils.core import publish_doctree
    except ImportError:
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]
        return _Plain("document", [_Plain("paragraph", [_Plain("#text", [], part)]) for part in paragraphs])
    return publish_doctree(_ROLE.sub(r"``\1``", text), settings_overrides=_SETTINGS)


def _html(node: Any) -> Markup:
    if node.tagname == "math":
        return maths(node.astext())
    if node.tagname == "math_block":
        return Markup('<p class="formula">{}</p>').format(maths(node.astext()))
    if node.tagname == "#text":
        return escape(node.astext())
    content = Markup("").join(_html(child) for child in node.children if child.tagname not in _SILENT)
    tag = _TAGS.get(node.tagname)
    return content if tag is None else Markup("<{0}>{1}</{0}>").format(Markup(tag), content)


def maths(source: str) -> Markup:
    r"""A formula as MathML; as text if it cannot be read.

    >>> print(maths(r"x^2"))
    <math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>
    """
    try:
        from latex2mathml.converter import convert_to_element

        root = convert_to_element(" ".join(source.split()))
    except Exception:  # the converter raises many types of errors
        return Markup("<code>{}</code>").format(source)
    for element in root.iter():  # texts hold character references; their characters are escaped below
        element.text = unescape(element.text or "")
        element.attrib = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


@dataclass(frozen=True)
class RuleEntry:
    """One rule: its operations, how often they occur, its claim and its proof."""

    operations: str
    count: int
    claim: Markup
    proof: Markup


@dataclass(frozen=True)
class Family:
    """Rules that rest on the same argument."""

    title: Markup
    argument: Markup
    entries: list[RuleEntry]


@dataclass(frozen=True)
class Erratum:
    """A constant of the paper that is not used here; the number is its number in the list of errata."""

    number: int
    printed: str
    holds: str


def families(certificates: Iterable[Certificate]) -> list[Family]:
    """The rules behind certificates, by family, in the order in which they occur."""
    by_module: dict[str, dict[Rule, list[str]]] = {}
    for certificate in certificates:
        if certificate.constants != "certified":
            continue
        for row in certificate.rows:
            rule = record_for(row).bounds
            assert rule is not None
            by_module.setdefault(rule.__module__, {}).setdefault(rule, []).append(row.operation)
    return [_family(module, entries) for module, entries in by_module.items()]


def record_for(row: Row) -> Operation:
    """The record of a row, whose name is that of its operation or of the scalar function that it computes.

    A loss is one number, so a row with the name of a loss but another shape is another operation.
    """
    with_bounds = {name: record for name, record in records().items() if record.bounds is not None}
    named = [record for name, record in with_bounds.items() if name.rpartition(".")[2] == row.operation]
    fitting = [record for record in named if record.loss is None or not row.shape]
    return fitting[0] if fitting else with_bounds["surefoot.scalar"]


def _family(module: str, entries: dict[Rule, list[str]]) -> Family:
    is_ours = module.startswith("surefoot.")
    title, argument = summary(getattr(sys.modules.get(module), "__doc__", None) if is_ours else None)
    rules = []
    for rule, operations in entries.items():
        claim, proof = summary(rule.__doc__)
        rules.append(RuleEntry(", ".join(dict.fromkeys(operations)), len(operations), claim, proof))
    heading = Markup(title.rstrip(".")) if is_ours else Markup("Rules registered outside of the package")
    return Family(heading, argument, rules)


_ERRATA = (
    Erratum(2, "The intercept of a convolution has constant √m⌈k/s⌉ (main text) or √m (appendix).",
            "√(m·positions): it is copied to every position of every sample. The printed number is not a bound."),
    Erratum(3, "Batch-normalisation: bound δm, ℓ = 2ε^(−1/2), L = 2m^(−1/2)ε^(−1).",
            "√(δm), ε^(−1/2) and 0.8587·m^(−1/2)ε^(−1); for images m counts positions too."),
    Erratum(12, "Supervised objectives: only the smoothness of each loss is needed.",
            "The mean of n losses has L = max Lᵢ/n and ℓ = max ℓᵢ/√n."),
    Erratum(13, "Logistic loss ℓ ≤ 2, L ≤ 2; soft-max ℓ = 2, L = 4.", "√2 and 1/2; 1/2 and √2/(3√3)."),
    Erratum(15, "Pooling: ℓ = 1.",
            "Averages of disjoint k×k patches have 1/k; maxima √(patches over one entry). For overlapping maxima "
            "the printed number is not a bound."),
    Erratum(17, "ℓ of a layer adds up the layers before it: ℓˣℓ + ℓᵘ.",
            "Parameters of different layers are orthogonal: one number per block, a matrix for pairs of blocks."),
    Erratum(18, "Convergence of gradient descent in O(·) iterations.",
            "min‖∇F(uₖ)‖² ≤ 2L(F(u₀) − F_low)/N with step 1/L, while the iterates stay in the domain."),
)  # fmt: skip
_OF_ALL_MODELS, _OF_OBJECTIVES = {17}, {18}


def errata(certificates: Sequence[Certificate]) -> list[Erratum]:
    """The errata about operations that occur."""
    numbers = {
        number for c in certificates for row in c.rows for number in record_for(row).errata
    } | _OF_ALL_MODELS
    if any(c.scalar for c in certificates):
        numbers |= _OF_OBJECTIVES
    return [erratum for erratum in _ERRATA if erratum.number in numbers]
