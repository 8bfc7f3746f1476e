"""A certificate as a piece of HTML for notebooks: no script, no colours of its own, every name escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from surefoot.certificate.text import HEAD, MOST_LINES, cells_of, footer, header, note
from surefoot.certificate.tree import Line, excerpt

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_NUMBERS = range(3, len(HEAD))
_CELL = "padding:0 12px 0 0;border:0;white-space:pre;background:transparent;color:inherit;line-height:1.35"
_TABLE = "border-collapse:collapse;color:inherit;font-family:monospace;font-size:12px"
_RULE = "border-bottom:1px solid rgba(127,127,127,.5)"


def html(certificate: Certificate) -> str:
    """Header, table and footer; a long table scrolls."""
    title, *rest = header(certificate)
    above = f"<strong>{escape(title)}</strong>" + "".join(f"<br>{escape(line)}" for line in rest)
    below = "<br>".join(escape(line) for line in footer(certificate))
    return f'<div style="color:inherit">{_block(above)}{_table(certificate)}{_block(below)}</div>'


def _block(content: str) -> str:
    return f'<div style="margin:4px 0;white-space:pre-wrap">{content}</div>' if content else ""


def _table(certificate: Certificate) -> str:
    part = excerpt(certificate.rows, None, MOST_LINES)
    if not part.shown:
        return ""
    head = "".join(
        f'<th scope="col" style="{_CELL};{_RULE};text-align:{_side(k)}">{name}</th>' for k, name in enumerate(HEAD)
    )
    lines = [_row(line, certificate) for line in part.shown]
    if part.hidden:
        left_out = f'<tr><td colspan="{len(HEAD)}" style="{_CELL}">… {part.hidden} more operations</td></tr>'
        lines.insert(len(part.first), left_out)
    return (
        f'<div style="max-height:32em;overflow:auto"><table style="{_TABLE}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    ) + _block("<br>".join(escape(line) for line in note(certificate, part)))


def _row(line: Line, certificate: Certificate) -> str:
    cells = "".join(
        f'<td style="{_CELL};text-align:{_side(k)}">{escape(cell)}</td>'
        for k, cell in enumerate(cells_of(line, certificate.smoothness))
    )
    return f'<tr title="{escape(line.row.module, quote=True)}" style="background:transparent">{cells}</tr>'


def _side(column: int) -> str:
    return "right" if column in _NUMBERS else "left"


__all__ = ["html"]
