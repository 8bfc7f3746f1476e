"""A certificate as a piece of HTML for notebooks: no script, no colours of its own, every name escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from surefoot.certificate.rows import Line, excerpt
from surefoot.certificate.text import HEAD, MOST_LINES, cells_of, footer, header, note

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

_CELL = "padding:0 12px 0 0;border:0;white-space:pre;background:transparent;color:inherit;line-height:1.35"
_TABLE = "border-collapse:collapse;color:inherit;font-family:monospace;font-size:12px"
_RULE = "border-bottom:1px solid rgba(127,127,127,.5)"


def html(certificate: Certificate) -> str:
    """Header, table and footer; a long table scrolls."""
    title, *rest = map(escape, header(certificate))
    parts = [_block("<br>".join([f"<strong>{title}</strong>", *rest]))]
    part = excerpt(certificate.rows, None, MOST_LINES)
    if part.shown:
        head = "".join(_cell("th", name, k, f' scope="col" style="{_CELL};{_RULE}') for k, name in enumerate(HEAD))
        lines = [_row(line, certificate) for line in part.shown]
        if part.hidden:
            left_out = f'<tr><td colspan="{len(HEAD)}" style="{_CELL}">… {part.hidden} more operations</td></tr>'
            lines.insert(len(part.first), left_out)
        parts.append(
            f'<div style="max-height:32em;overflow:auto"><table style="{_TABLE}">'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        )
        parts.append(_block("<br>".join(map(escape, note(certificate, part)))))
    parts.append(_block("<br>".join(map(escape, footer(certificate)))))
    return f'<div style="color:inherit">{"".join(parts)}</div>'


def _block(content: str) -> str:
    return f'<div style="margin:4px 0;white-space:pre-wrap">{content}</div>' if content else ""


def _row(line: Line, certificate: Certificate) -> str:
    texts = cells_of(line, certificate.smoothness)
    cells = "".join(_cell("td", escape(text), k, f' style="{_CELL}') for k, text in enumerate(texts))
    return f'<tr title="{escape(line.row.module, quote=True)}" style="background:transparent">{cells}</tr>'


def _cell(tag: str, content: str, column: int, attributes: str) -> str:
    """Numbers are aligned to the right."""
    return f'<{tag}{attributes};text-align:{"right" if column > 2 else "left"}">{content}</{tag}>'


__all__ = ["html"]
