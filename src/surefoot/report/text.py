"""A certificate as a table in plain text."""

from __future__ import annotations

import math
import textwrap
from decimal import ROUND_DOWN, Context, Decimal, localcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_MOST_REASONS = 4
_MOST_BLOCKS = 8


def render(certificate: Certificate) -> str:
    """The table: a header with domain and verdict, one line per operation, a footer with what limits it."""
    head = ("module", "operation", "output", "bound m", "Lipschitz ℓ", "smoothness L", "share")
    lines = [
        (
            row.module or "(model)",
            row.operation,
            "×".join(map(str, row.shape)) or "scalar",
            str(row.bound),
            str(row.lipschitz),
            str(row.smoothness),
            f"{row.share:.0%}" if row.share >= 0.005 else "",
        )
        for row in certificate.rows
    ]
    widths = [max(len(line[k]) for line in [head, *lines]) for k in range(len(head))]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    table = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *lines]
    ]
    body = [rule, table[0], rule, *table[1:], rule] if lines else []
    return "\n".join([*_header(certificate), *body, *_footer(certificate)])


def _header(certificate: Certificate) -> list[str]:
    what = "parameters" if certificate.wrt == "params" else "the input"
    title = "Certificate" if certificate.constants == "certified" else "Constants as the paper prints them"
    return [
        f"{title} with respect to {what}: {certificate.domain}",
        f"  bound m = {certificate.bound}   Lipschitz ℓ = {certificate.lipschitz}   "
        f"smoothness L = {certificate.smoothness}",
    ]


def _footer(certificate: Certificate) -> list[str]:
    lines = [f"not a bound: {flag}" for flag in certificate.flags]
    if not certificate.smoothness.is_finite:
        lines.append("L is infinite:")
        lines += [f"  {reason}" for reason in certificate.reasons[:_MOST_REASONS]]
        more = len(certificate.reasons) - _MOST_REASONS
        if more > 0:
            lines.append(f"  and {more} more")
    elif certificate.flags:
        lines.append("no step size is guaranteed: the smoothness rests on constants that are not bounds")
    elif certificate.segment_step is not None:
        lines.append(f"guaranteed step along the segment = {_down(certificate.segment_step)}")
    elif certificate.scalar and certificate.step_size:
        lines.append(f"guaranteed step size 1/L = {_down(certificate.step_size)}")
        lines += _by_block(certificate)
    return lines


def _by_block(certificate: Certificate) -> list[str]:
    """The step size of each block, where they say more than 1/L; wrapped."""
    steps = certificate.block_step_sizes if certificate.block_lipschitz else {}
    if len(set(steps.values())) < 2:
        return []
    shown = [f"{path or '(model)'} {_down(step)}" for path, step in list(steps.items())[:_MOST_BLOCKS]]
    more = len(steps) - len(shown)
    text = "or per block: " + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False)


def _down(step: float) -> str:
    """Four digits, rounded towards zero: a step that is printed is as safe as the one it stands for."""
    if not 0 < step < math.inf:
        return "0" if step == 0 else "∞"
    with localcontext(Context(prec=4, rounding=ROUND_DOWN)):
        return f"{float(+Decimal(step)):.3e}"
