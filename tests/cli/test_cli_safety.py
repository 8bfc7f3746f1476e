"""No file that is loaded runs code: real attacks, each of which would create a file."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.cli.exported import load_exported
from surefoot.cli.guard import UsageError
from surefoot.data import DataError, load, read_tensors


class Attack:
    """Unpickling it creates the file ``owned`` in the present folder."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def as_torch(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_the_attack_works_on_a_careless_reader(here):
    pickle.loads(pickle.dumps(Attack()))
    assert Path("owned").exists()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("write", [as_torch, pickle.dumps])
def test_weights_that_would_run_code_are_refused(surefoot, here, suffix, write):
    path = Path(f"weights{suffix}")
    path.write_bytes(write({"0.weight": Attack()}))
    found = surefoot("certify", "mlp", "--weights", path)
    assert found.exit_code == 2
    assert "pickle" in found.stderr
    assert "safetensors" in found.stderr
    assert not Path("owned").exists()


def test_a_whole_pickled_model_is_refused_with_its_reason(here):
    torch.save(nn.Linear(2, 2), "model.pt")
    with pytest.raises(DataError, match=r"asks for 'torch\.nn\.modules\.linear\.Linear'.*state_dict"):
        read_tensors("model.pt")


def test_data_and_checkpoints_that_would_run_code_are_refused(surefoot, here):
    Path("data.pt").write_bytes(as_torch({"x": torch.ones(3, 2), "y": Attack()}))
    with pytest.raises(DataError, match="pickle"):
        load("data.pt")
    with zipfile.ZipFile("data.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
                         .ljust(127) + b"\n" + pickle.dumps([Attack()]))  # fmt: skip
    with pytest.raises(DataError):
        load("data.npz")
    Path("run.pt").write_bytes(as_torch({"run": Attack()}))
    found = surefoot("train", "mlp", "--steps", 1, "--checkpoint", "run.pt")
    assert found.exit_code == 2
    assert "not a checkpoint" in found.stderr
    assert not Path("owned").exists()


Files = dict[str, bytes]


def _example_inputs(files: Files) -> None:
    files["data/sample_inputs/model.pt"] = as_torch(((Attack(),), {}))


def _old_weights(files: Files) -> None:
    files["data/weights/model.pt"] = as_torch(Attack())


def _pickled_weight(files: Files) -> None:
    _config(files, "weights")["0.bias"]["use_pickle"] = True
    files["data/weights/weight_1"] = as_torch(Attack())


def _opaque_constant(files: Files) -> None:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    files["data/constants/model_constants_config.json"] = json.dumps({"config": {"k": entry}}).encode()
    files["data/constants/opaque_obj_0"] = pickle.dumps(Attack())


def _config(files: Files, kind: str) -> dict:
    return _Json(files, f"data/{kind}/model_{kind}_config.json")["config"]


class _Json(dict):
    """A JSON file that is written back whenever one of its entries is read to be changed."""

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(json.loads(files[name]))
        _OPEN.append((files, name, self))


_OPEN: list[tuple[Files, str, dict]] = []


def _graph(files: Files) -> dict:
    return _Json(files, "models/model.json")


def _size(files: Files) -> None:
    values = _graph(files)["graph_module"]["graph"]["tensor_values"]
    expression = "__import__('os').system('touch owned')"
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": {"as_int": 5}}}


def _symbol(files: Files) -> None:
    values = _graph(files)["graph_module"]["graph"]["tensor_values"]
    expression = "Symbol.__class__.__base__.__subclasses__()"
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": {"as_int": 5}}}


def _operator(files: Files) -> None:
    nodes = _graph(files)["graph_module"]["graph"]["nodes"]
    nodes[0] = {**nodes[0], "target": "torch.os.system"}


def _file_operator(files: Files) -> None:
    nodes = _graph(files)["graph_module"]["graph"]["nodes"]
    nodes[0] = {**nodes[0], "target": "torch.ops.aten.from_file.default"}


def _argument_name(files: Files) -> None:
    call = _graph(files)["graph_module"]["module_call_graph"][0]["signature"]
    call["forward_arg_names"] = ["x=__import__('os').system('touch owned')"]


def _structure(files: Files) -> None:
    call = _graph(files)["graph_module"]["module_call_graph"][0]["signature"]
    leaf = {
        "type": "collections.defaultdict",
        "context": '{"default_factory_module": "mine"}',
        "children_spec": [],
    }
    call["in_spec"] = json.dumps([1, leaf])


def _parameter_name(files: Files) -> None:
    files["models/model.json"] = files["models/model.json"].replace(
        b'"0.weight"', b'"0\\")+__import__(\\"os\\").system(\\"touch owned\\")"'
    )


def _library(files: Files) -> None:
    files["data/aotinductor/model/wrapper.so"] = b"\x7fELF"


ATTACKS: list[Callable[[Files], None]] = [
    _example_inputs, _old_weights, _pickled_weight, _opaque_constant, _size, _symbol, _operator, _file_operator,
    _argument_name, _structure, _parameter_name, _library,
]  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported network."""
    path = tmp_path_factory.mktemp("exported") / "plain.pt2"
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    torch.export.save(torch.export.export(model, (torch.randn(5, 4),)), path)
    return path


def _changed(plain: Path, change: Callable[[Files], None], out: Path) -> None:
    with zipfile.ZipFile(plain) as archive:
        files = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    _OPEN.clear()
    change(files)
    for held, name, content in _OPEN:
        held[name] = json.dumps(content).encode()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"plain/{name}", content)


@pytest.mark.parametrize("attack", ATTACKS)
def test_exported_files_with_an_attack_are_refused(here, plain, attack):
    _changed(plain, attack, here / "net.pt2")
    with pytest.raises(UsageError, match="was not loaded: it holds"):
        load_exported(here / "net.pt2")
    assert not Path("owned").exists()


def test_guards_are_not_run(here, plain):
    def guard(files: Files) -> None:
        _graph(files)["guards_code"] = ["__import__('os').system('touch owned') or True"]

    _changed(plain, guard, here / "net.pt2")
    model, x = load_exported(here / "net.pt2")
    assert model(x).shape == (5, 2)
    assert not Path("owned").exists()


def test_an_archive_that_reads_in_two_ways_is_refused(here, plain):
    _changed(plain, lambda files: None, here / "net.pt2")
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(here / "net.pt2", "a") as archive:
        archive.writestr("plain/data/sample_inputs/model.pt", as_torch(((Attack(),), {})))
    with pytest.raises(UsageError, match="was not loaded"):
        load_exported(here / "net.pt2")
    assert not Path("owned").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"{}", pickle.dumps(Attack())])
def test_what_is_no_archive_is_refused(here, content):
    (here / "net.pt2").write_bytes(content)
    with pytest.raises(UsageError, match=r"not a file of torch\.export\.save"):
        load_exported(here / "net.pt2")
    assert not Path("owned").exists()
