"""From options to what the library is asked: a model, a batch, an objective and a domain."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import clustering, objectives
from surefoot.cli import output
from surefoot.cli.batches import real_dtype, refusal, sample_shape, scaled, suited, with_batch
from surefoot.cli.frame import UsageError
from surefoot.cli.models import Spec, build
from surefoot.cli.options import shape
from surefoot.cli.weights import load_weights
from surefoot.data import Dataset, load
from surefoot.errors import CaptureError

_SHAPE_ONLY, _RANDOM = 128, 16  # samples, as in the paper's application; and where numbers are computed with


@dataclass(frozen=True)
class Request:
    """The options of ``certify`` and ``compare``, and with their defaults those of other commands."""

    batch: int | None = None
    inputs: Sequence[str] | None = None
    data: str | None = None
    weights: Path | None = None
    smooth: bool = False
    evaluation: bool = False
    seed: int = 0
    domain: str | None = None
    radius: float | None = None
    center: str | None = None
    wrt: str = "params"
    objective: str | None = None
    input_norm: float | None = None
    estimate: bool = False
    numbers: bool = False

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is at least 1, got {self.batch}")
        if self.batch is not None and self.inputs:
            raise UsageError("--batch and --input both say how many samples there are: give one of them")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed is a whole number of 64 bits, got {self.seed}")
        if self.input_norm is not None and not 0 <= self.input_norm < math.inf:
            raise UsageError(f"--input-norm is a finite number ≥ 0, got {self.input_norm}")
        if self.input_norm is not None and self.wrt == "input":
            raise UsageError(
                "--input-norm bounds an input that is fixed; with --wrt input give --radius and --center"
            )

    @property
    def needs_numbers(self) -> bool:
        """Whether shapes alone are not enough."""
        given = self.weights or self.data or self.numbers or self.estimate
        return bool(given) or self.around_weights or self.wrt == "input"

    @functools.cached_property
    def around_weights(self) -> bool:
        """Whether the centre is the present point; by default if weights or data of the user's are given."""
        if self.center is not None:
            return self.center == "weights"
        return self.domain == "ball" or self.wrt == "input" or bool(self.weights or self.data)

    @functools.cached_property
    def set(self) -> sf.Ball | sf.ProductBall:
        """The domain."""
        radius = self.radius if self.radius is not None else (0.1 if self.around_weights else 1.0)
        center: Any = "present" if self.around_weights else "origin"
        kind = self.domain or ("ball" if self.around_weights else "product")
        return sf.Ball(radius, center=center) if kind == "ball" else sf.ProductBall(radius, center=center)

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs that were given."""
        return tuple(map(shape, self.inputs or ()))

    @functools.cached_property
    def dataset(self) -> Dataset | None:
        """The data, or a random part of them.

        Raises:
            UsageError: if a shape is given as well, or an objective has nothing to compare with.
        """
        if self.data is None:
            if self.objective is not None and objective_class(self.objective).takes_targets:
                raise UsageError(
                    f"--objective {self.objective} compares outputs with targets: say which, with --data digits, "
                    "--data mnist-5k, or a file with tensors x and y"
                )
            return None
        if self.shapes:
            raise UsageError("--data and --input both say what the input is: give one of them")
        found = load(self.data)
        if self.batch is None or self.batch >= len(found):
            return found
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(self.seed))
        return found.take(order[: self.batch])


@dataclass(frozen=True)
class Case:
    """A model with its batch, ready to be certified.

    Attributes:
        name: as it was given.
        model: the model.
        x: the batch.
        objective: bound to its targets, or ``None``.
        targets: what the data have to say about the outputs.
        input_norm: a bound on the norm of the batch where its numbers mean nothing, or ``None``.
    """

    name: str
    model: nn.Module
    x: Any
    objective: nn.Module | None = None
    targets: Tensor | None = None
    input_norm: float | None = None

    @property
    def shapes(self) -> str:
        """The shape of each input."""
        tensors = list(self.x.values()) if isinstance(self.x, dict) else self.x
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return ", ".join("×".join(map(str, tensor.shape)) for tensor in tensors)

    @property
    def described(self) -> str:
        """The model and its input, in a line."""
        norm = "" if self.input_norm is None else f" with ‖x‖ ≤ {self.input_norm:g}"
        return f"{self.name}, input {self.shapes}{norm}"


def case(name: str, request: Request) -> Case:
    """Build what the request is about.

    Raises:
        SurefootError: if something does not exist or does not fit.
    """
    if request.objective is not None:
        objective_class(request.objective)  # a wrong name is said before anything is loaded
    spec, data = Spec.of(name), request.dataset
    values = request.needs_numbers
    meta = spec.is_zoo and not values
    batch = request.batch or (_SHAPE_ONLY if meta else _RANDOM)
    shapes = request.shapes if data is None else (sample_shape(spec, data),)
    built = build(
        spec,
        batch=batch,
        shapes=shapes if data is None or spec.is_zoo else (),
        classes=None if data is None else data.classes,
        meta=meta,
        seed=request.seed,
    )
    model = built.model.eval() if request.evaluation else built.model
    if request.weights is not None:
        load_weights(model, request.weights)
    x = built.inputs
    if data is not None:
        data = suited(model, data.to(real_dtype(model)))
        x = data.x
    elif x is None:
        raise UsageError(f"say what '{name}' takes: --input 8,3,32,32 for its shape, samples first, or --data")
    elif request.shapes:
        x = _converted(x, real_dtype(model))
    elif request.batch and not spec.is_zoo:
        x = with_batch(x, request.batch)
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
    """In the body, a model that cannot be read because it does not take its input at all is a matter of usage.

    Raises:
        UsageError: if the model itself raises on the input.
    """
    try:
        yield
    except CaptureError as error:
        if refusal(subject.model, subject.x) is None:
            raise
        raise UsageError(str(error)) from error


def _converted(x: Any, dtype: torch.dtype) -> Any:
    """Random real inputs in the type of the model's numbers."""
    if isinstance(x, tuple):
        return tuple(_converted(value, dtype) for value in x)
    return x.to(dtype) if x.is_floating_point() else x


def objective_class(name: str) -> type[objectives.Objective]:
    """The objective of this name: ``cross-entropy`` is ``CrossEntropy``.

    Raises:
        UsageError: if there is none, or it needs more than its name.
    """
    known = {}
    for attribute, found in [
        (name, getattr(home, name)) for home in (objectives, clustering) for name in home.__all__
    ]:
        if (
            isinstance(found, type)
            and issubclass(found, objectives.Objective)
            and found is not objectives.Objective
        ):
            known[re.sub(r"(?<=[a-z])(?=[A-Z])", "-", attribute).lower()] = found
    if name not in known:
        raise UsageError(f"there is no objective '{name}': use {', '.join(sorted(known))}")
    needed = [p.name for p in inspect.signature(known[name]).parameters.values() if p.default is p.empty]
    if needed:
        raise UsageError(
            f"--objective {name} needs {', '.join(needed)}, which no option gives: it is for use in Python, as "
            f"surefoot.objectives.{known[name].__name__}({needed[0]}=…)"
        )
    return known[name]


def one_hot(targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Class numbers as vectors with a one.

    Raises:
        UsageError: if a class number is negative.
    """
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
    """What was chosen because nothing was said about it."""
    if not values or request.numbers:
        return
    if made_up:
        output.note(f"the batch is random (seed {request.seed}): --data gives your own")
    if spec.is_zoo and request.weights is None and (request.around_weights or request.wrt == "input"):
        output.note(f"the weights are random, as initialised (seed {request.seed}): --weights loads yours")
