"""Every public name has an example in its docstring, which a reader who has imported torch and surefoot can run.

The examples themselves are run by ``pytest --doctest-modules``.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import surefoot as sf
from test_documentation import DOCS, _resolve

READER = {"torch", "nn", "sf", *dir(builtins)}
MODULES = [value for name in sf.__all__ if isinstance(value := getattr(sf, name), ModuleType)]


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes by name: at the top level, in the public modules, and on the page of reference."""
    for scope in (sf, *MODULES):
        yield from ((f"{scope.__name__}.{name}", getattr(scope, name)) for name in scope.__all__)
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for name in re.findall(r"^.. auto(?:class|function):: (\S+)", page, re.MULTILINE):
        yield name, _resolve(name)


CALLED = {
    name: value
    for name, value in public()
    if callable(value)
    and name != "surefoot.integrations.lightning.keep_if_lower"  # Lightning is optional
    and not (isinstance(value, type) and issubclass(value, BaseException))
}


def example_of(value: Any) -> list[doctest.Example]:
    """The statements of an example, in the docstring of a function, of a class or of its methods."""
    texts = [value.__doc__, *(getattr(each, "__doc__", None) for each in vars(value).values())]
    given = [doctest.DocTestParser().get_examples(text) for text in texts if isinstance(text, str)]
    return next(filter(None, given), [])


def test_there_are_many_public_names() -> None:
    assert len(CALLED) > 150
    assert {module.__name__ for module in MODULES} >= {"surefoot.zoo", "surefoot.paper", "surefoot.theorems"}


@pytest.mark.parametrize("name", CALLED)
def test_it_has_an_example_that_a_reader_can_run(name: str) -> None:
    examples = example_of(CALLED[name])
    assert any(example.want for example in examples), "no example that shows a result"
    assert not any(doctest.SKIP in example.options for example in examples), "the example is not run"
    names = [n for example in examples for n in ast.walk(ast.parse(example.source))]
    bound = {n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.name for n in names if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    bound |= {n.arg for n in names if isinstance(n, ast.arg)}
    bound |= {
        (a.asname or a.name).partition(".")[0]
        for n in names
        if isinstance(n, ast.Import | ast.ImportFrom)
        for a in n.names
    }
    used = {n.id for n in names if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert used <= bound | READER, "names that only the module itself has"


@pytest.mark.parametrize("module", [sf, *MODULES], ids=lambda module: module.__name__)
def test_completion_shows_public_names_only(module: ModuleType) -> None:
    assert set(dir(module)) <= {*module.__all__, "__version__"}
    assert all(getattr(module, name) is not None for name in module.__all__)
