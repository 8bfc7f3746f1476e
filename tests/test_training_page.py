"""The pages on training say how they are made, and their numbers hold what they claim; so does a short run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE, BATCHED = (ROOT / "docs" / name for name in ("training.md", "minibatches.md"))
BUDGETS = (150, 500)


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import cells, training

    monkeypatch.setattr(cells, "FOLDER", tmp_path)
    return training


def _table(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of the table below a heading: cells by column."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 2, f"no table below '{heading}'"
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]


def _number(cell: str) -> float:
    return float(cell.strip("*≤≥ ").replace("∞", "inf").replace(",", "").split(" ")[0])


def _verdict(cell: str) -> bool:
    assert cell in ("yes", "**no**")
    return cell == "yes"


@pytest.mark.parametrize("page", [PAGE, BATCHED], ids=lambda page: page.stem)
def test_the_page_says_how_it_is_made(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (module,) = re.findall(r"^OMP_NUM_THREADS=1 python -m ([\w.]+)(?: --\w+(?: \d)?)*$", text, re.MULTILINE)
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
    for path in re.findall(r"`(benchmarks/[\w/.]+)`", text):
        assert (ROOT / path).exists()
    for figure in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (PAGE.parent / figure).read_bytes().startswith(b"\x89PNG")


def test_no_certified_step_goes_up(text: str) -> None:
    assert all(row["ascents"] == "0" for row in _table(text, "Verdicts by network"))


@pytest.mark.parametrize("budget", BUDGETS)
def test_verdicts_follow_from_the_losses(text: str, budget: int) -> None:
    losses = {row["network"]: row for row in _table(text, f"Loss for the work of {budget} gradients")}
    rows = _table(text, "Verdicts by network")
    assert losses.keys() == {row["network"] for row in rows}
    for row in rows:
        seen = {m: max(_number(c), 1e-9) for m, c in losses[row["network"]].items() if m != "network"}
        ratio = seen["certified"] / seen["torch LBFGS"]
        assert _number(row[f"loss / LBFGS, {budget}"]) == pytest.approx(ratio, rel=0.02)
        assert _verdict(row[f"not behind, {budget}"]) == (ratio <= 1.1) or ratio == pytest.approx(1.1, rel=0.02)
        lowest = seen["certified"] <= min(seen.values())
        assert _verdict(row[f"lowest, {budget}"]) == lowest or sorted(seen.values())[:2] == [seen["certified"]] * 2
        cost = _number(row["gradients per step"])
        assert _verdict(row["reached"]) == (cost <= 1.6) or cost == 1.6


def test_all_networks_and_methods_are_there(text: str) -> None:
    rows = _table(text, "Loss for the work of 500 gradients")
    assert len(rows) == 18
    assert {"certified", "torch LBFGS", "Adam", "constant step", "Armijo"} <= rows[0].keys()


def test_certified_losses_fall_with_work(text: str) -> None:
    few, many = (_table(text, f"Loss for the work of {budget} gradients") for budget in BUDGETS)
    for first, second in zip(few, many, strict=True):
        assert _number(second["certified"]) <= _number(first["certified"])


@pytest.mark.parametrize("heading", ["Networks", "More networks"])
def test_mini_batches(heading: str) -> None:
    for row in _table(BATCHED.read_text(encoding="utf-8"), heading):
        best = max(_number(row["best fixed rate"]), 1e-9)
        cells = [re.fullmatch(r"(\S+) \((\S+)\)", cell) for name, cell in row.items() if name.startswith("proved")]
        ratios = [float(cell[2]) for cell in cells if cell]
        assert len(ratios) == 3
        seen = [max(float(cell[1]), 1e-9) / best for cell in cells if cell]
        assert ratios == [pytest.approx(ratio, rel=0.02, abs=0.01) for ratio in seen]
        assert _verdict(row["≤ 1.3"]) == (max(ratios) <= 1.3) or max(ratios) == 1.3
        work = _number(row["work per epoch"])
        assert _verdict(row["≤ 1.4"]) == (work <= 1.4) or work == 1.4  # rounded, as above
        assert _number(row["measured work"]) > 0


def test_safe_steps_are_fractions_and_verdicts_follow(text: str) -> None:
    rows = _table(text, "How long a step promised ahead is")
    assert [row["H"] for row in rows] == ["1", "2", "4", "8", "16"]
    for row in rows:
        cells = [re.fullmatch(r"([\d.]+) \(([\d.]+)\)", row[f"order {order}"]) for order in (3, 4, 5)]
        medians, smallest = zip(*((float(cell[1]), float(cell[2])) for cell in cells if cell), strict=True)
        assert all(0 < low <= middle <= 1 for low, middle in zip(smallest, medians, strict=True))
        aim = _number(row["target"])
        assert _verdict(row["reached"]) == (smallest[-1] >= aim) or smallest[-1] == aim


def test_a_short_run_of_every_method(training: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BUDGETS", (5, 15))
    monkeypatch.setattr(training, "TUNED", {"Adam": (1e-3, 1e-2, 1e-1), "constant step": (0.25, 0.5, 1.0)})
    problem = next(iter(training.problems(quick=True)))
    problem = replace(problem, x=problem.x[:200], y=problem.y[:200])
    study = training.study(problem, range(1), quick=True)
    assert list(study.results) == training.methods()
    first = {name: result.trace.losses[0] for name, result in study.results.items()}
    assert first == pytest.approx(dict.fromkeys(first, first["certified"]), rel=1e-9)
    for result in study.results.values():
        assert result.trace.work[0] == 0
        assert result.trace.work == sorted(result.trace.work)
        assert result.losses.keys() == {5, 15}
    assert study.ascents == 0
    losses = study.results["certified"].trace.losses
    assert losses == sorted(losses, reverse=True)
    assert training.verdicts([study])
    assert training.study(problem, range(1), quick=True).results["Adam"] == study.results["Adam"]  # from the files


def test_what_is_spent_and_what_is_lost(training: ModuleType) -> None:
    trace = training.Trace([0.0, 10.0, 20.0], [2.0, 1.0, 0.5], 20, 0, 0.01)
    assert [trace.loss_at(budget) for budget in (0, 15, 20)] == [2.0, 1.0, 0.5]
    assert replace(trace, lost=True).loss_at(20) == float("inf")


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
