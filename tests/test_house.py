"""The structure of the package: which way imports point, what is where, and that each folder's map is true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.operations import records

ROOT = Path(__file__).parents[1] / "src" / "surefoot"
FILES = sorted(ROOT.rglob("*.py"))

# Each row imports from rows above it, and from its own without going round in a circle.
ROWS = (
    "errors magnitude domains enclosure linear_solve loading norms numbers processes program report scalar taylor "
    "torch_private",
    "batches bounds graph",
    "operations",
    "calculus chain complexity",
    "attained blockwise certificate guarantees lower valuation value",
    "implicit objectives optim oracles theorems",
    "certifying clustering data paper smoothing zoo",
    "integrations",
    "cli",
)
ROW = {name: k for k, names in enumerate(ROWS) for name in names.split()}
LEAVES = ("certifying", "clustering", "data", "integrations", "paper", "smoothing", "zoo", "cli")
MOST_LINES, MOST_FILES_READ = 60_700, 60  # of src, and for a certificate: raised only for a new ability
READ_LEAVES = ("integrations", "cli", "certifying", "__init__", "__main__")


def part_of(file: Path) -> str:
    """The first name below the package: a folder or a file."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def own_imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a file imports, and whether it does so at the top."""
    tree = ast.parse(file.read_text())
    top = {id(node) for node in tree.body}
    typing = {
        id(inner)
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.module == "surefoot":
            names = [f"surefoot.{alias.name}" for alias in node.names if not alias.name.startswith("__")]
        else:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] == "surefoot":
                yield name, id(node) in top


def edges() -> dict[str, set[str]]:
    """Which parts import which others."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        if file.parent != ROOT or not file.name.startswith("__"):
            found[part_of(file)] |= {name.split(".")[1] for name, _ in own_imports(file) if "." in name}
    return {part: others - {part} for part, others in found.items()}


def test_every_part_has_its_row() -> None:
    assert {part_of(file) for file in FILES} - {"__init__", "__main__"} == set(ROW)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{part} imports {other}" for part, others in edges().items() for other in others if ROW[other] > ROW[part]
    ]
    assert not wrong


def test_no_part_imports_itself_through_others() -> None:
    known = edges()

    def reached(part: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(known.get(part, ()))
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting += known.get(other, ())
        return seen

    assert [part for part in known if part in reached(part)] == []


def test_leaves_are_imported_by_what_people_see_only() -> None:
    wrong = [
        f"{part} imports {other}"
        for part, others in edges().items()
        for other in others
        if other in LEAVES and part not in READ_LEAVES
    ]
    assert not wrong


def test_own_modules_are_imported_at_the_top() -> None:
    inner = [
        f"{file.relative_to(ROOT)}: {name}" for file in FILES for name, at_top in own_imports(file) if not at_top
    ]
    assert not inner


def test_no_cycle_within_a_part() -> None:
    """Modules can be read in an order in which each comes after all that it imports."""
    modules = {}
    for file in FILES:
        path = file.relative_to(ROOT).with_suffix("")
        name = ".".join(("surefoot", *path.parts)).removesuffix(".__init__")
        modules[name] = file
    graph = {}
    for name, file in modules.items():
        graph[name] = {
            other for other, at_top in own_imports(file) if at_top and other in modules and other != name
        }
        if file.name != "__init__.py":
            graph[name] -= {name.rpartition(".")[0]}
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, " → ".join((*path, name))
        state[name] = 1
        for other in graph[name]:
            visit(other, (*path, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(
    "folder", sorted({f.parent for f in FILES} - {ROOT}), ids=lambda f: f.relative_to(ROOT).as_posix()
)
def test_the_map_of_a_folder_is_true(folder: Path) -> None:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    heads = re.findall(r"^\* ((?:``\w+``(?:, | and )?)+)", text, re.M)
    there = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    there |= {inner.parent.name for inner in folder.glob("*/__init__.py")}
    assert there <= set(re.findall(r"``(\w+)``", text)), "a file is missing on the map"
    assert {name for head in heads for name in re.findall(r"``(\w+)``", head)} <= there, "no such file"


def test_file_names_are_unique_within_a_part() -> None:
    names: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in FILES:
        if file.name != "__init__.py":
            names[part_of(file), file.stem].append(file)
    assert [paths for paths in names.values() if len(paths) > 1] == []


def test_a_file_is_not_named_like_what_it_holds() -> None:
    """A folder's name for a function would hide the file of the same name, or the other way round."""
    wrong = []
    for file in FILES:
        public = (file.parent / "__init__.py").read_text() if file.name != "__init__.py" else ""
        if (
            re.search(rf"import (\(\s*)?([\w, ]*\b)?{file.stem}\b", public)
            and f"{file.parent.name}.{file.stem} import" in public
        ):
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong


