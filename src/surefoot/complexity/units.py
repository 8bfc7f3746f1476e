"""Large counts for readers: three digits and a unit."""

from __future__ import annotations

from decimal import Decimal

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def engineering(count: int, unit: str = "") -> str:
    """Three significant digits with a prefix for a power of a thousand; beyond 10²¹, a power of ten.

    >>> engineering(15470264320), engineering(999999), engineering(312), engineering(20480, "B")
    ('15.5 G', '1.00 M', '312', '20.5 kB')
    >>> engineering(5 * 10**23)
    '5.00e+23'
    """
    if count < 1000:
        return f"{count} {unit}".strip()
    power = 0
    value = Decimal(count)  # a float ends at 10³⁰⁸
    while value >= Decimal("999.5"):
        value /= 1000
        power += 1
    if power >= len(_PREFIXES):
        return f"{Decimal(count):.2e} {unit}".strip()
    digits = 2 if value < Decimal("9.995") else 1 if value < Decimal("99.95") else 0
    return f"{value:.{digits}f} {_PREFIXES[power]}{unit}"


def table(rows: list[tuple[str, ...]], left: int = 1) -> list[str]:
    """Lines of aligned columns; the first ``left`` columns are aligned to the left, all others to the right.

    >>> table([("a", "10"), ("bcd", "2")])
    ['a    10', 'bcd   2']
    """
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
