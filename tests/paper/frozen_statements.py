"""Calls of the paper's statements, whose numbers are frozen to the last digit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from surefoot import paper, zoo
from surefoot.certifying import certify
from surefoot.domains import Ball, ProductBall
from surefoot.magnitude import Magnitude

SQUARE = paper.Smooth.of(smoothness=2, value_at_zero=0, jacobian_at_zero=0)
CURVED = (paper.softplus(4), paper.sigmoid(6), paper.softmax(3, 2))
NETWORK = (
    paper.Computation(paper.fully_connected(5), (paper.softplus(20),), "first"),
    paper.Computation(paper.convolution(3, 2, 5, 16), (paper.sigmoid(30), paper.average_pool()), "second"),
    paper.Computation(
        paper.convolution(3, batch=5, linear_part="appendix"), (SQUARE, paper.batch_norm(3, 5, 0.1))
    ),
    paper.Computation(*paper.residual(paper.fully_connected(5), (paper.batch_norm(3, 5, 0.1, "appendix", 50),))),
    paper.Computation(paper.fully_connected(), (paper.max_pool(3, 2), paper.softmax(7, 5)), "last"),
)
PRODUCT = paper.Bivariate(*map(Magnitude.of, (9, 3, 3, 0.5, 1, 0.25, 0.1, 0.2, 0.3)))
LAST = NETWORK[:2]


def network(*functions: nn.Module) -> nn.Sequential:
    """Fully connected layers with functions between them, all of whose weights are 0.1."""
    sizes = (3, 4, 6, 2)
    layers: list[nn.Module] = []
    for k, (n, m) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(n, m), *functions[k : k + 1]]
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return model


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2, affine=False, track_running_stats=False), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(2, 3, 2, bias=False), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(3, 2), nn.Softmax(1),
    ).double()  # fmt: skip


def certified(model: nn.Module, shape: tuple[int, ...], **options: Any) -> Any:
    """The printed constants of a model on ones."""
    return certify(model, torch.ones(shape, dtype=torch.float64), constants="paper", **options)


def vgg(**options: Any) -> Any:
    keep = {"keep_value_at_zero": options.pop("keep")} if "keep" in options else {}
    with torch.device("meta"):
        model, x = zoo.vgg16(**options), zoo.example_input("vgg16", batch=128)
    from surefoot.paper.reader import certify_as_printed

    return certify_as_printed(model, x, domain=ProductBall(1.0), input_norm=1.0, **keep)


SOFT = {"activation": "softplus", "pooling": "average"}
CALLS: dict[str, Callable[[], Any]] = {
    "fully connected": lambda: paper.fully_connected(4),
    "convolution": lambda: paper.convolution(5, 2, 4, 9),
    "convolution, appendix": lambda: paper.convolution(5, 2, 4, 2, "appendix"),
    "relu": paper.relu,
    "softplus": lambda: paper.softplus(10),
    "sigmoid": lambda: paper.sigmoid(10),
    "softmax": lambda: paper.softmax(10, 3),
    "max-pooling": lambda: paper.max_pool(3, 2),
    "average pooling": paper.average_pool,
    "batch norm": lambda: paper.batch_norm(3, 128, 100.0),
    "batch norm, appendix": lambda: paper.batch_norm(3, 2, 0.01, "appendix", 7),
    "residual layer": lambda: paper.residual(
        paper.convolution(3), (paper.softplus(5), paper.batch_norm(2, 3, 1.0))
    ),
    "implicit function": lambda: paper.implicit_function(2.0, 0.5, 1.5, 0.25),
    "square loss": lambda: paper.square_loss(3.0, 1.5),
    "logistic loss": lambda: paper.logistic_loss(10, 4),
    "convex clustering": lambda: (paper.convex_clustering(2), paper.convex_clustering(5)),
    "supervised": lambda: paper.supervised([paper.logistic_loss(10), paper.square_loss(1.0, 2.0)]),
    "restricted": lambda: (paper.restricted_lipschitz(SQUARE, 3.0), paper.restricted_bound(SQUARE, 3.0)),
    "composition": lambda: paper.composition([*CURVED, SQUARE], 1.5),
    "smooth state": lambda: paper.smooth_state([p for c in NETWORK for p in paper.fix_parameters(c, 0.7)], 1.2),
    "stack, separate": lambda: (paper.stack_separate(CURVED), paper.stack_separate(CURVED, as_printed=False)),
    "stack, shared": lambda: paper.stack_shared(CURVED),
    "sum, separate": lambda: paper.sum_separate(CURVED),
    "sum, shared": lambda: paper.sum_shared(CURVED),
    "concatenate": lambda: paper.concatenate_bilinear([Magnitude.of(1.0), Magnitude.of(3.0)]),
    "lemma smooth": lambda: paper.lemma_smooth([*CURVED, (1.5, 0.25)]),
    "corollary": lambda: paper.corollary_restricted([*CURVED, SQUARE], [1.0, 0.5, 2.0, 1.0], 0.3),
    "lemma smooth_gen": lambda: paper.lemma_smooth_gen([PRODUCT] * 3, 2.0, 0.5),
    "lemma smooth_gen, corrected": lambda: paper.lemma_smooth_gen([PRODUCT] * 3, 2.0, 0.5, as_printed=False),
    "objective": lambda: paper.objective(paper.lemma_smooth(CURVED), paper.logistic_loss(10), 0.1),
    "objective on a ball": lambda: paper.objective(
        paper.lemma_smooth(CURVED),
        paper.square_loss(float("inf"), 1.0),
        0.1,
        0.5,
        paper.diameter_of_balls([3.0, 4.0]),
    ),
    "algorithm 4": lambda: paper.algorithm_4(NETWORK, 0.7, 1.3),
    "algorithm 4, radii": lambda: paper.algorithm_4(LAST, [0.7, 2.0], 1.3),
    "algorithm 4, dropped": lambda: paper.algorithm_4(LAST, 0.7, 1.3, keep_value_at_zero=False),
    "algorithm 4, corrected": lambda: paper.algorithm_4(NETWORK, 0.7, 1.3, corrected=True),
    "around a point": lambda: paper.algorithm_4(paper.around_point(LAST, [1.0, 2.0]), 0.7, 1.3),
    "vgg": lambda: paper.algorithm_4(paper.vgg(), 1.0, 1.0),
    "smooth vgg": lambda: paper.algorithm_4(paper.smooth_vgg(), 1.0, 1.0),
    "application": lambda: tuple(result for _, result in paper.application().readings),
    "application, batch norm": lambda: tuple(
        (entry.epsilon, entry.keep_value_at_zero, entry.normalised, entry.active_bounds)
        for entry in paper.application().batch_norm
    ),
    "application, factor": lambda: (paper.application().factor, paper.application().relative_difference),
    "model, vgg": vgg,
    "model, smooth vgg": lambda: vgg(**SOFT),
    "model, smooth vgg, dropped": lambda: vgg(keep=False, **SOFT),
    "model, batch-normalised": lambda: vgg(batch_norm=0.01, **SOFT),
    "model, perceptron": lambda: certified(network(nn.Softplus(), nn.Sigmoid()), (5, 3), domain=ProductBall(0.7)),
    "model, around": lambda: certified(network(nn.Softplus(), nn.Sigmoid()), (5, 3), domain=Ball(0.3)),
    "model, input": lambda: certified(
        network(nn.Softplus(), nn.Softmax(1)), (5, 3), domain=Ball(0.3), wrt="input"
    ),
    "model, convolutions": lambda: certified(convolutions(), (4, 1, 6, 6), domain=ProductBall(1.0)),
}


def numbers(value: Any) -> list[float | int | str]:
    """All numbers and flags of a result, in order; of certificates and traces what they say."""
    if isinstance(value, Magnitude):
        return [float(value)] if value.is_finite else ["∞"]
    if isinstance(value, float | int | str):
        return [value.partition(":")[0] if isinstance(value, str) else value]
    if isinstance(value, tuple | list):
        return [number for part in value for number in numbers(part)]
    if hasattr(value, "layers") and hasattr(value, "result"):
        rows = [(a.biaffine_bound, a.bound, a.lipschitz, a.smoothness) for a in value.layers]
        inner = [(b.restricted_lipschitz, b.bound, b.bound_is_active) for a in value.layers for b in a.inner]
        return numbers([*rows, *inner, value.result])
    if hasattr(value, "rows") and hasattr(value, "reasons"):
        return numbers((value.bound, value.lipschitz, value.smoothness, tuple(value.flags), len(value.rows)))
    assert is_dataclass(value)
    return [number for field in fields(value) for number in numbers(getattr(value, field.name))]
