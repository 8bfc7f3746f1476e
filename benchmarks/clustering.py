"""Convex clustering of 10,000 points in dimension 10, joined to their ten nearest."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.timing import Duration
from surefoot.clustering import ConvexClustering, nearest_neighbours

TARGET = 60.0
COUNT, DIMENSION, NEIGHBOURS = 10_000, 10, 10
PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)


def run() -> list[Duration]:
    """The search for neighbours once, then a solve from scratch for every data set and penalty; wall-clock times.

    ``blobs`` are twenty Gaussians far apart, ``overlap`` five Gaussians that run into each other, where fusing
    takes the solver longest.
    """
    return list(measured())


def measured() -> Iterator[Duration]:
    """The same one after the other."""
    for name, points in data().items():
        start = time.perf_counter()
        edges = nearest_neighbours(points, NEIGHBOURS)
        seconds = time.perf_counter() - start
        subject = f"{NEIGHBOURS} neighbours of {COUNT:,} points, {name}"
        yield Duration(subject, seconds, TARGET, f"{len(edges):,} edges")
        for penalty in PENALTIES:
            objective = ConvexClustering(edges, penalty=penalty)
            start = time.perf_counter()
            result = objective.solve(points)
            seconds = time.perf_counter() - start
            subject = f"convex clustering of {COUNT:,} points, {name}, λ = {penalty:g}"
            yield Duration(subject, seconds, TARGET, result.status)


def data() -> dict[str, torch.Tensor]:
    """Points with and without room between the groups."""
    return {"blobs": gaussians(20, 1.0), "overlap": gaussians(5, 4.0)}


def gaussians(groups: int, width: float) -> torch.Tensor:
    """Equal groups around centres that are uniform in a cube of side 20."""
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.rand(groups, DIMENSION, generator=generator, dtype=torch.float64) - 10
    noise = torch.randn(COUNT, DIMENSION, generator=generator, dtype=torch.float64)
    return centres[torch.arange(COUNT) % groups] + width * noise


if __name__ == "__main__":
    for found in measured():
        print(f"{found.subject}: {found.seconds:.1f} s; {found.note}", flush=True)
