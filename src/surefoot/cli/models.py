"""A model by zoo name, by ``package.module:callable``, from a configuration or from a ``.pt2`` file."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surefoot import zoo
from surefoot.cli import exported
from surefoot.cli.guard import UsageError
from surefoot.data import Dataset
from surefoot.loading import optional


@dataclass(frozen=True)
class Spec:
    """The argument ``MODEL``: ``mlp@sizes=64,32,10@activation=tanh`` is the model ``mlp`` with two options."""

    text: str
    target: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, text: str) -> Spec:
        """Read the argument.

        >>> Spec.of("mlp@sizes=64,32,10@activation=tanh").options
        {'sizes': (64, 32, 10), 'activation': 'tanh'}
        """
        target, *parts = text.split("@")
        options = {}
        for part in parts:
            name, sign, value = part.partition("=")
            if not (sign and name.isidentifier()):
                raise UsageError(f"'{text}': an option reads @name=value, as in mlp@sizes=64,32,10; got '@{part}'")
            options[name] = _value(value)
        return cls(text, target, options)

    @property
    def is_file(self) -> bool:
        """Whether it names a file of ``torch.export``."""
        return self.target.endswith(".pt2")

    @property
    def is_hugging_face(self) -> bool:
        """Whether it names a configuration of a Hugging Face model."""
        return self.target.startswith("hf:")

    @property
    def is_zoo(self) -> bool:
        """Whether it names a model of the zoo, which may not exist."""
        return not self.is_file and ":" not in self.target


def _value(text: str) -> Any:
    """The value of a literal; any other text as it is."""
    if text.lower() in ("true", "false", "none"):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


Built = tuple[nn.Module, Any]  # a model and an input that it takes, or ``None``


def build(
    spec: Spec, *, batch: int, shapes: Sequence[tuple[int, ...]], classes: int | None, meta: bool, seed: int
) -> Built:
    """Build the model, and an input for it if there is one.

    Models of the zoo are built for the first shape and the number of classes, if these are given, and with
    ``meta`` without allocating memory. ``batch`` is used where no shape is given; ``seed`` is for initial weights
    and random inputs.
    """
    torch.manual_seed(seed)
    if spec.is_file:
        if spec.options:
            raise UsageError(f"'{spec.text}': a file is loaded as it is and takes no options")
        model, inputs = exported.load_exported(Path(spec.target))
    elif spec.is_hugging_face:
        model, inputs = _from_configuration(spec, shapes[0] if shapes else (batch, _TOKENS), seed)
    elif spec.is_zoo:
        model, inputs = _from_zoo(spec, batch, shapes, classes, meta, seed)
    else:
        model, inputs = _imported(spec)
    if shapes and not spec.is_zoo and not (spec.is_hugging_face and inputs is not None):
        inputs = _random(shapes, seed)
    return model, inputs


_TOKENS = 16  # tokens of a sample by default


def _from_configuration(spec: Spec, tokens: tuple[int, ...], seed: int) -> Built:
    """A model of transformers from a local configuration, with random weights.

    Options behind @ replace entries of the configuration. Nothing is downloaded, and no code in the directory is
    run. A model with a vocabulary gets random tokens of the given shape. ``--weights`` loads weights.
    """
    path = Path(spec.target.removeprefix("hf:"))
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"'{spec.text}': there is no file '{path}': name a config.json or the directory it is in")
    transformers = optional("transformers", "transformers", f"'{spec.text}'", UsageError)
    try:
        entries = {**json.loads(path.read_text(encoding="utf-8")), **spec.options}
        configuration = transformers.AutoConfig.for_model(**entries)
        model = transformers.AutoModel.from_config(configuration, attn_implementation="sdpa")
    except Exception as error:
        raise UsageError(
            f"'{spec.text}' is no configuration of a model that transformers knows: {error}"
        ) from error
    size, generator = getattr(configuration, "vocab_size", None), torch.Generator().manual_seed(seed)
    return model, torch.randint(size, tokens, generator=generator) if isinstance(size, int) else None


_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a name"),
    tuple: ((tuple,), "whole numbers with commas between them"),
}


def _check_kinds(spec: Spec, entry: zoo.Entry) -> None:
    """Refuse options of another kind than their defaults."""
    for name, value in spec.options.items():
        usual = entry.defaults.get(name)
        if value is None or type(usual) not in _KINDS:
            continue
        kinds, words = _KINDS[type(usual)]
        whole = not isinstance(value, tuple) or all(type(each) is int for each in value)
        if type(value) not in kinds or not whole:
            written = ",".join(map(str, usual)) if isinstance(usual, tuple) else usual
            raise UsageError(f"'{spec.text}': write {name} as {words}, such as {spec.target}@{name}={written}")


def _from_zoo(
    spec: Spec, batch: int, shapes: Sequence[tuple[int, ...]], classes: int | None, meta: bool, seed: int
) -> Built:
    entry = zoo.entry(spec.target)
    if len(shapes) > 1:
        raise UsageError(f"models of the zoo take one input: give --input once, not {len(shapes)} times")
    _check_kinds(spec, entry)
    sample = shapes[0][1:] if shapes else None
    options = {**fitted(entry, spec.options, sample, classes), **spec.options}
    with torch.device("meta" if meta else torch.get_default_device()):
        model = zoo.build(spec.target, **options)
        if sample is None:
            return model, zoo.example_input(spec.target, batch, seed=seed, **options)
        example = zoo.Sample(sample, entry.sample(options).vocabulary)
        return model, example.batch(shapes[0][0], seed=seed)


def fitted(
    entry: zoo.Entry, chosen: Mapping[str, Any], sample: tuple[int, ...] | None, classes: int | None
) -> dict[str, Any]:
    """Options that make a model of the zoo fit the samples and the number of classes; chosen options stay."""
    defaults = entry.defaults
    fitting: dict[str, Any] = {}
    if sample is not None:
        if len(sample) == 3:
            fitting |= {"in_channels": sample[0], "image_size": sample[1]}
        features = math.prod(sample)
        fitting |= {"inputs": features}
        if "sizes" in defaults:
            fitting["sizes"] = (features, *defaults["sizes"][1:])
    if classes is not None:
        fitting |= {"num_classes": classes, "outputs": classes}
        if "sizes" in defaults and entry.base != "autoencoder":
            fitting["sizes"] = (*fitting.get("sizes", defaults["sizes"])[:-1], classes)
    return {name: value for name, value in fitting.items() if name in defaults and name not in chosen}


def _imported(spec: Spec) -> Built:
    """The model that ``package.module:callable`` returns, and its input if it returns a pair."""
    module_name, _, attribute = spec.target.partition(":")
    if not (module_name and attribute):
        raise UsageError(f"'{spec.text}': a model of your own reads package.module:callable")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(
            f"'{spec.text}': there is no module '{error.name}' in {here} or among the installed packages"
        ) from error
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise UsageError(f"'{spec.text}': '{module_name}' has no '{name}'")
        value = getattr(value, name)
    if not isinstance(value, nn.Module) and callable(value):
        value = value(**_accepted(spec, value))
    elif spec.options:
        raise UsageError(f"'{spec.text}' is not called and takes no options")
    model, inputs = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"'{spec.text}' gives something of type {type(model).__name__}; it should give a torch.nn.Module"
        )
    return model, inputs


def _accepted(spec: Spec, make: Any) -> Mapping[str, Any]:
    """The options, if the callable can be called with them."""
    try:
        inspect.signature(make).bind(**spec.options)
    except TypeError as error:
        raise UsageError(
            f"'{spec.text}' cannot be called so: {error}; its arguments stand behind it as @name=value"
        ) from error
    except ValueError:  # a callable without a known signature
        pass
    return spec.options


def _random(shapes: Sequence[tuple[int, ...]], seed: int) -> Tensor | tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    tensors = tuple(torch.randn(shape, generator=generator) for shape in shapes)
    return tensors[0] if len(tensors) == 1 else tensors


def sample_shape(spec: Spec, data: Dataset) -> tuple[int, ...]:
    """The shape of the data as the model takes them: flat if a model of the zoo takes vectors."""
    if spec.is_zoo and len(zoo.entry(spec.target).sample(spec.options).shape) == 1:
        return (len(data), int(data.x[0].numel()))
    return tuple(data.x.shape)