# Where operations are named outside of their records, and why.
NAMED = {
    "batches.py": "stands below the records",
    "graph": "captures what torch calls, before there are records",
    "torch_private.py": "stands below the records",
    "program": "lists the primitives, which are none of the records",
    "bounds": "names functions of one number and primitives, not records",
    "scalar": "names functions of one number, not operations",
    "paper": "has the constants that the paper prints for some layers",
    "smoothing.py": "has replacements that people ask for by name",
    "zoo/parts.py": "has activations that people ask for by name",
    "value": "names primitives, and functions of one number",
    "valuation/kernels.py": "refuses a kernel of torch that is wrong",
}


def operations_named(file: Path, known: frozenset[str]) -> Iterator[str]:
    """Operations by their whole names, and collections of their short ones."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and re.match(r"aten\.\S*$", str(node.value)):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
        names = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        if len(names) > 2 and len(known.intersection(names)) > 0.7 * len(names):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {', '.join(names)}"


def test_what_is_known_of_operations_stands_in_their_records() -> None:
    known = frozenset(name.rpartition(".")[2] for name in records())
    named = {file.relative_to(ROOT).as_posix(): [*operations_named(file, known)] for file in FILES}
    named = {path: found for path, found in named.items() if found and not path.startswith("operations/")}
    exempt = {path: next((key for key in NAMED if f"{path}/".startswith(f"{key}/")), None) for path in named}
    assert [place for path, found in named.items() if exempt[path] is None for place in found] == []
    assert set(NAMED) == set(exempt.values()), "an exemption is not needed any more"


READING = """
import json, sys
import torch
from torch import nn
import surefoot as sf

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 6)
certify, objective = sf.certify, sf.CrossEntropy(torch.tensor([0, 1, 2, 0]))
files = []


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename not in files:
        files.append(frame.f_code.co_filename)


sys.setprofile(note)
certify(model, x, objective=objective)
sys.setprofile(None)
print(json.dumps(files))
"""


@pytest.fixture(scope="module")
def called() -> list[str]:
    """Files with a function that ``certify`` calls for a perceptron and a loss, in order, without caches."""
    run = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True, check=True)
    return [
        Path(name).relative_to(ROOT).as_posix() for name in json.loads(run.stdout) if name.startswith(str(ROOT))
    ]


def test_a_certificate_is_read_in_few_files(called: list[str]) -> None:
    assert len(called) <= MOST_FILES_READ, called


def test_the_guide_to_reading_is_true(called: list[str]) -> None:
    """The files that the guide names are called, in its order, and each folder of passes is among them."""
    text = (
        (ROOT.parents[1] / "CONTRIBUTING.md").read_text().partition("## Read `certify`")[2].partition("\n## ")[0]
    )
    guide = re.findall(r"^\d+\. `([\w/.]+)`: ", text, flags=re.MULTILINE)
    assert 20 <= len(guide) <= 25
    assert guide == [name for name in called if name in guide]
    assert {name.partition("/")[0] for name in guide} >= {"program", "bounds", "certificate", "norms"}


def test_the_house_does_not_grow() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= MOST_LINES


def test_files_of_tests_have_names_of_their_own() -> None:
    """Pytest cannot collect two of one name where folders are no packages."""
    files = list((ROOT.parents[1] / "tests").rglob("test_*.py"))
    names = [file.name for file in files if not (file.parent / "__init__.py").exists()]
    assert sorted(set(names)) == sorted(names)
