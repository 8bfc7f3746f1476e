"""A certificate as plain text: a header with the verdict, a tree of operations, a footer with what limits it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.certificate.advice import headline, limits, verdict
from surefoot.certificate.numbers import down, shape_text, share_text, short
from surefoot.certificate.rows import MODEL, Excerpt, Line, excerpt
from surefoot.domains import VARIABLES
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

WIDTH = 96
MOST_LINES = 60
_MOST_REASONS = 4
_MOST_BLOCKS = 8
_LONGEST_NAME, _SHORTEST_NAME = 40, 12
_LONGEST_OPERATION = 20
HEAD = ("module", "operation", "output", "bound m", "Lipschitz ℓ", "smoothness L", "slope", "curvature", "share")
_BRIEF = (0, 1, 2, 5, 8)  # the columns that are printed by default
_SHORT_HEAD = ("module", "operation", "output", "m", "ℓ", "L", "slope", "curv.", "share")


def render(certificate: Certificate, width: int = WIDTH) -> str:
    """Header, table and footer."""
    body = table(certificate, None, MOST_LINES, brief=True, width=width).splitlines()
    return "\n".join([*header(certificate, width), *body, *footer(certificate, width)])


OUTSIDE = "the present weights lie outside this domain: it says nothing about steps from them"


def header(certificate: Certificate, width: int = WIDTH) -> list[str]:
    """The headline, the domain, the three constants, the verdict, and the steps that are guaranteed."""
    title = "Certificate" if certificate.constants == "certified" else "Constants as the paper prints them"
    constants = [
        f"bound m = {certificate.bound}",
        f"Lipschitz ℓ = {certificate.lipschitz}",
        f"smoothness L = {certificate.smoothness}",
    ]
    cost = f"effort {certificate.effort}: about {certificate.gradients or 0:,} gradients"
    added = f", the objective plus {certificate.regularizer}" if certificate.regularizer else ""
    return [
        *_wrapped(headline(certificate), width),
        f"{title} with respect to {VARIABLES[certificate.wrt]}: {certificate.domain}" + added,
        *(["   ".join(constants)] if sum(map(len, constants)) + 6 <= width else constants),
        *([cost] if certificate.effort != "normal" and certificate.gradients is not None else []),
        *([OUTSIDE] if certificate.weights_inside is False else []),
        *_wrapped(verdict(certificate), width),
        *_steps(certificate, width),
    ]


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
        size = f" = {down(step)}: one step from the weights (1/L = {down(inverse)}, for any within the domain)"
    else:
        size = f" 1/L = {down(step)}{', while steps stay in the domain' if certificate.radius is None else ''}"
    return [f"guaranteed step size{size}", *_by_block(certificate, width)]


def _by_block(certificate: Certificate, width: int) -> list[str]:
    """The step size of each block, if it is longer for some blocks and shorter for none."""
    steps = certificate.block_step_sizes if certificate.block_lipschitz else {}
    joint = certificate.step_size
    if len(set(steps.values())) < 2 or min(steps.values()) < joint:
        return []
    shown = [f"{path or MODEL} {down(step)}" for path, step in list(steps.items())[:_MOST_BLOCKS]]
    more = len(steps) - len(shown)
    return _wrapped("or per block: " + ", ".join(shown) + (f" and {more} more" if more > 0 else ""), width)


def table(
    certificate: Certificate,
    depth: int | None = None,
    rows: int | None = None,
    brief: bool = False,
    width: int = WIDTH,
) -> str:
    """One line per operation, as a tree; folded to a depth or a number of lines.

    Modules at ``depth`` are one line each; by default all operations are shown. With more lines than ``rows``,
    deep modules are folded until they fit, and if that is not enough, lines in the middle are left out. A
    ``brief`` table has only the columns for smoothness and shares.
    """
    part = excerpt(certificate.rows, depth, rows)
    if not part.shown:
        return ""
    cells = [cells_of(line, certificate.smoothness) for line in part.shown]
    wanted = _BRIEF if brief else range(len(HEAD))
    used = [k for k in wanted if k < 6 or any(row[k] for row in cells)]
    cells = [[row[k] for k in used] for row in cells]
    head = [HEAD[k] for k in used]
    if sum(_widths([head, *cells])) + 2 * (len(used) - 1) > width:
        head = [_SHORT_HEAD[k] for k in used]
    over = sum(_widths([head, *cells])) + 2 * (len(used) - 1) - width
    if brief and over > 0:  # module names give way
        room = max(_widths(cells)[0] - over, _SHORTEST_NAME)
        cells = [[clipped(row[0], room), *row[1:]] for row in cells]
    widths = _widths([head, *cells])
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    title, *body = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *cells]]
    if part.hidden:
        body.insert(len(part.first), f"… {part.hidden} more operations")
    return "\n".join([rule, title, rule, *body, rule, *note(certificate, part)])


def note(certificate: Certificate, part: Excerpt) -> list[str]:
    """How many operations are not shown, and how to see them."""
    if not part.folded and not part.hidden:
        return []
    missing = f"{part.folded + part.hidden} of {len(certificate.rows)} operations are folded"
    return [f"{missing}: certificate.table(depth=…) shows more, certificate.table() all"]


def cells_of(line: Line, smoothness: Magnitude) -> list[str]:
    """The text of each column, in the order of ``HEAD``; a curvature of zero is left out."""
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
    """A text with its middle left out if it is long; characters that would break the line are escaped.

    >>> clipped("transformer_block_number_17", 12), clipped("a\\nb", 12)
    ('transf…er_17', 'a\\\\nb')
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most - most // 2 - 1) :]}"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def footer(certificate: Certificate, width: int = WIDTH) -> list[str]:
    """What limits the certificate, what would help, and the bracket."""
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


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
