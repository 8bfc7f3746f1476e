"""The pages say what the code prints now, and speak only of what exists."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import surefoot.operations.captured  # noqa: F401  registers the operations
from judges.pages import from_docs
from surefoot import zoo
from surefoot.operations import record

ROOT = Path(__file__).resolve().parent.parent


generate = from_docs("generate")


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Examples register models and seed the generator: neither outlives the test."""
    before = dict(zoo.MODELS)
    with torch.random.fork_rng(devices=[]):
        yield
    zoo.MODELS.clear()
    zoo.MODELS.update(before)


@pytest.mark.parametrize("name", generate.PAGES)
def test_output_is_what_the_code_prints(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert generate.regenerated(text, name) == text, "run `make readme`"


def test_generator_documents_itself() -> None:
    result = doctest.testmod(generate)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_changed_output_is_seen() -> None:
    page = "```python\nprint(6 * 7)\n```\n\n<!-- output: answer -->\n```text\n{}\n```\nafter\n"
    assert generate.regenerated(page.format(42)) == page.format(42)
    assert generate.regenerated(page.format(41)) == page.format(42)


def test_an_output_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1: the block prints something and has no marker"):
        generate.regenerated("```python\nprint(1)\n```\n")
    with pytest.raises(ValueError, match="line 1: the block prints nothing and has a marker"):
        generate.regenerated("```python\nx = 1\n```\n<!-- output: x -->\n")


@pytest.fixture(autouse=True)
def own_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is forgotten after it."""
    monkeypatch.setattr(record, "_RECORDS", dict(record.records()))


@pytest.mark.parametrize("name", [*generate.PAGES, "CHANGELOG.md"])
def test_what_a_page_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {target.strip() for target in re.findall(r"\bmake ([a-z-]+)", text)} <= targets
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    folders = re.findall(r"^\| `([\w/.]+)`", text, re.MULTILINE)
    missing = [path for path in links if not (_source((ROOT / name).parent, path)).exists()]
    missing += [path for path in folders if not (ROOT / path).exists()]
    assert not missing


def _source(folder: Path, link: str) -> Path:
    """What a link leads to, or what that is written from when the documentation is built."""
    page = Path(link)
    if page.parent.name == "gallery":
        return ROOT / "examples" / page.with_suffix(".py").name
    return folder / {"command-line.md": "commands.py", "operations.rst": "operations_page.py"}.get(link, link)
