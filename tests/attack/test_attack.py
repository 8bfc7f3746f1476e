"""No value, slope or curvature on the domain exceeds a certificate, over random networks that nobody tuned."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from attack.judge import Judge
from attack.networks import Network, networks

CASES_PER_NETWORK = 4


def explore(number: int, examples: int) -> Counter[str]:
    """Judge some cases of each of ``examples`` random networks; the number decides which."""
    count: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a network follows from one number: a smaller one is not simpler
        suppress_health_check=list(HealthCheck),
    )
    @given(networks())
    def attack(network: Network) -> None:
        judge = Judge(network)
        for k in range(CASES_PER_NETWORK):
            case = network.case(k)
            verdict = judge.verdict(case, seed=k)
            assert not verdict.wrong, "\n".join([str(network), str(case), *verdict.wrong])
            count["cases"] += 1
            count["finite"] += verdict.finite
            count["within ten"] += verdict.ratio < 10

    attack()
    return count


@pytest.mark.parametrize("number", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 8))])
def test_certificates_hold(number):
    count = explore(number, examples=32)
    assert count["cases"] >= 128
    assert count["finite"] >= count["cases"] // 2, count
    assert count["within ten"] >= count["cases"] // 4, count


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 120))
def test_certificates_hold_on_ten_thousand_more_cases(number):
    assert explore(number, examples=128)["cases"] >= 512
