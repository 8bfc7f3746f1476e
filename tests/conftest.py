"""What all tests share: one thread, the same random numbers whichever test runs first, and ``judges``.

This file being here puts the folder on the path, so that every test can import the shared packages in it.
"""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
