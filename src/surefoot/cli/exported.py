"""Models exported by ``torch.export``, read without running what may be hidden in the file.

``torch.export.load`` is not a safe reader (PyTorch 2.13): it falls back to plain pickle for example inputs and old
weights, unpickles constants, hands symbolic sizes to ``sympy.sympify`` and guards to ``exec``, looks operators up
as attributes of ``torch``, loads compiled libraries, and prints names into Python source. So a file is taken apart
first. Its tensors as plain bytes and its graph of ``aten`` operations, whose texts have to be plain names, are put
into a new archive, and only that is given to PyTorch; anything else is refused.
"""

from __future__ import annotations

import io
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surefoot.cli.guard import UsageError

_PLAIN_FILES = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id|.*hash)|models/model\.json"
    r"|data/(weights|constants)/(model_(weights|constants)_config\.json|(weight|tensor)_\d+)"
    r"|data/sample_inputs/model\.pt|extra/.*"
)
_TARGET = re.compile(
    r"torch\.ops\.(aten|prims)\.(?!from_file\b)\w+(\.\w+)?|torch\.sym_\w+|math\.(ceil|floor|trunc|sqrt)"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)
_NAME = re.compile(r"[\w.-]*")
_EXPRESSION_WORD = re.compile(
    r"[su]\d+|\d+|Symbol|Integer|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv|floor|ceiling|positive|integer"
    r"|nonnegative|True|False|Eq|Ne|Gt|Ge|Lt|Le|And|Or|Not|oo|int_oo"
)
_MODULE_STACK = re.compile(r"[\w.,;@\[\]()<>' ]*")
_CONTAINERS = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})
# Texts that are data for PyTorch and never source: descriptions, and arguments of operations.
_DATA_KEYS = frozenset({"as_string", "as_strings", "torch_version", "verifiers", "device", "type"})


def load_exported(path: Path) -> tuple[nn.Module, Any]:
    """The module and the example input of a ``.pt2`` file."""
    if not path.is_file():
        raise UsageError(f"there is no file '{path}'")
    try:
        clean = _taken_apart(path)
    except (zipfile.BadZipFile, KeyError, ValueError, UnicodeDecodeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"'{path}' is not a file of torch.export.save: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(clean)
        # with its modules by path, if every operation names its module; else in one piece
        stacks = [node.meta.get("nn_module_stack") for node in program.graph.nodes if node.op == "call_function"]
        module = torch.export.unflatten(program) if all(stacks) else program.module()
    if program.example_inputs is None:
        raise UsageError(f"'{path}' has no example inputs: say the shape of the input with --input")
    args, kwargs = program.example_inputs
    if not args:
        return module, dict(kwargs)
    if kwargs:
        raise UsageError(f"'{path}' takes positional and keyword inputs: export it with one kind")
    return module, args[0] if len(args) == 1 else tuple(args)


def _taken_apart(path: Path) -> io.BytesIO:
    """A new archive of the checked parts, so that the old one cannot be read in any other way."""
    clean = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(clean, "w") as new:
        names = old.namelist()
        inner = [name.partition("/")[2] for name in names]
        if "models/model.json" not in inner:
            raise UsageError(
                f"'{path}' is not a file of torch.export.save, or one of an old format: export the model again"
            )
        for name, short in zip(names, inner, strict=True):
            if not _PLAIN_FILES.fullmatch(short) or inner.count(short) > 1:
                raise _refused(path, f"the part '{short}', which is not plain tensors or a graph of operations")
            content = old.read(name)
            if short == "models/model.json":
                content = json.dumps(_checked_graph(path, json.loads(content))).encode()
            elif short.endswith("_config.json"):
                _check_payload(path, json.loads(content))
            elif short == "data/sample_inputs/model.pt":
                _check_inputs(path, content)
            if not short.startswith("extra/"):
                new.writestr(f"model/{short}", content)
    clean.seek(0)
    return clean


def _check_payload(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse tensors that are not plain bytes."""
    for name, entry in config["config"].items():
        if not _NAME.fullmatch(name) or not re.fullmatch(r"(weight|tensor)_\d+", entry["path_name"]):
            raise _refused(path, f"the entry {name!r}")
        if entry["use_pickle"]:
            raise _refused(path, f"a pickle for '{name}'")


def _check_inputs(path: Path, content: bytes) -> None:
    """Refuse example inputs other than tensors in plain containers, as PyTorch's strict reader does."""
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        more = f" asking for '{asked[1]}'" if asked else ""
        raise _refused(path, f"a pickle{more} in place of example inputs") from error


def _checked_graph(path: Path, graph: dict[str, Any]) -> dict[str, Any]:
    """The graph without guards and comments; refused unless all its texts are plain.

    A guard checks sizes before a call; surefoot captures the model for the given sizes and needs none.
    """
    graph = {**graph, "guards_code": []}
    return {key: _checked(path, value, key) for key, value in graph.items()}


def _checked(path: Path, value: Any, key: str) -> Any:
    if isinstance(value, dict):
        for name in value:
            if not _NAME.fullmatch(name) and not _is_expression(name):
                raise _refused(path, f"the name {name!r}")
        return {
            name: _checked_metadata(path, item) if name == "metadata" else _checked(path, item, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_checked(path, item, key) for item in value]
    if isinstance(value, str) and not _is_plain(value, key):
        kind = "the operation" if key == "target" else "the text"
        raise _refused(path, f"{kind} {value[:80]!r}")
    return value


def _checked_metadata(path: Path, metadata: Any) -> Any:
    """The metadata of an operation, reduced to its module; metadata of tensors are checked like other entries."""
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        return _checked(path, metadata, "")
    stack = metadata.get("nn_module_stack", "")
    return {"nn_module_stack": stack} if stack and _MODULE_STACK.fullmatch(stack) else {}


def _is_plain(text: str, key: str) -> bool:
    if key == "target":
        return _TARGET.fullmatch(text) is not None
    if key == "expr_str":
        return _is_expression(text)
    if key in ("in_spec", "out_spec"):
        return text == "" or _is_tree(json.loads(text))
    return key in _DATA_KEYS or _NAME.fullmatch(text) is not None


def _is_expression(text: str) -> bool:
    """Whether a text is arithmetic of sizes: known words and signs, no attribute and no other call."""
    words = re.findall(r"\w+", text)
    return re.fullmatch(r"[\w\s+\-*/(),='<>]*", text) is not None and all(map(_EXPRESSION_WORD.fullmatch, words))


def _is_tree(spec: Any) -> bool:
    """Whether a structure of arguments is made of tuples, lists and dictionaries with plain keys."""
    if isinstance(spec, list):
        return all(isinstance(item, int) or _is_tree(item) for item in spec)
    context = json.loads(spec["context"]) if spec["context"] else None
    keys = context if isinstance(context, list) else []
    plain = context in (None, []) or all(isinstance(key, str) and _NAME.fullmatch(key) for key in keys)
    return spec["type"] in _CONTAINERS and plain and all(map(_is_tree, spec["children_spec"]))


def _refused(path: Path, what: str) -> UsageError:
    return UsageError(
        f"'{path}' was not loaded: it holds {what}, and loading that could run code. Export the model again "
        "with torch.export.save from operations of PyTorch alone"
    )
