"""Two functions measured side by side, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import torch


@dataclass(frozen=True)
class Measurement:
    """How much longer one function takes than another.

    Attributes:
        subject: what was measured.
        baseline: what it is compared with.
        ratio: the median of the ratios of neighbouring runs.
        low: their lower quartile.
        high: their upper quartile.
        seconds: the median processor time of the baseline.
        target: the ratio that is aimed at.
    """

    subject: str
    baseline: str
    ratio: float
    low: float
    high: float
    seconds: float
    target: float


@dataclass(frozen=True)
class Duration:
    """How long something takes, in seconds, with what is aimed at and a remark."""

    subject: str
    seconds: float
    target: float
    note: str = ""


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread, as long as it lasts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def compare(
    subject: str,
    function: Callable[[], object],
    baseline: str,
    other: Callable[[], object],
    *,
    target: float,
    pairs: int,
    calls: int = 1,
    warm_up: int = 2,
) -> Measurement:
    """Run both in turn, ``pairs`` times, and take the median of the ratios.

    The order changes from pair to pair, so that what the first run leaves in caches or in the clock rate of the
    processor favours neither. One thread, and the clock is the processor time of this process, so that waiting for
    other processes does not count; the garbage collector is off while it runs.

    Args:
        subject: a name for the function.
        function: what is measured.
        baseline: a name for the other one.
        other: what it is compared with.
        target: the ratio that is aimed at.
        pairs: how many ratios are taken.
        calls: how many calls make one run; more for short functions.
        warm_up: how many runs of both go before and are not counted.
    """
    with one_thread():
        for _ in range(warm_up):
            _seconds(function, calls), _seconds(other, calls)
        times = []
        for k in range(pairs):
            if k % 2:
                mine = _seconds(function, calls)
                theirs = _seconds(other, calls)
            else:
                theirs = _seconds(other, calls)
                mine = _seconds(function, calls)
            times.append((mine, theirs))
    ratios = [mine / theirs for mine, theirs in times]
    low, _, high = quantiles(ratios, n=4)
    typical = median(theirs for _, theirs in times) / calls
    return Measurement(subject, baseline, median(ratios), low, high, typical, target)


def _seconds(function: Callable[[], object], calls: int) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(calls):
            function()
        return time.process_time() - start
    finally:
        gc.enable()
