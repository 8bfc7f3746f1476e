"""Certificates are copied and pickled as what they say; tables and estimates take what makes no sense calmly."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.certificate.document import CertificateError


def certified() -> sf.Certificate:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(5, 4), torch.arange(5) % 2
    return sf.certify(model, x, objective=sf.CrossEntropy(y), domain=sf.Ball(0.1))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_says_the_same(copied):
    given = certified()
    found = copied(given)
    assert found == given
    assert str(found) == str(given)
    assert found.block_step_sizes == given.block_step_sizes
    assert found.damping == given.damping


def test_what_is_no_estimate_is_refused():
    nothing: Any = None
    with pytest.raises(CertificateError, match=r"surefoot\.estimate returns, got NoneType"):
        certified().with_estimate(nothing)


def test_a_table_of_depth_zero_is_that_of_depth_one():
    given = certified()
    assert given.table(0) == given.table(-1) == given.table(1) != ""
