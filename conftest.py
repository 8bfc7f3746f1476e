"""What all tests share: one thread, the same random numbers for each, and the names that examples use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.operations import record

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _names_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    """An example may use torch, nn and sf; the operations it adds, ``doctest.…``, are gone after it."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
    names.update(torch=torch, nn=nn, sf=sf)
    yield
    for name in [name for name in record.records() if name.startswith("doctest.")]:
        del record._RECORDS[name]
