"""Data sets by name and from files, read without running code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from surefoot.data import DataError, load, read_tensors


@pytest.mark.parametrize(
    ("name", "count", "side"),
    [("digits", 1797, 8), pytest.param("mnist-5k", 5000, 28, marks=pytest.mark.slow)],
)
def test_digits(name, count, side):
    data = load(name)
    assert data.x.shape == (count, 1, side, side)
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    assert data.classes == 10
    train, test = data.split(0.75, seed=1)
    assert len(train) + len(test) == count
    assert torch.equal(load(name).split(0.75, seed=1)[1].x, test.x)
    assert not torch.equal(data.split(0.75, seed=2)[1].x, test.x)


def test_tensors_of_one_s_own(tmp_path):
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    torch.save((x, y), tmp_path / "pair.pt")
    torch.save({"x": x, "y": y}, tmp_path / "named.pth")
    np.savez(tmp_path / "named.npz", x=x.numpy(), y=y.numpy())
    save_file({"x": x, "y": y}, tmp_path / "named.safetensors")
    for name in ("pair.pt", "named.pth", "named.npz", "named.safetensors"):
        data = load(str(tmp_path / name))
        assert torch.equal(data.x, x)
        assert torch.equal(data.y, y)
        assert data.classes == 2
    torch.save({"x": x, "y": y[:5]}, tmp_path / "short.pt")
    torch.save({"images": x}, tmp_path / "unnamed.pt")
    torch.save("text", tmp_path / "text.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    for name, says in {
        "short.pt": "one row per sample",
        "unnamed.pt": "'images', but no 'x'",
        "text.pt": "a str without tensors",
        "bad.safetensors": "cannot be read",
        "absent.npz": "no file",
        "table.csv": "no file",
    }.items():
        with pytest.raises(DataError, match=says):
            load(str(tmp_path / name))


class Attack:
    """Unpickling it raises."""

    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_no_file_runs_code(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3, 2), "y": Attack()}, tmp_path / "data.pt")
    with pytest.raises(DataError, match="pickle"):
        load(str(tmp_path / "data.pt"))
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        head = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        archive.writestr("x.npy", head.ljust(127) + b"\n" + pickle.dumps([Attack()]))
    with pytest.raises(DataError):
        load(str(tmp_path / "data.npz"))
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(DataError, match=r"asks for 'torch\.nn\.modules\.linear\.Linear'.*state_dict"):
        read_tensors(tmp_path / "model.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "data.pt").read_bytes()[:500])
    with pytest.raises(DataError, match="damaged"):
        load(str(tmp_path / "cut.pt"))
