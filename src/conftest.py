"""What the examples in docstrings may use without saying so, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.operations import record


@pytest.fixture(autouse=True)
def _example(doctest_namespace: dict[str, Any]) -> Iterator[None]:
    torch.manual_seed(0)
    doctest_namespace.update(torch=torch, nn=nn, sf=sf)
    yield
    for name in [name for name in record.records() if name.startswith("doctest.")]:
        del record._RECORDS[name]
