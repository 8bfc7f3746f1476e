"""A certificate as a table in plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.certificate import Certificate

_MOST_REASONS = 4


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
    return "\n".join([*_header(certificate), rule, table[0], rule, *table[1:], rule, *_footer(certificate)])


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
    elif certificate.scalar and certificate.step_size:
        lines.append(f"guaranteed step size 1/L = {certificate.step_size:.3e}")
    return lines
