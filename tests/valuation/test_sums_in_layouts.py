"""Operations that lay numbers out and add up those that meet round, and are counted as such."""

from __future__ import annotations

import torch
from torch import nn

import surefoot as sf
from surefoot.calculus.leaves import captured
from surefoot.valuation.tape import tape_of


class Overlapping(nn.Module):
    """Columns that are added up to an image, every entry of it from several."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(1, 9, 16, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = nn.functional.fold(self.columns, (4, 4), 3, padding=1)
        return x * image.flatten(1)


def test_columns_added_up_to_an_image_round():
    torch.manual_seed(0)
    model, x = Overlapping(), torch.randn(1, 16, dtype=torch.float64)
    graph, _ = captured(model, x, sf.Square(torch.zeros(1, 16, dtype=torch.float64)))
    tape = tape_of(graph)
    (node,) = [node for node in tape.varying if node.op == "aten.col2im"]
    assert node.name in tape.rounding
    exact = sf.evaluate(model, x, sf.Square(torch.zeros(1, 16, dtype=torch.float64)))
    plain = model(x).detach().square().sum() / 2
    assert abs(float(plain) - exact.value) <= exact.error
