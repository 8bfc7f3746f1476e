"""A model by name or from a file, with its weights, its batch and its objective."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot import objectives, zoo
from surefoot.cli import output
from surefoot.cli.commands import Question, Source
from surefoot.cli.frame import UsageError
from surefoot.data import Dataset, load, read_tensors

_SHAPE_ONLY, _RANDOM = 128, 16  # samples if only shapes matter, as in the paper's application; else


@dataclass(frozen=True)
class Subject:
    """A model with its batch."""

    name: str
    model: nn.Module
    x: Tensor
    data: Dataset | None = None  # the same samples with their targets, as the model takes them
    input_norm: float | None = None  # a bound on the norm of a batch whose numbers are made up

    @property
    def shape(self) -> str:
        """The shape of the input."""
        return "×".join(map(str, self.x.shape))


def subject_of(name: str, source: Source, question: Question | None = None) -> Subject:
    """Build the model and its batch, or refuse what does not exist or does not fit."""
    values, batch = (True, None) if question is None else (question.needs_numbers, question.batch)
    data = None if source.data is None else _part(load(source.data), batch, source.seed)
    shape = _shape(question.input) if question and question.input else None
    if data is not None and shape:
        raise UsageError("--data and --input both say what the input is: give one of them")
    torch.manual_seed(source.seed)
    target, options = _named(name)
    if ":" in target:
        model, x = _imported(name, target, options), None
        if shape:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(source.seed), dtype=_dtype(model))
    else:
        samples = tuple(data.x.shape) if data is not None else shape
        classes = None if data is None else data.classes
        place = "cpu" if values else "meta"
        model, x = _from_zoo(target, options, samples, classes, batch, place, source.seed)
    model = model.eval() if source.evaluation else model
    if source.weights is not None:
        load_weights(model, source.weights)
    if data is not None:
        data = _suited(model, data.to(_dtype(model)))
        x = data.x
    if x is None:
        raise UsageError(f"say what '{name}' takes: --input 8,3,32,32 for its shape, samples first, or --data")
    model = sf.smooth(model, x) if source.smooth else model
    subject = Subject(name, model, x, data)
    return subject if question is None else _with_norm(subject, question, values)


def _with_norm(subject: Subject, question: Question, values: bool) -> Subject:
    """With a bound on the norm of a batch that is made up, and a note about what is random."""
    made_up, x, norm = subject.data is None, subject.x, question.input_norm
    if norm is None and made_up and not values:
        norm = 1.0
    if question.wrt == "input" or not x.is_floating_point():
        norm = None
    if made_up and values and norm is not None:  # random numbers of this norm, or slightly less
        x = x * (norm * (1 - 1e-6) / (float(torch.linalg.vector_norm(x.double())) or 1.0))
    if not values:
        output.say(
            "note", "there are no weights: shapes are certified, and constants hold for all weights in the set"
        )
    elif made_up:
        output.say("note", f"the batch is random (seed {question.seed}): --data gives your own")
    if values and question.weights is None and question.is_centred:
        output.say("note", f"the weights are as initialised (seed {question.seed}): --weights loads yours")
    return replace(subject, x=x, input_norm=norm)


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """``mlp@sizes=64,32,10@activation=tanh`` is the model ``mlp`` with two options."""
    target, *parts = text.removeprefix("zoo:").split("@")
    options = {}
    for part in parts:
        name, sign, value = part.partition("=")
        if not (sign and name.isidentifier()):
            raise UsageError(f"'{text}': an option reads @name=value, as in mlp@sizes=64,32,10; got '@{part}'")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            options[name] = value
    return target, options


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*([,x×][1-9]\d*)*", text):
        raise UsageError(f"--input: a shape reads 8,3,32,32 (samples first); got '{text}'")
    return tuple(map(int, re.split("[,x×]", text)))


def _from_zoo(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...] | None,
    classes: int | None,
    batch: int | None,
    place: str,
    seed: int,
) -> tuple[nn.Module, Tensor]:
    """The model, made for the samples and the classes of the data, and a batch for it."""
    size: dict[str, Any] = {}
    if shape is not None:
        options = {**zoo.fitting(name, shape[1:], classes), **options}
        if len(shape) == 4 and "image_size" not in options:
            size = {"image_size": shape[2]}
    samples = shape[0] if shape else batch or (_RANDOM if place == "cpu" else _SHAPE_ONLY)
    try:
        with torch.device(place):
            return zoo.build(name, **options), zoo.example_input(name, samples, seed=seed, **options, **size)
    except (AttributeError, TypeError) as error:
        raise UsageError(f"'{name}' cannot be built with {options}: {error}") from error


def _imported(text: str, target: str, options: dict[str, Any]) -> nn.Module:
    """The model that ``file.py:function`` or ``package.module:function`` returns."""
    place, _, attribute = target.partition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise UsageError(f"'{text}': there is no file '{place}'")
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise
        raise UsageError(f"'{text}': there is no module '{error.name}' in {Path.cwd()}, nor installed") from error
    value = getattr(module, attribute, None)
    if value is None:
        raise UsageError(f"'{text}': '{place}' has no '{attribute}'")
    if not isinstance(value, nn.Module) and callable(value):
        value = value(**options)
    if not isinstance(value, nn.Module):
        raise UsageError(f"'{text}' gives something of type {type(value).__name__}, not a torch.nn.Module")
    return value


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all parameters and buffers."""
    state, expected = read_tensors(path), model.state_dict()
    if state and all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}  # of DataParallel
    for name in state.keys() & expected.keys():
        if not torch.can_cast(state[name].dtype, expected[name].dtype):
            raise UsageError(f"the weights of '{path}': '{name}' is {state[name].dtype}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(f"the weights of '{path}' do not fit the model: {error}") from error


def _part(data: Dataset, batch: int | None, seed: int) -> Dataset:
    """The data, or a random part of them."""
    if batch is None or batch >= len(data):
        return data
    return data.take(torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:batch])


