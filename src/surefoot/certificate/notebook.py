"""A certificate in a notebook: what its report begins with, without script; every name is escaped.

Colours are those of the notebook, light or dark, but for one stroke and the bars of shares.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from surefoot.certificate.advice import USEFUL, headline, verdict, worth
from surefoot.certificate.numbers import lower, per_cent, shape_text, upper
from surefoot.certificate.rows import Line, excerpt
from surefoot.certificate.text import MOST_LINES, OUTSIDE, clipped, footer, note

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

_GOOD, _WARN = "#12908a", "#cf6a2e"
_HEAD = ("module", "operation", "output", "m", "ℓ", "L", "share of L")
_TABLE = "border-collapse:collapse;color:inherit;font-size:0.92em;font-variant-numeric:tabular-nums;margin:0"
_CELL = "padding:3px 14px 3px 0;border:0;white-space:pre;background:transparent;color:inherit;line-height:1.35"
_RULE = "border-bottom:1px solid rgba(127,127,127,.35)"
_LONGEST_NAME = 40


def html(certificate: Certificate) -> str:
    """A card with the headline, the numbers and where they hold; the table, which scrolls; what limits it."""
    colour = _GOOD if worth(certificate) == USEFUL else _WARN
    what, said = "parameters" if certificate.wrt == "params" else "the input", verdict(certificate)
    kind = "" if certificate.constants == "certified" else "Constants as the paper prints them. "
    about = [f"{kind}With respect to {what}: {certificate.domain}", said[:1].upper() + said[1:]]
    about += [OUTSIDE] if certificate.weights_inside is False else []
    about += [f"the objective plus {certificate.regularizer}"] if certificate.regularizer else []
    card = (
        f'<div style="border-left:4px solid {colour};padding:2px 0 2px 14px;margin:4px 0 10px">'
        f'<div style="font-size:1.12em"><strong>{escape(headline(certificate))}</strong></div>'
        f'<div style="opacity:.75">{"<br>".join(map(escape, about))}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:6px 28px;margin-top:8px">{_figures(certificate)}</div></div>'
    )
    rest = "<br>".join(map(escape, footer(certificate)))
    below = f'<div style="margin:8px 0;white-space:pre-wrap">{rest}</div>' if rest else ""
    return f'<div style="color:inherit;max-width:70em">{card}{_table(certificate)}{below}</div>'


def _figures(certificate: Certificate) -> str:
    """The constants, each above its name."""
    shown = [("bound m", upper(certificate.bound)), ("Lipschitz ℓ", upper(certificate.lipschitz))]
    shown.append(("smoothness L", upper(certificate.smoothness)))
    if certificate.scalar and certificate.step_size and not certificate.flags:
        shown.append(("step size", lower(certificate.step_size)))
    large, small = "font-size:1.25em;white-space:nowrap", "opacity:.7"
    return "".join(
        f'<div><div style="{large}">{value}</div><div style="{small}">{name}</div></div>' for name, value in shown
    )


def _table(certificate: Certificate) -> str:
    part = excerpt(certificate.rows, None, MOST_LINES)
    if not part.shown:
        return ""
    head = "".join(
        f'<th scope="col" style="{_CELL};{_RULE};{_align(k)}">{name}</th>' for k, name in enumerate(_HEAD)
    )
    lines = [_row(line, certificate) for line in part.shown]
    if part.hidden:
        left_out = f'<tr><td colspan="{len(_HEAD)}" style="{_CELL}">… {part.hidden} more operations</td></tr>'
        lines.insert(len(part.first), left_out)
    said = "".join(f'<div style="opacity:.75">{escape(text)}</div>' for text in note(certificate, part))
    return (
        f'<div style="max-height:32em;overflow:auto"><table style="{_TABLE}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{said}"
    )


def _row(line: Line, certificate: Certificate) -> str:
    row, infinite = line.row, not certificate.smoothness.is_finite
    share = ("∞" if line.share > 0 else "") if infinite else per_cent(line.share)
    texts = (
        line.prefix + clipped(line.name, _LONGEST_NAME), line.operation, shape_text(row.shape),
        upper(row.bound), upper(row.lipschitz), upper(row.smoothness), share,
    )  # fmt: skip
    cells = "".join(
        f'<td style="{_CELL};{_align(k)}{_bar(line.share) if k == len(texts) - 1 and not infinite else ""}">'
        f"{escape(text)}</td>"
        for k, text in enumerate(texts)
    )
    return f'<tr title="{escape(row.module, quote=True)}" style="background:transparent">{cells}</tr>'


def _align(column: int) -> str:
    """Numbers are aligned to the right."""
    return f"text-align:{'right' if column > 1 else 'left'}"


def _bar(share: float) -> str:
    """A share as a bar behind its number."""
    end = f"{100 * min(share, 1.0):.1f}%"
    return f";min-width:8em;background:linear-gradient(to right,rgba(18,144,138,.28) {end},transparent {end})"
