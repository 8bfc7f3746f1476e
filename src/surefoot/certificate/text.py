"""A certificate as plain text: a header with the verdict, a tree of operations, a footer with what limits it.

The same as HTML for notebooks: no script, no colours of its own, every name escaped.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from surefoot.certificate.advice import headline, limits, verdict
from surefoot.certificate.numbers import down, shape_text, share_text, short
from surefoot.certificate.rows import MODEL, Excerpt, Line, excerpt
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

WIDTH = 110
MOST_LINES = 60
_MOST_REASONS = 4
_MOST_BLOCKS = 8
_LONGEST_NAME = 40
_LONGEST_OPERATION = 20
HEAD = ("module", "operation", "output", "bound m", "Lipschitz ℓ", "smoothness L", "slope", "curvature", "share")
_BRIEF = (0, 1, 2, 5, 8)  # the columns that are printed unasked
_SHORT_HEAD = ("module", "operation", "output", "m", "ℓ", "L", "slope", "curv.", "share")


def render(certificate: Certificate) -> str:
    """Header, table and footer."""
    body = table(certificate, None, MOST_LINES, brief=True).splitlines()
    return "\n".join([*header(certificate), *body, *footer(certificate)])


OUTSIDE = "the present weights lie outside this domain: it says nothing about steps from them"


def header(certificate: Certificate) -> list[str]:
    """What is certified, where, the three constants, the verdict, and the steps that are guaranteed."""
    what = "parameters" if certificate.wrt == "params" else "the input"
    title = "Certificate" if certificate.constants == "certified" else "Constants as the paper prints them"
    added = f", the objective plus {certificate.regularizer}" if certificate.regularizer else ""
    return [
        *_wrapped(headline(certificate)),
        f"{title} with respect to {what}: {certificate.domain}" + added,
        f"bound m = {certificate.bound}   Lipschitz ℓ = {certificate.lipschitz}   "
        f"smoothness L = {certificate.smoothness}",
        *_effort(certificate),
        *([OUTSIDE] if certificate.weights_inside is False else []),
        *_wrapped(verdict(certificate)),
        *_steps(certificate),
    ]


def _effort(certificate: Certificate) -> list[str]:
    """What it cost, if that was chosen."""
    if certificate.effort == "normal" or certificate.gradients is None:
        return []
    return [f"effort {certificate.effort}: about {certificate.gradients:,} gradients"]


def _steps(certificate: Certificate) -> list[str]:
    """The steps that are guaranteed."""
    step, inverse = certificate.step_size, certificate.inverse_smoothness
    if certificate.flags or not certificate.scalar or not step:
        return []
    if certificate.segment_step is not None:
        return [f"guaranteed step along the segment = {down(step)}"]
    if step < inverse:
        said = f" = {down(step)}: the domain ends there (1/L = {down(inverse)})"
    elif step > inverse:
        said = f" = {down(step)}: one step from the weights (1/L = {down(inverse)}, for any within the domain)"
    else:
        said = f" 1/L = {down(step)}" + (
            "" if certificate.radius is not None else ", while steps stay in the domain"
        )
    return [f"guaranteed step size{said}", *_by_block(certificate)]


def _by_block(certificate: Certificate) -> list[str]:
    """The step size of each block, where that is longer for some blocks and shorter for none."""
    steps = certificate.block_step_sizes if certificate.block_lipschitz else {}
    joint = certificate.step_size
    if len(set(steps.values())) < 2 or min(steps.values()) < joint:
        return []
    shown = [f"{path or MODEL} {down(step)}" for path, step in list(steps.items())[:_MOST_BLOCKS]]
    more = len(steps) - len(shown)
    return _wrapped("or per block: " + ", ".join(shown) + (f" and {more} more" if more > 0 else ""))


def table(certificate: Certificate, depth: int | None = None, rows: int | None = None, brief: bool = False) -> str:
    """One line per operation, as a tree; folded to a depth or a number of lines.

    Where it is brief, it says how smooth the operations are and what share of L each has, and no more.

    Modules at that depth are one line each, by default all operations are shown; with more lines than ``rows``
    deep modules are folded until they fit, and if that is not enough, lines in the middle are left out.
    """
    part = excerpt(certificate.rows, depth, rows)
    if not part.shown:
        return ""
    cells = [cells_of(line, certificate.smoothness) for line in part.shown]
    wanted = _BRIEF if brief else range(len(HEAD))
    used = [k for k in wanted if k < 6 or any(row[k] for row in cells)]
    cells = [[row[k] for k in used] for row in cells]
    head = [HEAD[k] for k in used]
    if sum(_widths([head, *cells])) + 2 * (len(used) - 1) > WIDTH:
        head = [_SHORT_HEAD[k] for k in used]
    widths = _widths([head, *cells])
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    title, *body = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *cells]]
    if part.hidden:
        body.insert(len(part.first), f"… {part.hidden} more operations")
    return "\n".join([rule, title, rule, *body, rule, *note(certificate, part)])


def note(certificate: Certificate, part: Excerpt) -> list[str]:
    """What is not shown, and how to see it."""
    if not part.folded and not part.hidden:
        return []
    missing = f"{part.folded + part.hidden} of {len(certificate.rows)} operations are folded"
    return [f"{missing}: certificate.table(depth=…) shows more, certificate.table() all"]


def cells_of(line: Line, smoothness: Magnitude) -> list[str]:
    """The text of each column, in the order of ``HEAD``; zeros say nothing about a rule and are left out."""
    row, one = line.row, line.is_operation
    return [
        line.prefix + clipped(line.name, _LONGEST_NAME),
        clipped(line.operation, _LONGEST_OPERATION),
        shape_text(row.shape),
        *map(str, (row.bound, row.lipschitz, row.smoothness)),
        short(row.slope) if one else "",
        short(row.curvature) if one and row.curvature is not None and not row.curvature.is_zero else "",
        share_text(line.share, smoothness),
    ]


def clipped(text: str, most: int) -> str:
    """A text with its middle left out if it is long; what would break the line is written as an escape.

    >>> clipped("transformer_block_number_17", 12), clipped("a\\nb", 12)
    ('transf…er_17', 'a\\\\nb')
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def footer(certificate: Certificate) -> list[str]:
    """What limits the certificate, what would help, and the bracket."""
    lines = [f"not a bound: {flag}" for flag in certificate.flags]
    for sentence in certificate.remarks:
        lines += _wrapped(sentence)
    if not certificate.smoothness.is_finite:
        more = len(certificate.reasons) - _MOST_REASONS
        lines += ["L is infinite:", *(f"  {reason}" for reason in certificate.reasons[:_MOST_REASONS])]
        lines += [f"  and {more} more"] if more > 0 else []
    for sentence in limits(certificate):
        lines += _wrapped(sentence)
    if certificate.estimate is not None:
        lines += certificate.bracket(certificate.estimate).splitlines()
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


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