def _suited(model: nn.Module, data: Dataset) -> Dataset:
    """The data as images or flat, whichever the model takes."""
    errors = []
    for form in [data, data.flat()] if data.x.dim() != 2 else [data]:
        error = refusal(model, form.x[:2]) and refusal(model, form.x)  # some take one number of samples only
        if error is None:
            return form
        errors.append(error)
    kind = f"{'×'.join(map(str, data.x.shape[1:])) or 'single numbers'} ({data.x.dtype})"
    raise UsageError(f"the model does not take the samples of {data.name}, {kind}: {errors[0]}")


def refusal(model: nn.Module, x: Tensor) -> Exception | None:
    """The exception that a model raises on an input; ``None`` if it takes it."""
    try:
        with evaluated(model):
            model(x)
    except Exception as error:
        return error
    return None


@contextmanager
def evaluated(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, without gradients; afterwards its modes are as before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        for module, mode in modes:
            module.training = mode


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def objective_of(name: str, data: Dataset | None) -> tuple[objectives.Objective, Tensor | None]:
    """The objective of this name, as ``cross-entropy`` is ``CrossEntropy``, and its targets in the data."""
    by_name: dict[str, Callable[[], objectives.Objective]] = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", each).lower(): getattr(objectives, each)
        for each in ("CrossEntropy", "Huber", "Poisson", "Reconstruction", "Square")
    }
    if name not in by_name:
        raise UsageError(f"there is no objective '{name}': use {', '.join(sorted(by_name))}, or Python")
    objective = by_name[name]()
    if data is None:
        raise UsageError(
            f"--objective {name} compares outputs with targets: say which, with --data digits or a file"
        )
    y = data.x if name == "reconstruction" else data.y
    if y is None:
        raise UsageError(f"--data {data.name} has no targets y, which --objective {name} needs")
    if isinstance(objective, objectives.Square) and not y.is_floating_point():
        if bool((y < 0).any()):
            raise UsageError(f"class numbers are not negative, and the targets y hold {int(y.min())}")
        y = nn.functional.one_hot(y.long(), data.classes or 1).to(data.x.dtype)
        output.say("note", "the square loss compares with one-hot classes")
    return objective, y
