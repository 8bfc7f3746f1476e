"""Benchmarks: every table on a page has its benchmark, resumes where it was cut off, and its tools are right."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import lipschitz, runner, soak, soak_rounds, training
from benchmarks.timing import compare

from surefoot.errors import SurefootError

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
BENCHMARKS = runner.registry()
TABLES = {name: rows for text in PAGES.values() for name, rows in runner.tables(text).items()}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A benchmark of three cases whose second fails once, on a page; the cases that were measured."""
    measured: list[str] = []

    def case(label: str) -> Any:
        measured.append(label)
        if label == "b" and measured.count("b") == 1:
            raise KeyboardInterrupt
        return [label, "1"] if label != "c" else [["c", "2"], ["d", "3"]]

    monkeypatch.setattr(runner, "PAGES", tmp_path)
    monkeypatch.setattr(runner, "FOLDER", tmp_path / "build")
    monkeypatch.setattr(runner, "registry", lambda: runner.REGISTRY)
    monkeypatch.setattr(runner, "REGISTRY", {})
    runner.benchmark("letters", "alphabet", "letter | number")(lambda: [(x, lambda x=x: case(x)) for x in "abc"])
    (tmp_path / "alphabet.md").write_text("# A\n\n<!-- benchmark: letters -->\n\n| old |\n| - |\n\nend\n")
    return measured


def test_a_run_that_was_cut_off_goes_on_and_writes_its_table(example: list[str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.run(["letters"])
    assert "| old |" in (tmp_path / "alphabet.md").read_text()
    runner.run(["alphabet"])
    assert example == ["a", "b", "b", "c"]
    table = "| letter | number |\n| --- | --- |\n| a | 1 |\n| b | 1 |\n| c | 2 |\n| d | 3 |\n"
    page = (tmp_path / "alphabet.md").read_text()
    assert page == f"# A\n\n<!-- benchmark: letters -->\n\n{table}\nend\n"
    assert runner.tables(page) == {
        "letters": [["letter", "number"], ["a", "1"], ["b", "1"], ["c", "2"], ["d", "3"]]
    }


def test_other_code_is_measured_anew_and_parts_are_not_written(
    example: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.run(["letters"], only="a")
    monkeypatch.setattr(runner, "code_digest", lambda: "other")
    runner.run(["letters"], only="a")
    assert example == ["a", "a"]
    assert "| old |" in (tmp_path / "alphabet.md").read_text()
    with pytest.raises(SystemExit, match="there is no benchmark words: there are letters"):
        runner.run(["words"])


def test_every_table_has_its_benchmark_and_its_columns() -> None:
    assert TABLES.keys() == BENCHMARKS.keys()
    for name, (columns, *rows) in TABLES.items():
        assert tuple(columns) == BENCHMARKS[name].columns
        assert f"benchmark: {name} -->" in PAGES[BENCHMARKS[name].page]
        assert rows
        assert all(len(row) == len(columns) for row in rows)


@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"peers"}))
def test_labels_are_unique_and_most_cases_have_rows(name: str) -> None:
    labels = [label for label, _ in BENCHMARKS[name].cases()]
    assert len(set(labels)) == len(labels)
    assert len(TABLES[name]) - 1 >= 0.9 * len(labels)


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name.startswith("application")])
def test_the_paper_s_application_is_what_is_computed_now(name: str) -> None:
    rows: list[Any] = []
    for _, compute in BENCHMARKS[name].cases():
        found: Any = compute()
        rows += found if isinstance(found[0], list) else [found]
    assert rows == TABLES[name][1:], "run `python -m benchmarks application`"


def numbers(name: str, column: int) -> list[float]:
    cells = [row[column].split(" ")[0].strip("*").replace(",", "").replace("∞", "inf") for row in TABLES[name][1:]]
    return [float(cell) for cell in cells if cell not in ("", "–", "not", "refused", ">")]


