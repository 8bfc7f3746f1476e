"""The page of benchmarks is of one code, or says which rows are not; what was measured is not measured twice."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import keeping

    return keeping


def test_a_run_that_was_cut_off_goes_on_where_it_was(keeping: ModuleType, tmp_path: Path) -> None:
    measured: list[int] = []

    def row(number: int) -> int:
        if number == 2 and measured.count(2) == 0:
            measured.append(2)
            raise KeyboardInterrupt
        measured.append(number)
        return number

    rows = [lambda k=k: row(k) for k in range(4)]
    path = tmp_path / "bench" / "module.pickle"
    with pytest.raises(KeyboardInterrupt):
        keeping.Kept("code").go_on(rows, path, str)
    again = keeping.Kept.read(path)
    assert (again.code, again.rows, again.whole) == ("code", [0, 1], False)
    again.go_on(rows, path, str)
    assert measured == [0, 1, 2, 2, 3]
    assert keeping.Kept.read(path).rows == [0, 1, 2, 3]
    assert keeping.Kept.read(path).whole


def test_rows_of_another_code_are_named(keeping: ModuleType, tmp_path: Path) -> None:
    new, old = keeping.Kept("b", [1], whole=True), keeping.Kept("a", [1], whole=True)
    assert keeping.origin({"x": new}, "b") == "All rows are of one code."
    assert "older code: y" in keeping.origin({"x": new, "y": old}, "b")
    assert "not to the end: z" in keeping.origin({"x": new, "z": keeping.Kept("b", [1])}, "b")
    assert not keeping.Kept.read(tmp_path / "nothing").rows


def test_the_name_of_the_code_follows_its_files(keeping: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("a = 1")
    before = keeping.code_digest(tmp_path)
    assert keeping.code_digest(tmp_path) == before
    (tmp_path / "src" / "a.py").write_text("a = 2")
    assert keeping.code_digest(tmp_path) != before
