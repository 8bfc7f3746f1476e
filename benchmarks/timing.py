"""Times and memory: two functions measured side by side, so that what disturbs the machine disturbs both."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import accumulate
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


class Ratio(NamedTuple):
    """The median of the ratios of neighbouring runs with quartiles, and the median seconds of the baseline."""

    ratio: float
    low: float
    high: float
    seconds: float

    def cells(self, target: float) -> list[str]:
        """Cells of a table: the ratio, its quartiles, what is aimed at."""
        return [f"**{self.ratio:.2f}**", f"{self.low:.2f} to {self.high:.2f}", f"≤ {target}"]


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """Processor time of a function, without collecting garbage."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        for _ in range(calls):
            function()
        return (time.process_time() - start) / calls
    finally:
        gc.enable()


def compare(
    function: Callable[[], object], other: Callable[[], object], pairs: int, calls: int = 1, warm_up: int = 2
) -> Ratio:
    """Run both in turn; the order changes from pair to pair, so that caches and clock rates favour neither.

    Args:
        function: what is measured.
        other: what it is compared with.
        pairs: how many ratios are taken.
        calls: how many calls make one run; more for short functions.
        warm_up: how many runs of both go before and are not counted.
    """
    times = []
    for k in range(-warm_up, pairs):
        first, second = (function, other) if k % 2 else (other, function)
        pair = seconds(first, calls), seconds(second, calls)
        if k >= 0:
            times.append(pair if k % 2 else pair[::-1])
    ratios = [mine / theirs for mine, theirs in times]
    low, _, high = quantiles(ratios, n=4)
    return Ratio(median(ratios), low, high, median(theirs for _, theirs in times))


def gradient_seconds(model: nn.Module, loss: Callable[[], Tensor], times: int = 20) -> float:
    """The shortest of several times of a gradient."""
    parameters = list(model.parameters())
    return min(seconds(lambda: torch.autograd.grad(loss(), parameters)) for _ in range(times))


def peak(function: Callable[[], object]) -> int:
    """Bytes of tensors at the peak of a call, above what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        function()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
