"""From options to a model, a batch, an objective and a domain; or to data to train on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import objectives
from surefoot.cli import output
from surefoot.cli.guard import UsageError
from surefoot.cli.models import Spec, build, sample_shape
from surefoot.cli.options import Request, Source, Start
from surefoot.cli.suiting import (
    device_named,
    load_weights,
    mapped,
    real_dtype,
    refusal,
    scaled,
    suited,
    with_batch,
)
from surefoot.data import Dataset, load
from surefoot.errors import CaptureError

_SHAPE_ONLY, _RANDOM = 128, 16  # samples if only shapes matter, as in the paper's application; else


@dataclass(frozen=True)
class Case:
    """A model with its batch, ready to be certified."""

    name: str  # the text that named it
    model: nn.Module  # the model
    x: Any  # the batch
    objective: nn.Module | None = None  # the objective, bound to its targets, if there is one
    targets: Tensor | None = None  # the targets of the data, if there are any
    input_norm: float | None = None  # a bound on the norm of the batch, where its numbers are made up

    @property
    def shapes(self) -> str:
        """The shape of each input."""
        tensors = list(self.x.values()) if isinstance(self.x, dict) else self.x
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return ", ".join("×".join(map(str, tensor.shape)) for tensor in tensors)

    @property
    def described(self) -> str:
        """The model and its input in one line."""
        norm = "" if self.input_norm is None else f" with ‖x‖ ≤ {self.input_norm:g}"
        return f"{self.name}, input {self.shapes}{norm}"


def domain_of(request: Request) -> sf.Ball | sf.ProductBall:
    """The domain that a request asks for."""
    radius = request.radius if request.radius is not None else (0.1 if request.is_centred else 1.0)
    center: Any = "present" if request.is_centred else "origin"
    kind = request.domain or ("ball" if request.is_centred else "product")
    return sf.Ball(radius, center=center) if kind == "ball" else sf.ProductBall(radius, center=center)


def dataset_of(request: Request) -> Dataset | None:
    """The data, or a random part of them."""
    targets = request.objective and objective_class(request.objective).takes_targets  # refuses a wrong name first
    if request.data is None:
        if targets:
            raise UsageError(
                f"--objective {request.objective} compares outputs with targets: say which, with --data digits, "
                "--data mnist-5k, or a file with tensors x and y"
            )
        return None
    if request.shapes:
        raise UsageError("--data and --input both say what the input is: give one of them")
    whole = load(request.data)
    if request.batch is None or request.batch >= len(whole):
        return whole
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(request.seed))
    return whole.take(order[: request.batch])


def case(name: str, request: Request, data: Dataset | None = None) -> Case:
    """Build the model and the batch of a request, or refuse it; ``data`` are those of the request if loaded."""
    spec, data = Spec.of(name), dataset_of(request) if data is None else data
    values = request.needs_numbers
    meta = spec.is_zoo and not values
    batch = request.batch or (_SHAPE_ONLY if meta else _RANDOM)
    shapes = request.shapes if data is None else (sample_shape(spec, data),)
    model, x = build(
        spec,
        batch=batch,
        shapes=shapes if data is None or spec.is_zoo else (),
        classes=None if data is None else data.classes,
        meta=meta,
        seed=request.seed,
    )
    model = model.eval() if request.evaluation else model
    if request.weights is not None:
        load_weights(model, request.weights)
    device = None if request.device is None else device_named(request.device)
    if device is not None and not meta:
        model, x = model.to(device), mapped(x, lambda tensor: tensor.to(device))
        if data is not None:
            data = replace(data, x=data.x.to(device), y=mapped(data.y, lambda tensor: tensor.to(device)))
    if data is not None:
        data = suited(model, data.to(real_dtype(model)))
        x = data.x
    elif x is None:
        raise UsageError(f"say what '{name}' takes: --input 8,3,32,32 for its shape, samples first, or --data")
    elif request.shapes:
        dtype = real_dtype(model)
        x = mapped(x, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    elif request.batch and not spec.is_zoo:
        x = mapped(x, partial(with_batch, batch=request.batch))
    if request.smooth:
        model = sf.smooth(model, x)
    made_up = data is None and (spec.is_zoo or bool(request.shapes))
    norm = _input_norm(request, x, made_up and not values)
    if values and made_up and norm is not None:
        x = scaled(x, norm)
    _say(spec, request, made_up, values)
    targets = None if data is None else data.y
    return Case(name, model, x, _objective(request, targets, data), targets, norm)


@contextmanager
def refusals_are_usage(subject: Case) -> Iterator[None]:
    """Raise a usage error if a model cannot be read in the body because it does not take its input at all."""
    try:
        yield
    except CaptureError as error:
        if refusal(subject.model, subject.x) is None:
            raise
        raise UsageError(str(error)) from error


def objective_class(name: str) -> type[objectives.Objective]:
    """The objective of this name: ``cross-entropy`` is ``CrossEntropy``."""
    exported = [getattr(objectives, attribute) for attribute in objectives.__all__]
    losses = [each for each in exported if isinstance(each, type) and issubclass(each, objectives.Objective)]
    by_name = {re.sub(r"(?<=[a-z])(?=[A-Z])", "-", each.__name__).lower(): each for each in losses}
    for general in ("objective", "loss", "own-loss"):
        del by_name[general]
    if name not in by_name:
        raise UsageError(f"there is no objective '{name}': use {', '.join(sorted(by_name))}")
    parameters = inspect.signature(by_name[name]).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed:
        raise UsageError(
            f"--objective {name} needs {', '.join(needed)}, which no option gives: it is for use in Python, as "
            f"{'.'.join(by_name[name].__module__.split('.')[:2])}.{by_name[name].__name__}({needed[0]}=…)"
        )
    return by_name[name]


def one_hot(targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Class numbers as one-hot vectors."""
    if bool((targets < 0).any()):
        raise UsageError(f"class numbers are not negative, and the targets y hold {int(targets.min())}")
    return nn.functional.one_hot(targets.long(), classes).to(dtype)


