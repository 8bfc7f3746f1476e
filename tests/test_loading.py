"""Imports while garbage collection waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from surefoot.loading import loaded


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("name", ["json", "surefoot.nothing_of_this_name"])
def test_collection_goes_on_as_before(collecting: bool, name: str) -> None:
    try:
        assert loaded(name).__name__ == name
    except ModuleNotFoundError:
        assert name != "json"
    assert gc.isenabled() is collecting
    assert gc.get_freeze_count() == 0


def test_what_was_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        loaded("json")
        assert gc.get_freeze_count() == before > 0
    finally:
        gc.unfreeze()
