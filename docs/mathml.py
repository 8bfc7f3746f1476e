"""Formulas as MathML, so that the built pages need no network and no script."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer; ``html_math_renderer = "mathml"`` uses it."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def inline(visitor: Any, node: nodes.math) -> None:
    """A formula in a sentence."""
    visitor.body.append(_mathml(node, "inline"))
    raise nodes.SkipNode


def display(visitor: Any, node: nodes.math_block) -> None:
    """A formula on a line of its own."""
    visitor.body.append(f'<div class="math">{_mathml(node, "block")}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, how: str) -> str:
    text = node.astext()
    try:
        return str(convert(text, display=how))
    except Exception as error:  # the converter raises many kinds
        raise ValueError(f"{node.source}: the formula cannot be converted: {text}") from error
