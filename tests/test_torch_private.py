"""What PyTorch keeps private is used in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

import surefoot

SOURCE = Path(surefoot.__file__).parent
ALLOWED = "torch_private.py"
ROOTS = {"torch", "nn", "fx"}
# Private attributes of modules and tensors, whatever the variable that holds one is called.
OF_MODULES = {name for name in (*vars(nn.Module()), *dir(nn.Module)) if name.startswith("_")}
OF_TENSORS = {name for name in dir(Tensor) if name.startswith("_")}
ELSEWHERE = {"_schema", "_cdata", "_C", "_overload_packet", "_overloadname", "_sparse_mask_projection"}
PRIVATE = {name for name in OF_MODULES | OF_TENSORS | ELSEWHERE if not name.startswith("__")}


def uses(source: str) -> Iterator[str]:
    """The private names of PyTorch that a program mentions."""
    tree = ast.parse(source)
    own = {name for node in ast.walk(tree) for name in _defined(node)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                dotted = [*module.split("."), *(name.name for name in names)]
                yield from (f"from {module}: {part}" for part in dotted if part.startswith("_"))
            case ast.Import(names=names):
                dotted = [
                    part for name in names if name.name.startswith("torch.") for part in name.name.split(".")
                ]
                yield from (f"import {part}" for part in dotted if part.startswith("_"))
            case ast.Attribute(value=value, attr=attr) if attr.startswith("_") and not attr.startswith("__"):
                root = _root(value)
                if (
                    root in ROOTS
                    or (attr in PRIVATE and attr not in own and root not in ("self", "cls"))
                    or (root in ("self", "cls") and attr in PRIVATE and attr not in own)
                ):
                    yield ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=name), *_]
            ):
                if name in PRIVATE:
                    yield ast.unparse(node)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _defined(node: ast.AST) -> Iterator[str]:
    """Private names that a class of ours defines itself: methods, and attributes set on ``self``."""
    match node:
        case ast.FunctionDef(name=name):
            yield name
        case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
            yield attr


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_torch_are_used_in_one_file(path: Path) -> None:
    if path.name != ALLOWED:
        assert list(uses(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._ops.OpOverload",
        "from torch._subclasses import FakeTensor",
        "from torch.nn.modules.dropout import _DropoutNd",
        "import torch._C",
        "x._version",
        "module._buffers['a']",
        "getattr(target, '_schema', None)",
        "nn.modules.dropout._DropoutNd",
        "x.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_noticed(source: str) -> None:
    assert list(uses(source))