def test_numbers_on_the_pages_hold_what_is_claimed() -> None:
    assert min(numbers("tightness", 3) + numbers("sharpness", 5) + numbers("width", 1)) >= 1.0
    assert all(balls <= step for balls, step in zip(numbers("sharpness", 2), numbers("sharpness", 3), strict=True))
    assert set(numbers("training-steps", 5)) == {0.0}, "a certified step went up"
    for few, many in zip(numbers("training-150", 1), numbers("training-500", 1), strict=True):
        assert many <= few
    for _, _, product, fast, eclipse, ours, *_ in TABLES["lipschitz"][1:]:
        mine = float(ours.strip("*"))
        assert mine < float(fast) < float(product)
        assert eclipse in ("refused", "not run") or mine <= float(eclipse) * (1 + 1e-4)
    families = {row[0]: row for row in TABLES["families"][1:]}
    assert sum(row[2] != "∞" for row in families.values()) >= 60
    assert all(row[3] != "∞" or "kink" in row[5] or "complex numbers" in row[5] for row in families.values())


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_what_is_aimed_at_is_marked_where_it_was_missed(text: str) -> None:
    """In a column behind the number that it is about."""
    for name, (_, *rows) in runner.tables(text).items():
        for row in rows:
            for k, cell in enumerate(row):
                match = re.fullmatch(r"([≤≥]) ([\d.e-]+)( \(missed\))?", cell)
                if match and name not in ("speed", "minibatches"):
                    value = float(row[k - 1].strip("*"))
                    met = value <= float(match[2]) if match[1] == "≤" else value >= float(match[2])
                    assert met == (match[3] is None), (name, row)


def test_two_functions_are_compared() -> None:
    found = compare(lambda: sum(range(40_000)), lambda: sum(range(10_000)), pairs=9, calls=20)
    assert 2.5 < found.low <= found.ratio <= found.high < 6
    assert found.seconds > 0


def test_the_semidefinite_program_is_that_of_surefoot() -> None:
    model = lipschitz.random_network((4, 8, 6, 3), 0)
    weights = lipschitz.weights_of(model)
    solved, proved = lipschitz.lipsdp(weights), lipschitz.certified(model)
    assert solved * (1 - 1e-6) <= proved <= 1.001 * solved
    assert solved < math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)


def test_a_short_run_of_every_training_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BUDGETS", (5, 15))
    problem = next(training.problems())
    first = {}
    for method in ("certified", "torch LBFGS", "Adam", "constant step", "Armijo"):
        rate = training.TUNED[method][1][2] if method in training.TUNED else None
        run = training.train(problem.name, method, rate, 0)
        work = [spent for spent, _ in run["curve"]]
        assert work[0] == 0
        assert work == sorted(work)
        assert run["losses"].keys() == {"5", "15"}
        assert run["losses"]["15"] <= run["losses"]["5"]
        first[method] = run["curve"][0][1]
        assert method != "certified" or run["ascents"] == 0
    assert first == pytest.approx(dict.fromkeys(first, first["certified"]), rel=1e-9)


def test_refusals_are_counted_and_other_errors_are_faults() -> None:
    def refuses(dice: random.Random) -> str:
        raise SurefootError("a sentence")

    def fails(dice: random.Random) -> str:
        raise KeyError("weight")

    assert soak.attempt(refuses, 3) == ("refuses: refused by a sentence, SurefootError", True)
    said, right = soak.attempt(fails, 3)
    assert not right
    assert "seed 3: KeyError" in said
    page = soak.written(PAGES["reliability"], soak.Counter({"value": 2}), [said], 60.0, 7)
    assert "3 rounds in 1 minutes, seed 7" in page
    assert said in page
    assert soak.written(page, soak.Counter({"value": 3}), [], 60.0, 7).endswith("Nothing.\n")


@pytest.mark.parametrize("name", ["cut_off", "full_disk", "values", "interrupted_step"])
def test_rounds(name: str) -> None:
    for seed in range(2):
        said, right = soak.attempt(getattr(soak_rounds, name), seed)
        assert right, said


def test_a_wrong_value_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = soak_rounds.sf.evaluate

    def lies(*given: object, **options: object) -> object:
        found = proved(*given, **options)  # type: ignore[arg-type]
        return type("Value", (), {"value": found.value + 3 * found.error, "error": found.error})()

    monkeypatch.setattr(soak_rounds.sf, "evaluate", lies)
    said, right = soak.attempt(soak_rounds.values, 1)
    assert not right
    assert "is outside of" in said
