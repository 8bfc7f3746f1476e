"""A certificate as plain text: what it says about steps, the table of operations, what limits it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.certificate.advice import headline, limits, point, verdict
from surefoot.certificate.rows import MODEL, Line, excerpt
from surefoot.domains import VARIABLES
from surefoot.magnitude import Magnitude
from surefoot.numbers import down, shape_text, short

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

WIDTH = 96
_MOST_LINES, _MOST_REASONS, _MOST_BLOCKS = 60, 4, 8
_LONGEST_NAME = 40
HEAD = ("module", "operation", "output", "bound m", "Lipschitz ℓ", "smoothness L", "slope", "curvature", "share")
_BRIEF = (0, 1, 2, 5, 8)  # the columns that are printed by default


def render(certificate: Certificate, width: int | None = None) -> str:
    """Header, table and footer, wrapped to a width."""
    columns = width or WIDTH
    body = table(certificate, None, _MOST_LINES, brief=True).splitlines()
    return "\n".join([*header(certificate, columns), *body, *footer(certificate, columns)])


def header(certificate: Certificate, width: int = WIDTH) -> list[str]:
    """The headline, the domain, the three constants, the verdict, and the steps that are guaranteed."""
    title = "Certificate" if certificate.constants == "certified" else "Constants as the paper prints them"
    added = f", the objective plus {certificate.regularizer}" if certificate.regularizer else ""
    constants = (
        f"bound m = {certificate.bound}   Lipschitz ℓ = {certificate.lipschitz}   "
        f"smoothness L = {certificate.smoothness}"
    )
    lines = [
        *_wrapped(headline(certificate), width),
        f"{title} with respect to {VARIABLES[certificate.wrt]}: {certificate.domain}{added}",
        *(constants.split("   ") if len(constants) > width else [constants]),
    ]
    if certificate.effort != "normal" and certificate.gradients is not None:
        lines.append(f"effort {certificate.effort}: about {certificate.gradients:,} gradients")
    if certificate.weights_inside is False:
        lines.append(outside(certificate))
    return [*lines, *_wrapped(verdict(certificate), width), *_steps(certificate, width)]


def outside(certificate: Certificate) -> str:
    """The warning for a domain that the present point is not in."""
    what = point(certificate)
    lie = "lie" if what == "weights" else "lies"
    return f"the present {what} {lie} outside this domain: it says nothing about steps from there"


def _steps(certificate: Certificate, width: int) -> list[str]:
    """The steps that are guaranteed."""
    step, inverse = certificate.step_size, certificate.inverse_smoothness
    if certificate.flags or not certificate.scalar or not step:
        return []
    if certificate.segment_step is not None:
        return [f"guaranteed step along the segment = {down(step)}"]
    if step < inverse:
        size = f" = {down(step)}: the domain ends there (1/L = {down(inverse)})"
    elif step > inverse:
        size = (
            f" = {down(step)}: one step from the {point(certificate)} (1/L = {down(inverse)}, within the domain)"
        )
    else:
        size = f" 1/L = {down(step)}{', while steps stay in the domain' if certificate.radius is None else ''}"
    lines = [f"guaranteed step size{size}"]
    # Step sizes by block are worth a line if they are longer for some blocks and shorter for none.
    by_block = certificate.block_step_sizes if certificate.block_lipschitz else {}
    if len(set(by_block.values())) > 1 and min(by_block.values()) >= step:
        shown = [f"{path or MODEL} {down(each)}" for path, each in list(by_block.items())[:_MOST_BLOCKS]]
        more = f" and {len(by_block) - len(shown)} more" if len(by_block) > len(shown) else ""
        lines += _wrapped("or per block: " + ", ".join(shown) + more, width)
    return lines


def table(certificate: Certificate, depth: int | None = None, rows: int | None = None, brief: bool = False) -> str:
    """One line per operation; folded to a depth or a number of lines.

    What modules at ``depth`` compute is one line each. With more lines than ``rows`` deep modules are folded until
    they fit, and if that is not enough, lines in the middle are left out. A ``brief`` table has only the columns
    for smoothness and shares.
    """
    first, last = excerpt(certificate.rows, depth, rows)
    if not first:
        return ""
    cells = [_cells(line, certificate.smoothness) for line in (*first, *last)]
    used = [k for k in (_BRIEF if brief else range(len(HEAD))) if k < 6 or any(row[k] for row in cells)]
    grid = [[row[k] for k in used] for row in (list(HEAD), *cells)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    title, *body = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in grid]
    hidden = len(certificate.rows) - sum(line.operations for line in (*first, *last))
    if hidden:
        body.insert(len(first), f"… {hidden} more operations")
    apart = hidden + sum(line.operations for line in (*first, *last) if line.operations > 1)
    end = [f"{apart} of {len(certificate.rows)} operations are folded: certificate.table() shows all"]
    return "\n".join([rule, title, rule, *body, rule, *(end if apart else [])])


def _cells(line: Line, smoothness: Magnitude) -> list[str]:
    """The text of each column, in the order of ``HEAD``; a curvature of zero is left out."""
    row, single = line.row, line.operations == 1
    share = f"{line.share:.0%}" if line.share >= 0.005 else ""
    bent = row.curvature if row.curvature is not None and not row.curvature.is_zero else None
    return [
        clipped(line.name, _LONGEST_NAME),
        clipped(row.operation, _LONGEST_NAME // 2) if single else f"{line.operations} operations",
        shape_text(row.shape),
        *map(str, (row.bound, row.lipschitz, row.smoothness)),
        short(row.slope) if single else "",
        short(bent) if single else "",
        share if smoothness.is_finite else "∞" if line.share > 0 else "",
    ]


def clipped(text: str, most: int) -> str:
    """A text with its middle left out if it is long; characters that would break the line are escaped.

    >>> clipped("transformer_block_number_17", 12), clipped("a\\nb", 12)
    ('transf…er_17', 'a\\\\nb')
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def footer(certificate: Certificate, width: int = WIDTH) -> list[str]:
    """What limits the certificate, and the bracket."""
    lines = [f"not a bound: {flag}" for flag in certificate.flags]
    for sentence in certificate.remarks:
        lines += _wrapped(sentence, width)
    if not certificate.smoothness.is_finite:
        more = len(certificate.reasons) - _MOST_REASONS
        lines += ["L is infinite:", *(f"  {reason}" for reason in certificate.reasons[:_MOST_REASONS])]
        lines += [f"  and {more} more"] if more > 0 else []
    for sentence in limits(certificate):
        lines += _wrapped(sentence, width)
    if certificate.estimate is not None:
        lines += certificate.bracket(certificate.estimate).splitlines()
    return lines


def _wrapped(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
