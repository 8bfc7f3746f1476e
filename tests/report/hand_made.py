"""Certificates for tests of the report: made by hand, with everything that is hard to show."""

from __future__ import annotations

import numpy as np

from surefoot.certificate import Certificate, Row
from surefoot.magnitude import Magnitude

# Names that break out of text, attributes, scripts and JSON if anything is left unescaped.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "' onmouseover='alert(4)",
    "{{ 7 * 7 }}${7 * 7}\u2028&amp;",
)


def ten_to(exponent: float) -> Magnitude:
    """A power of ten of any size, up to rounding."""
    return Magnitude(exponent / np.log10(2.0))


def hand_made(paths: list[str], *, infinite: bool = False, scalar: bool = False) -> Certificate:
    """A certificate with one operation per path: values from 0 over 10^1043 to infinity, in no order."""
    rows = []
    for k, path in enumerate(paths):
        exponent = (37 * k) % 101 / 101 * 1043
        smoothness = (
            Magnitude.zero() if k == 0 else Magnitude.infinity() if infinite and k > 3 else ten_to(exponent)
        )
        rows.append(
            Row(
                module=path,
                operation=("linear", "softplus", "conv2d", "add")[k % 4],
                shape=(2, 3 + (k * 7) % 11),
                bound=ten_to(exponent / 7 - 20),
                lipschitz=ten_to(exponent / 2),
                smoothness=smoothness,
                share=((k * 13) % 29) / 29 / len(paths),
                slope=None if k == 0 else ten_to((k * 5) % 7),
                curvature=Magnitude.of(float(k % 3)),
            )
        )
    blocks = list(dict.fromkeys(paths))
    index = np.arange(len(blocks))
    logs = -np.abs(index[:, None] - index[None, :]) * 3.0 + 40.0
    logs[0, 0] = -np.inf
    if infinite:
        logs[-1, -1] = np.inf
    return Certificate(
        bound=rows[-1].bound,
        lipschitz=rows[-1].lipschitz,
        smoothness=Magnitude.infinity() if infinite else Magnitude(50.0) if scalar else ten_to(1043),
        block_lipschitz={path: ten_to(k) for k, path in enumerate(blocks)},
        block_smoothness=Magnitude(logs),
        reasons=("relu has a kink: use <b>soft-plus</b>",) if infinite else (),
        domain="each block within 1 of the <i>origin</i>",
        scalar=scalar,
        make_rows=lambda: rows,
    )
