"""The page on tightness says of every row what its numbers say."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tightness.md"


def rows(table: int = 0) -> list[list[str]]:
    part = PAGE.read_text(encoding="utf-8").split("\n## ")[table]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_network_has_a_row():
    assert len(rows()) == 16
    assert {row[0] for row in rows()} == {"softplus", "tanh"}


def test_missed_targets_are_marked_and_no_bound_is_below_the_truth():
    for _, _, _, median, worst, target, _ in rows():
        typical, largest = float(median.strip("*")), float(worst)
        assert 1.0 <= typical <= largest
        limit = float(target.removeprefix("≤ ").removesuffix(" (missed)"))
        assert target.endswith("(missed)") == (largest > limit)


def test_networks_of_several_kinds():
    found = rows(1)
    assert len(found) == 9
    for _, numbers, balls, step, longest, centre, most, cost, stated in found:
        proved, ratio = float(step.strip("*")), float(centre.strip("*"))
        assert 0 < float(balls) <= 1.0 <= ratio
        assert float(balls) <= proved
        assert longest.endswith("(missed)") == (
            proved < float(longest.removeprefix("≥ ").removesuffix(" (missed)"))
        )
        assert most.endswith("(missed)") == (ratio > float(most.removeprefix("≤ ").removesuffix(" (missed)")))
        assert all(int(count.replace(",", "")) > 0 for count in (numbers, cost, stated))


def test_what_balls_reach_is_said():
    targets = [(float(row[2]), float(row[4].removeprefix("≥ ").removesuffix(" (missed)"))) for row in rows(1)]
    reached = sum(balls >= target for balls, target in targets)
    assert f"Balls alone reach the targets of steps in {reached} of 9 rows." in PAGE.read_text(encoding="utf-8")


def test_there_is_no_cliff_at_a_width_before_the_budget_ends():
    ratios = {int(width): float(ratio.strip("*")) for width, ratio, _, _ in rows(2)}
    assert all(ratio >= 1.0 for ratio in ratios.values())
    assert ratios[136] <= 1.2 * ratios[128]


def test_the_wide_network_says_what_is_proved():
    ((_, numbers, norm, norms, proved, target, cost, stated),) = rows(3)
    ratio, spent = float(proved.strip("*")), int(cost.replace(",", ""))
    most, gradients = target.removeprefix("≤ ").removesuffix(" (missed)").split(" in ")
    met = ratio <= float(most) and spent <= int(gradients.replace(",", ""))
    assert target.endswith("(missed)") == (not met)
    assert float(norm) > 0
    assert 1.0 <= ratio <= float(norms.replace(",", ""))
    assert all(int(count.replace(",", "")) > 0 for count in (numbers, stated))


def test_one_step_of_a_gated_network_is_one_factor():
    growth = {network: float(per.split()[0]) for network, _, _, _, per in rows(4)}
    assert all(factor >= 1.0 for factor in growth.values())
    assert growth["GRU"] < 2.0
    assert growth["LSTM"] < 5.0
