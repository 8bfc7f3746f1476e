"""Convolutions in double precision, a few samples at a time, are those of all samples, and so are derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.operations import convolution


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": "same", "dilation": 2}, {"stride": 2, "padding": 1}, {"groups": 2, "padding": (0, 1)}],
    ids=["plain", "same", "strided", "groups"],
)
@pytest.mark.parametrize("few", [1, 600])
def test_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], few: int) -> None:
    monkeypatch.setattr(convolution, "_MANY", 0)
    monkeypatch.setattr(convolution, "_FEW", few)
    torch.manual_seed(0)
    x = torch.randn(5, 2, 7, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 2 // options.get("groups", 1), 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, weight, bias, **options)
    found = convolution._in_pieces(x, weight, bias, **options)
    torch.testing.assert_close(found, expected)
    for slope, other in zip(
        torch.autograd.grad(found.square().sum(), (x, weight)),
        torch.autograd.grad(expected.square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(slope, other)
    alone = convolution._in_pieces(x[0], weight, bias, **options)  # a sample without a batch
    torch.testing.assert_close(alone, expected[0])
