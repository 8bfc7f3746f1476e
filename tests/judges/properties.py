"""The properties a certificate promises, as assertions with names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from judges.function import Domain, Target
from judges.suprema import Suprema, attack
from surefoot.certificate import Certificate
from surefoot.magnitude import Magnitude

# A value in double precision is off by a relative 1e-13 or so for the small networks judged here; a bound that is
# wrong is wrong by a constant such as √2.
EVALUATION = 1e-9
# What is exactly zero comes out as some 1e-14 when a judge computes it from entries of order one.
CANCELLATION = 1e-12
NAMES = ("bound", "lipschitz", "smoothness")


@dataclass(frozen=True)
class Violation:
    """A value that was attained although a certificate excludes it."""

    name: str
    attained: float
    claimed: float

    def __str__(self) -> str:
        return f"{self.name}: {self.attained:.10g} was attained, at most {self.claimed:.10g} was claimed"


def violations(certificate: Certificate, found: Suprema) -> list[Violation]:
    """Everything the attack found that the certificate excludes."""
    wrong = []
    for name in NAMES:
        claimed, attained = getattr(certificate, name), getattr(found, name)
        assert not math.isnan(float(claimed)), name
        if attained > float(claimed) * (1 + EVALUATION) + CANCELLATION:
            wrong.append(Violation(name, attained, float(claimed)))
    return wrong


def assert_upper_bound(
    certificate: Certificate, model: nn.Module, x: Any, domain: Domain, wrt: str = "params", **effort: int
) -> None:
    """No value, slope or curvature found on the domain exceeds the certificate."""
    found = attack(Target.of(model, x, domain, wrt), **effort)
    wrong = violations(certificate, found)
    assert not wrong, f"{'; '.join(map(str, wrong))} on {domain!r} wrt {wrt}\n{model}"


def assert_monotone_in_radius(certified: Callable[[float], Certificate], radii: Sequence[float]) -> None:
    """A larger domain never has smaller constants."""
    certificates = [certified(radius) for radius in sorted(radii)]
    for smaller, larger in itertools.pairwise(certificates):
        for name in NAMES:
            low, high = getattr(smaller, name), getattr(larger, name)
            assert low <= high * (1 + EVALUATION), (name, smaller.domain, larger.domain, low, high)


def assert_invariant_under(
    first: Certificate, second: Certificate, *, relative: float = EVALUATION, names: Sequence[str] = NAMES
) -> None:
    """Two descriptions of the same function have the same constants."""
    for name in names:
        a, b = getattr(first, name), getattr(second, name)
        assert close(a, b, relative), (name, a, b)


def close(a: Magnitude, b: Magnitude, relative: float) -> bool:
    """Whether two magnitudes of any size agree."""
    return bool(a <= b * (1 + relative) and b <= a * (1 + relative))
