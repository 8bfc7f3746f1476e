"""The pages of the documentation speak of what exists, and leave nothing out."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from judges.pages import from_docs
from surefoot.operations.record import rules

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _resolve(name: str) -> object:
    """A module, or what a module holds, by its dotted name."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


# Words that only this library would use, and what the field says: check, accept, roll back, schedule, shared.
OWN_WORDS = re.compile(r"\b(bursts?|lends?|told|pace|shell-ways|joint mini-batch\w*)\b", re.IGNORECASE)


@pytest.mark.parametrize(
    "page", sorted({*ROOT.glob("*.md"), *DOCS.glob("*.md")} - {ROOT / "CHANGELOG.md"}), ids=lambda path: path.stem
)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert OWN_WORDS.findall(prose) == []


@pytest.mark.parametrize("page", ["theory.md", "choosing.md", "api.md", "faq.md"])
def test_every_name_on_a_page_exists(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    names = set(re.findall(r"\bsurefoot(?:\.\w+)+", text))
    names |= {f"surefoot{name}" for name in re.findall(r"`sf((?:\.\w+)+)", text)}
    assert len(names) > 5
    for name in sorted(names):
        _resolve(name)


def test_every_statement_that_is_cited_is_on_the_theory_page() -> None:
    page = (DOCS / "theory.md").read_text(encoding="utf-8")
    cited: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        cited |= set(
            re.findall(r"\b(?:Prop\.|Lemma|Corollary)\s+([a-z]+_[a-z_]+)", path.read_text(encoding="utf-8"))
        )
    assert len(cited) > 3
    assert not {label for label in cited if f"`{label}`" not in page}


def test_every_operation_is_on_the_page_of_operations() -> None:
    page = from_docs("operations_page").page()
    missing = [name for name in rules() if f"``{name}``" not in page]
    assert not missing


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = from_docs("commands").page()
    for command in ("certify", "compare", "train", "converge", "rules", "doctor"):
        assert f"## surefoot {command}" in page
        assert f"$ surefoot {command}" in page


def test_every_rule_states_its_claim() -> None:
    known = {name: rule for name, rule in rules().items() if name.startswith(("aten.", "surefoot.", "getitem"))}
    assert not [name for name, rule in known.items() if not (rule.__doc__ or "").strip()]


def test_the_gallery_shows_every_example() -> None:
    tree = ast.parse((DOCS / "conf.py").read_text(encoding="utf-8"))
    (order,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["ORDER"]
    )
    assert sorted(order) == sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_says_problem_method_statement_and_result(path: Path) -> None:
    if path.stem == "demo":
        return
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert [word for word in ("Problem", "Method", "Statement", "Result") if f"**{word}.**" in text] == [
        "Problem", "Method", "Statement", "Result",
    ]  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_an_example_ends_in_a_picture(path: Path) -> None:
    """The gallery shows what an example calls ``figure``."""
    if path.stem == "demo":
        return
    body = ast.parse(path.read_text(encoding="utf-8")).body
    last = body[-1].body if isinstance(body[-1], ast.If) else body
    assigned = [target for node in last if isinstance(node, ast.Assign) for target in node.targets]
    names = [each.id for target in assigned for each in ast.walk(target) if isinstance(each, ast.Name)]
    assert "figure" in names
