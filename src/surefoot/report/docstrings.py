"""Docstrings as HTML: ``docutils`` reads them, ``latex2mathml`` their formulas.

The elements of the page are made here, and every text is escaped, so a docstring can put nothing into a page but
text and formulas. Without the packages (``pip install surefoot[report]``) paragraphs and formulas are shown as
they are written.
"""

from __future__ import annotations

import inspect
import re
from html import unescape
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup, escape

_ROLE = re.compile(r":(?!math:)\w+:`~?([^`]*)`")
_SETTINGS = {
    "_disable_config": True,
    "doctitle_xform": False,
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "report_level": 5,
    "halt_level": 5,
}
_TAGS = {
    "paragraph": "p",
    "bullet_list": "ul",
    "enumerated_list": "ol",
    "list_item": "li",
    "literal": "code",
    "literal_block": "pre",
    "emphasis": "em",
    "strong": "strong",
}
_SILENT = ("system_message", "comment", "substitution_definition")
_ATTRIBUTES = (
    "accent",
    "columnalign",
    "display",
    "displaystyle",
    "fence",
    "form",
    "mathvariant",
    "stretchy",
    "width",
)


def prose(docstring: str | None) -> Markup:
    """A docstring as HTML; sections of arguments and results are left out."""
    text = re.split(r"(?:^|\n)\s*(?:Args|Returns|Raises|Attributes):\n", inspect.cleandoc(docstring or ""))[0]
    return _html(_read(text))


def summary(docstring: str | None) -> tuple[Markup, Markup]:
    """The first paragraph, which is the claim, without its tags, and the rest, which proves it."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n\n")
    claim = _read(first)
    only = claim.children[0] if len(claim.children) == 1 else claim
    return Markup("").join(map(_html, only.children)) if only.tagname == "paragraph" else _html(claim), prose(rest)


class _Plain:
    """What stands for a document that nothing can read: its paragraphs, as they are written."""

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
    except Exception:  # the reader has no error of its own for all that it cannot read
        return Markup("<code>{}</code>").format(source)
    for element in root.iter():  # texts hold character references; what they stand for is escaped below
        element.text = unescape(element.text or "")
        element.attrib = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


__all__ = ["maths", "prose", "summary"]
