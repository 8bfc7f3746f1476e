"""The zoo's names, read from its source: completion has to answer before torch could be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def zoo_names() -> dict[str, tuple[str, str]]:
    """Every name of the zoo with its builder's docstring and the options of the variant, in alphabetical order.

    A builder is a function decorated with ``register(name, …, variants={…})``; the same names come from
    ``surefoot.zoo.names()``.
    """
    spec = find_spec("surefoot")
    assert spec is not None
    assert spec.origin is not None
    names: dict[str, tuple[str, str]] = {}
    for path in sorted((Path(spec.origin).parent / "zoo").glob("*.py")):
        names.update(_registered(ast.parse(path.read_text("utf-8"))))
    return dict(sorted(names.items()))


def _registered(module: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    values = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register":
                about = ast.get_docstring(function) or ""
                yield from ((name, (about, preset)) for name, preset in _names(call, values))


def _names(call: ast.Call, values: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """The name and those of its variants, with options such as ``[pooling=average]``."""
    name = ast.literal_eval(call.args[0])
    yield name, ""
    for variants in (keyword.value for keyword in call.keywords if keyword.arg == "variants"):
        for variant, options in ast.literal_eval(
            values[variants.id] if isinstance(variants, ast.Name) else variants
        ).items():
            yield f"{name}-{variant}", f"[{', '.join(f'{option}={chosen}' for option, chosen in options.items())}]"


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    """Names that start so, each with the beginning of its description."""
    return [
        (name, f"{about.partition(chr(10))[0]} {preset}".strip())
        for name, (about, preset) in zoo_names().items()
        if name.startswith(incomplete)
    ]
