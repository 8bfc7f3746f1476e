"""The page on convergence says of every row what its numbers say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bending import CASES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "convergence.md"


def rows(columns: int) -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        row
        for row in cells
        if len(row) == columns and not row[0].startswith(("problem", "samples", "rows", "network", "aim"))
    ]


def test_every_problem_is_proved_for_both_methods():
    found = rows(8)
    assert len(found) == 28
    assert len({row[0] for row in found}) == 14
    assert sum(bool(row[7]) for row in found) >= 12
    for _, _, steps, residual, _, distance, iterations, kept in found:
        assert int(steps) <= 25
        assert float(residual) > 0
        assert float(distance) > 0
        assert int(iterations.replace(",", "")) >= 0
        assert 0 < float(kept or 1) <= 1, "a promise was broken in 200 bits"


def test_every_aim_says_whether_it_is_met():
    found = rows(3)
    assert len(found) == 9
    assert {row[1] for row in found} == {"met"}


def test_before_the_first_step_the_border_is_half():
    found = rows(5)[:3]
    assert [row[0] for row in found] == ["5", "10", "20"]
    for row, most in zip(found, (1024, 4096, 16384), strict=True):
        assert int(row[1].strip("*").replace(",", "")) <= most
        assert float(row[2]) <= 0.5


def test_momentum_is_proved_to_be_faster_than_gradient_descent():
    found = [row for row in rows(7) if row[1].startswith("after ")]
    assert len(found) == 3
    for row in found:
        plain, per_block, momentum, batches = (int(cell.replace(",", "")) for cell in row[3:])
        assert 0 < 3 * momentum < plain < batches
        assert per_block > 0


def test_the_constant_is_at_most_five_times_the_truth_and_ten_for_convolutions():
    found = {row[0]: row for row in rows(4)}
    assert found.keys() == {case.name for case in CASES}
    for case in CASES:
        _, constant, attained, ratio = found[case.name]
        assert float(constant.removeprefix("K ≤ ")) >= 0.99 * float(attained)
        assert float(ratio) <= case.most


def test_ten_thousand_rows_and_a_million_parameters_are_verified():
    size, parameters, sigma, _, memory = rows(5)[-1]
    assert int(size.replace(",", "")) >= 10_000
    assert int(parameters.replace(",", "")) > 0.97e6
    assert float(sigma) > 0
    assert float(memory) < 6
