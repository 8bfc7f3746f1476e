"""Every name of the top level has an example in its docstring, which a reader who has imported torch can run.

The examples themselves are run by ``pytest --doctest-modules``.
"""

from __future__ import annotations

import ast
import builtins
import doctest
from types import ModuleType
from typing import Any

import pytest

import surefoot as sf

READER = {"torch", "nn", "sf", *dir(builtins)}
MODULES = [value for name in sf.__all__ if isinstance(value := getattr(sf, name), ModuleType)]


CALLED = {
    name: value
    for name in sf.__all__
    if callable(value := getattr(sf, name)) and not (isinstance(value, type) and issubclass(value, BaseException))
}


def example_of(value: Any) -> list[doctest.Example]:
    """The statements of an example, in the docstring of a function, of a class or of its methods."""
    texts = [value.__doc__, *(getattr(each, "__doc__", None) for each in vars(value).values())]
    given = [doctest.DocTestParser().get_examples(text) for text in texts if isinstance(text, str)]
    return next(filter(None, given), [])


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
def test_every_public_name_is_there(module: ModuleType) -> None:
    assert all(getattr(module, name) is not None for name in module.__all__)