def _objective(request: Request, targets: Tensor | None, data: Dataset | None) -> nn.Module | None:
    if request.objective is None:
        return None
    kind = objective_class(request.objective)
    if not kind.takes_targets:
        return kind()
    if kind is objectives.Reconstruction and data is not None:
        return kind(data.x)
    if targets is None or data is None:
        raise UsageError(f"--data {request.data} has no targets y, which --objective {request.objective} needs")
    if kind is objectives.Square and not targets.is_floating_point():
        output.note("the square loss compares with one-hot classes")
        targets = one_hot(targets, data.classes or 1, data.x.dtype)
    return kind(targets)


def _input_norm(request: Request, x: Any, shape_only: bool) -> float | None:
    if request.wrt == "input" or (isinstance(x, Tensor) and not x.is_floating_point()):
        return None
    if request.input_norm is not None:
        return request.input_norm
    return 1.0 if shape_only else None


def _say(spec: Spec, request: Request, made_up: bool, values: bool) -> None:
    """Note which numbers are random because none were given."""
    if not values or request.numbers:
        return
    if made_up:
        output.note(f"the batch is random (seed {request.seed}): --data gives your own")
    if spec.is_zoo and request.weights is None and (request.is_centred or request.wrt == "input"):
        output.note(f"the weights are random, as initialised (seed {request.seed}): --weights loads yours")


@dataclass(frozen=True)
class Subject:
    """A model, the data it is trained and tested on, and the objective."""

    model: nn.Module
    train: Dataset
    test: Dataset
    objective: objectives.Objective


def trainable(start: Start, test: float) -> Subject:
    """Build the model and load its data, or refuse what does not exist or does not fit."""
    kind, data, objective = objective_class(start.objective), start.data or "digits", start.objective
    source = {field.name: getattr(start, field.name) for field in fields(Source)}
    request = Request(**{**source, "data": data}, numbers=True)
    dataset = dataset_of(request)
    assert dataset is not None
    if dataset.y is None and kind.takes_targets and kind is not objectives.Reconstruction:
        raise UsageError(f"--data {data} has no targets y, which --objective {objective} needs")
    subject = case(start.model, request, dataset)
    if not any(value.requires_grad for value in subject.model.parameters()):
        raise UsageError(f"'{start.model}' has no parameter that asks for gradients: there is nothing to train")
    dtype = torch.float32 if start.single else torch.float64
    y = (subject.x if kind is objectives.Reconstruction else subject.targets) if kind.takes_targets else None
    if kind is objectives.Square and y is not None and not y.is_floating_point():
        y = one_hot(y, dataset.classes or 1, dtype)
    whole = replace(dataset, x=subject.x, y=y).to(dtype)
    train, held_out = whole.split(1 - test, start.seed)
    if not len(train):
        raise UsageError(f"--data {data} leaves no sample to train on: it has {len(dataset)}")
    return Subject(subject.model.to(dtype), train, held_out, kind())
