"""Everything that takes a loader shows how far it is, names a bad batch by its number and leaves the weights."""

from __future__ import annotations

import io

import group_oracles
import pytest
import torch
from torch import nn
from tqdm import tqdm

import surefoot as sf


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches() -> list[group_oracles.Part]:
    torch.manual_seed(1)
    x = torch.randn(10, 3).double()
    return list(zip(x.split(4), (x[:, 0] > 0).long().split(4), strict=True))


NAMES = list(group_oracles.calls(network(), batches()))


@pytest.mark.parametrize("name", NAMES)
def test_a_progress_bar_is_read_like_the_loader(name: str) -> None:
    shown = io.StringIO()
    group_oracles.calls(network(), tqdm(batches(), file=shown, mininterval=0))[name]()
    assert "3/3" in shown.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nan_is_named_by_its_number(name: str) -> None:
    loader, model = batches(), network()
    loader[2][0][0, 0] = torch.nan
    with pytest.raises(sf.errors.SurefootError, match="batch 2 of the loader"):
        group_oracles.calls(model, loader)[name]()
    assert all(map(torch.equal, model.parameters(), network().parameters()))
