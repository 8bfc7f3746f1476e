"""Models that do something strange, and what a refusal has to look like."""

from __future__ import annotations

import dataclasses
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surefoot.errors import CaptureError
from surefoot.operations.captured import capture

X = torch.ones(2, 3)
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Both:
    """Two tensors, and no name that says which is meant."""

    left: Tensor
    right: Tensor


def old_fashioned(transform: Callable[..., Any], *args: Any) -> Any:
    """A transformation of a layer that torch advises against."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return transform(nn.Linear(3, 3), *args)


class Inner(nn.Module):
    """A linear layer, and whatever a test wants forward to do with it."""

    def __init__(self, action: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.action = action
        self.register_buffer("average", torch.zeros(3))
        for key, value in attributes.items():
            setattr(self, key, value)

    def forward(self, *args: Any) -> Any:
        return self.action(self, *args)


def inside(action: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A model that does it in its submodule ``1``."""
    return nn.Sequential(nn.Linear(3, 3), Inner(action, **attributes))


def at_top(action: Callable[..., Any]) -> nn.Module:
    return Inner(action)


def assert_refused(make: Callable[[], Any], x: Any, says: str, where: str | None) -> None:
    """The refusal says what, where and what to do, in one sentence each and in the user's terms."""
    with pytest.raises(CaptureError, match=f"(?si){says}") as caught:
        capture(make(), x)
    error, message = caught.value, str(caught.value)
    assert error.where == where
    assert where is None or message.startswith(f"In module '{where}': " if where else "In the model itself: ")
    assert message.endswith(".")
    assert message == f"{message[: -len(error.remedy)]}{error.remedy}"
    assert len(message) < 520
    for internal in ("\n", "export", "Fake", "fake", "Traceback", "dynamo", "unbacked", "Sym", "lifted", "issue"):
        assert internal not in message
    assert error.__suppress_context__ or error.__context__ is None
