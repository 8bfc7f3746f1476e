"""The page of the reliability run says what it must, and its rounds tell a fault from a refusal."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

from surefoot.errors import SurefootError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import soak

    return soak


def test_the_page_is_of_a_whole_run_without_faults() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rounds, minutes = map(int, re.findall(r"(\d+) rounds in (\d+) minutes", page)[0])
    assert minutes >= 20
    counts = dict(re.findall(r"^\| (.+) \| (\d+) \|$", page, re.M))
    assert sum(map(int, counts.values())) == rounds
    for kind in (
        "a chain of 10,000 layers",
        "2 processes, one killed",
        "a full disk",
        "Ctrl-C",
        "a file that was cut off",
    ):
        assert int(counts[kind]) > 0
    assert page.rstrip().endswith("Nothing.")


def test_refusals_are_counted_and_other_errors_are_faults(soak: ModuleType) -> None:
    def refuses(dice: random.Random) -> str:
        raise SurefootError("a sentence")

    def fails(dice: random.Random) -> str:
        raise KeyError("weight")

    assert soak.attempt(refuses, 3) == ("refuses: refused by a sentence, SurefootError", True)
    said, right = soak.attempt(fails, 3)
    assert not right
    assert "seed 3: KeyError" in said
    page = soak.page(Counter({"value": 2}), [said], 60.0, 7)
    assert "3 rounds in 1 minutes, seed 7" in page
    assert said in page


@pytest.mark.parametrize("name", ["cut_off", "full_disk", "values", "interrupted_step"])
def test_rounds(soak: ModuleType, name: str) -> None:
    (task,) = {task for task in (*soak.COMMON, *soak.FAULTS) if task.__name__ == name}
    for seed in range(2):
        said, right = soak.attempt(task, seed)
        assert right, said


def test_a_wrong_certificate_is_noticed(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import soak_rounds

    import surefoot as sf

    proved = sf.evaluate

    def lies(*given: object, **options: object) -> object:
        found = proved(*given, **options)
        return type("Value", (), {"value": found.value + 3 * found.error, "error": found.error})()

    monkeypatch.setattr(soak_rounds.sf, "evaluate", lies)
    said, right = soak.attempt(soak_rounds.values, 1)
    assert not right
    assert "is outside of" in said
    torch.manual_seed(0)
