"""The page on training says how it is made, and its numbers hold what it claims; so does a run of a few steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "training.md"


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import training

    return training


def _tables(text: str, heading: str) -> list[dict[str, list[str]]]:
    """The rows of the table below a heading: cells by column; a column name may occur twice."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 2, f"no table below '{heading}'"
    head, rows = lines[0], lines[2:]
    assert {len(row) for row in rows} == {len(head)}
    return [{name: [c for n, c in zip(head, row, strict=True) if n == name] for name in head} for row in rows]


def _number(cell: str) -> float:
    return float(cell.strip("*≤≥ ").replace("∞", "inf").split(" ")[0])


def _verdict(cell: str) -> bool:
    cell = cell.removesuffix(" †")
    assert cell in ("yes", "**no**")
    return cell == "yes"


def test_the_page_says_how_it_is_made(text: str) -> None:
    (module,) = re.findall(r"^OMP_NUM_THREADS=1 python -m ([\w.]+)$", text, re.MULTILINE)
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
    for path in re.findall(r"`(benchmarks/[\w/.]+)`", text):
        assert (ROOT / path).exists()
    for figure in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (PAGE.parent / figure).read_bytes().startswith(b"\x89PNG")


def test_no_certified_step_goes_up_or_breaks_its_promise(text: str) -> None:
    rows = _tables(text, "Ascents and broken promises")
    for row in rows:
        assert [row[name] for name in ("certified", "certified, gradient", "SafeRate-like")] == [["0"]] * 3
        assert row["broken promises"] == ["0, 0, 0"]
    steps = 3 * sum(int(row["steps"][0]) for row in rows)
    assert (
        f"Of {steps} certified steps, 0 increased the objective and 0 decreased it by less than promised" in text
    )


def test_verdicts_follow_from_the_numbers(text: str) -> None:
    rows = _tables(text, "Targets")
    losses = {row["network"][0]: row for row in _tables(text, "Loss after the same number of steps")}
    assert losses.keys() == {row["network"][0] for row in rows}
    for row in rows:
        aims, verdicts = [_number(cell) for cell in row["target"]], [_verdict(cell) for cell in row["reached"]]
        ratio, cost = _number(row["loss / best constant"][0]), _number(row["gradients per step"][0])
        for verdict, shown, aim in zip(verdicts, (ratio, cost), aims, strict=True):
            assert verdict == (shown <= aim) or shown == aim  # rounded to the target: either may be
        final = losses[row["network"][0]]
        computed = _number(final["certified"][0]) / _number(final["best constant step"][0])
        assert ratio == pytest.approx(computed, rel=0.02)
        assert aims[0] == (1 if "tanh" in row["network"][0] else 3)


def test_safe_steps_are_fractions_and_verdicts_follow(text: str) -> None:
    rows = _tables(text, "How long a proved step is")
    assert [row["H"] for row in rows] == [["1"], ["2"], ["4"], ["8"], ["16"]]
    for row in rows:
        cells = [re.fullmatch(r"([\d.]+) \(([\d.]+)\)", row[f"order {order}"][0]) for order in (3, 4, 5)]
        medians, smallest = zip(*((float(cell[1]), float(cell[2])) for cell in cells if cell), strict=True)
        assert all(0 < low <= middle <= 1 for low, middle in zip(smallest, medians, strict=True))
        aim = _number(row["target"][0])
        assert _verdict(row["reached"][0]) == (smallest[-1] >= aim) or smallest[-1] == aim


@pytest.mark.parametrize("heading", ["Loss for the same work", "Loss in the same time"])
def test_less_work_never_reaches_lower_with_a_proof(text: str, heading: str) -> None:
    """Certified losses fall with every step, so those of fewer steps are no lower."""
    final = {row["network"][0]: row for row in _tables(text, "Loss after the same number of steps")}
    for row in _tables(text, heading):
        for name in ("certified", "certified, gradient", "SafeRate-like"):
            assert _number(row[name][0]) >= _number(final[row["network"][0]][name][0])


def test_a_short_run_descends_and_keeps_its_promises(training: ModuleType) -> None:
    task = next(iter(training.problems(quick=True))).task
    task = replace(task, x=task.x[:200], y=task.y[:200], steps=6)
    runs = training.compete(task, 1.0, 3.0, 2.0)
    assert tuple(runs) == training.METHODS
    for name, run in runs.items():
        assert len(run.losses) == len(run.work) == len(run.seconds) == task.steps + 1
        assert run.losses[0] == pytest.approx(runs["Adam"].losses[0], rel=1e-12)
        assert (run.promised is not None) == (name in training.METHODS[:3])
        if run.promised is not None:
            assert (run.ascents, run.broken) == (0, 0)
            assert all(promise > 0 for promise in run.promised)
            assert run.final <= run.losses[0] - sum(run.promised) * (1 - 1e-9)
    assert runs["Armijo"].ascents == 0
    assert runs["certified"].work[-1] >= 4 * task.steps  # a gradient and an expansion at least
    assert runs["SafeRate-like"].work[-1] >= 3 * task.steps
    assert runs["best constant step"].work[-1] == task.steps


def test_ascents_and_broken_promises_are_seen(training: ModuleType) -> None:
    run = training.Run(
        "m", "", (2.0, 1.0, 1.5, 1.4), (0.0, 1.0, 2.0, 3.0), (0.0, 1.0, 2.0, 3.0), 3, (0.5, 0.1, 0.2)
    )
    assert (run.ascents, run.broken) == (1, 2)
    assert run.loss_at(1.5, run.work) == 1.0
    assert training.Run("m", "", (2.0, float("nan")), (0.0, 1.0), (0.0, 1.0), 3).final == float("inf")


def test_the_safe_step_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import safe_step

    import surefoot as sf

    x, y = torch.randn(8, 784).double() / 28, torch.randn(8, 10).double()
    model, loss = safe_step.network(2), sf.Square(y)
    direction, curvature = safe_step.curvature_along(model, x, loss)
    slope = sum(float((d * d).sum()) for d in direction.values())
    step = safe_step.longest_safe_step(safe_step.Along(model, x, loss), direction, 5, slope / curvature)
    values = _values_along(model, direction, lambda: float(loss(model(x)).detach()), step)
    second = (values[0.001] - 2 * values[0.0] + values[-0.001]) / (0.001 * step) ** 2
    assert curvature == pytest.approx(second, rel=1e-3)
    assert 0.9 < step * curvature / slope <= 1
    for part in (0.25, 0.5, 1.0):  # F ≤ F₀ − η‖∇F‖² + η²/2 · ‖∇F‖²/step
        assert values[part] <= values[0.0] - slope * step * (part - part**2 / 2) + 1e-12


def _values_along(
    model: torch.nn.Module, direction: dict[str, torch.Tensor], value: Callable[[], float], step: float
) -> dict[float, float]:
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    values = {}
    for part in (-0.001, 0.0, 0.001, 0.25, 0.5, 1.0):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name] + part * step * direction[name])
        values[part] = value()
    return values
