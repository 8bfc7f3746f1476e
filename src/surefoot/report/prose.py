"""Docstrings as HTML: paragraphs, lists, code, roles and formulas; what they use of reStructuredText."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from markupsafe import Markup, escape

from surefoot.report.maths import maths

_INLINE = re.compile(
    r":math:`(?P<maths>[^`]*)`"
    r"|:\w+:`~?(?P<role>[^`]*)`"
    r"|``(?P<code>.+?)``"
    r"|\*\*(?P<strong>[^*\s][^*]*?)\*\*"
    r"|(?<![\w*])\*(?P<emphasis>[^*\s][^*]*?)\*(?![\w*])"
    r"|\\(?P<escaped>\W)",
    re.DOTALL,
)
_BULLET = re.compile(r"(?:[*-]|\d+\.)\s+")


def prose(docstring: str | None) -> Markup:
    """A docstring as HTML; sections of arguments and results are left out."""
    text = re.split(r"\n\s*(?:Args|Returns|Raises|Attributes):\n", inspect.cleandoc(docstring or ""))[0]
    return Markup("\n").join(_blocks(text))


def summary(docstring: str | None) -> tuple[Markup, Markup]:
    """The first paragraph, which is the claim, and the rest, which proves it."""
    first, _, rest = inspect.cleandoc(docstring or "").partition("\n\n")
    return inline(first), prose(rest)


def inline(text: str) -> Markup:
    """One paragraph without its tags."""
    out, end = Markup(""), 0
    text = " ".join(text.split())
    for match in _INLINE.finditer(text):
        out += escape(text[end : match.start()]) + _marked(match)
        end = match.end()
    return out + escape(text[end:])


def _marked(match: re.Match[str]) -> Markup:
    kind, content = match.lastgroup, match[match.lastgroup or 0]
    if kind == "maths":
        return maths(content)
    if kind == "escaped":
        return escape({"|": "|"}.get(content, content))
    tag = {"strong": "strong", "emphasis": "em"}.get(kind or "", "code")
    return Markup("<{0}>{1}</{0}>").format(Markup(tag), content)


def _blocks(text: str) -> Iterator[Markup]:
    for block in re.split(r"\n\s*\n", text):
        if not block.strip():
            continue
        formula = re.match(r"\.\. math::(.*)", block.strip(), re.DOTALL)
        if formula:
            yield Markup('<p class="formula">{}</p>').format(maths(" ".join(formula[1].split())))
        elif _BULLET.match(block.strip()):
            yield _list(block)
        else:
            yield Markup("<p>{}</p>").format(inline(block))


def _list(block: str) -> Markup:
    tag = Markup("ol" if block.strip()[0].isdigit() else "ul")
    items = re.split(r"(?:^|\n)\s*(?:[*-]|\d+\.)\s+", block.strip())
    content = Markup("").join(Markup("<li>{}</li>").format(inline(item)) for item in items if item.strip())
    return Markup("<{0}>{1}</{0}>").format(tag, content)


__all__ = ["inline", "prose", "summary"]
