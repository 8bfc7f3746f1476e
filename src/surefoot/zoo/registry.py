r"""Models by name: register a builder, build it, and make an input it takes.

A *builder* is a function whose arguments all have defaults and which returns an ``nn.Module``. A *variant* is the
same builder with some options already chosen: ``"vgg16-smooth"`` is ``vgg16`` with soft-plus and average pooling.
Options of the caller take precedence over those of a variant.

A function describes one input from options of the builder, which are its arguments: ``@register("net",
example=image)`` suits any builder with options ``in_channels`` and ``image_size``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from surefoot.errors import SurefootError


@dataclass(frozen=True)
class Sample:
    """One input, without the batch."""

    shape: tuple[int, ...]  # the shape of one sample
    vocabulary: int | None = None  # ``None`` for real numbers; for integer ids the number of different ids

    def batch(
        self,
        count: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """A batch of ``count`` samples: standard normal numbers, or uniform ids; on ``"meta"``, only shapes.

        The same seed gives the same numbers, and the global random state is left alone.

        >>> sf.zoo.Sample((3,), vocabulary=5).batch(2).dtype
        torch.int64
        """
        shape = (count, *self.shape)
        place = torch.get_default_device() if device is None else torch.device(device)
        real = torch.get_default_dtype() if dtype is None else dtype
        if place.type == "meta":
            return torch.empty(shape, dtype=torch.int64 if self.vocabulary else real, device=place)
        # Drawn on the CPU, so that the numbers do not depend on the device they are used on.
        generator = torch.Generator("cpu").manual_seed(seed)
        if self.vocabulary is None:
            return torch.randn(shape, generator=generator, dtype=real, device="cpu").to(place)
        return torch.randint(self.vocabulary, shape, generator=generator, device="cpu").to(place)


def vector(features: int) -> Sample:
    """A vector of real numbers.

    >>> sf.zoo.vector(4).batch(2).shape
    torch.Size([2, 4])
    """
    return Sample((features,))


def image(in_channels: int, image_size: int) -> Sample:
    """A square image.

    >>> sf.zoo.image(in_channels=3, image_size=8).batch(2).shape
    torch.Size([2, 3, 8, 8])
    """
    return Sample((in_channels, image_size, image_size))


def image_of_any_size(in_channels: int, small_input: bool, image_size: int | None = None) -> Sample:
    """A square image for a network that takes any size: 224×224, or 32×32 if it is made for small images.

    >>> sf.zoo.image_of_any_size(in_channels=3, small_input=True).shape
    (3, 32, 32)
    """
    return image(in_channels, image_size or (32 if small_input else 224))


def tokens(length: int, vocabulary: int) -> Sample:
    """A sequence of integer ids below ``vocabulary``.

    >>> sf.zoo.tokens(length=5, vocabulary=256).batch(2).shape
    torch.Size([2, 5])
    """
    return Sample((length,), vocabulary)


Builder = TypeVar("Builder", bound=Callable[..., nn.Module])

_RESERVED = frozenset({"batch", "device", "dtype", "seed"})
_REQUIRED = inspect.Parameter.empty


class ZooError(SurefootError, ValueError):
    """A model of the zoo was asked for in a way it cannot be built, or fed an input it cannot take."""


class UnknownModel(ZooError, LookupError):
    """No model of the zoo has this name."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The sentence for a name that is not in a list, with the closest match and the whole list.

    >>> unknown("activation", "softpuls", ["relu", "softplus"])
    "there is no activation 'softpuls': did you mean 'softplus'? Known: relu, softplus."
    >>> unknown("activation", "??", ["relu", "softplus"])
    "there is no activation '??'. Known: relu, softplus."
    """
    listed = list(known)
    close = difflib.get_close_matches(str(name).lower(), listed, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return f"there is no {kind} {name!r}{hint} Known: {', '.join(listed) or 'none'}."


@dataclass(frozen=True)
class Entry:
    """One name of the zoo.

    Attributes:
        name, builder: the name, and the function that builds the model.
        example: a function that describes one input, from the options that are its arguments.
        base: the name of the model that this is a variant of; for a model itself its name.
        preset: the options that make this variant; empty for the model itself.
        small: options that make the model small enough for a test.

    >>> sf.zoo.entry("vgg16-smooth").preset
    {'activation': 'softplus', 'pooling': 'average'}
    """

    name: str
    builder: Callable[..., nn.Module]
    example: Callable[..., Sample]
    base: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """Every option of the builder with its value when nothing is passed."""
        return _arguments(self.builder) | dict(self.preset)

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring, and the options of the variant."""
        line = (inspect.getdoc(self.builder) or "").partition("\n")[0]
        chosen = ", ".join(f"{option}={value!r}" for option, value in self.preset.items())
        return f"{line} [{chosen}]" if chosen else line

    def sample(self, options: Mapping[str, Any]) -> Sample:
        """One input of the model that is built with these options."""
        wanted = _arguments(self.example)
        values = self.defaults | dict(options)
        return self.example(**{option: value for option, value in values.items() if option in wanted})


_ENTRIES: dict[str, Entry] = {}


def register(
    name: str,
    *,
    example: Callable[..., Sample],
    small: Mapping[str, Any] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Builder], Builder]:
    """Decorate a builder: make it available by name, alone and in its variants.

    Args:
        name: the name of the model.
        example: describes one input; its arguments are options of the builder. Arguments that are not, and have a
            default, become options of :func:`example_input`.
        small: options under which the model is small and fast; the tests use them.
        variants: ``{"smooth": {...}}`` registers ``f"{name}-smooth"`` with these options.

    Raises:
        ZooError: an argument of the builder has no default or an unusable name, an option named here is not
            one of the builder's, or another builder holds the name already.

    >>> from surefoot.zoo.registry import vector
    >>> @sf.zoo.register("doctest-line", example=vector)
    ... def line(features: int = 3) -> nn.Module:
    ...     return nn.Linear(features, 1)
    >>> sf.zoo.build("doctest-line", features=5)
    Linear(in_features=5, out_features=1, bias=True)
    >>> sf.zoo.example_input("doctest-line", batch=4).shape
    torch.Size([4, 3])
    >>> sf.zoo.unregister("doctest-line")
    """

    def decorate(builder: Builder) -> Builder:
        _check_builder(name, builder)
        presets = {name: {}, **{f"{name}-{suffix}": chosen for suffix, chosen in (variants or {}).items()}}
        entries = {}
        for full, preset in presets.items():
            # A small variant keeps the options that make it a variant.
            shrunk = {option: value for option, value in (small or {}).items() if option not in preset}
            entries[full] = Entry(full, builder, example, name, dict(preset), shrunk)
            _check_entry(entries[full])
        _ENTRIES.update(entries)
        return builder

    return decorate


def unregister(name: str) -> None:
    """Forget a model and its variants.

    >>> _ = sf.zoo.register("doctest-line", example=sf.zoo.vector)(lambda features=3: nn.Linear(features, 1))
    >>> sf.zoo.unregister("doctest-line")
    >>> "doctest-line" in sf.zoo.names()
    False
    """
    base = entry(name).base
    for other in [other.name for other in _ENTRIES.values() if other.base == base]:
        del _ENTRIES[other]


def names() -> tuple[str, ...]:
    """All names of the zoo, variants included, in alphabetical order.

    >>> "vgg16-smooth" in sf.zoo.names()
    True
    """
    return tuple(sorted(_ENTRIES))


def entry(name: str) -> Entry:
    """The entry of a name.

    Raises:
        UnknownModel: the name is not in the zoo; the message gives the closest one and the list.

    >>> sf.zoo.entry("vgg16-smooth").base
    'vgg16'
    """
    if name not in _ENTRIES:
        raise UnknownModel(unknown("model", name, names()))
    return _ENTRIES[name]


def build(name: str, /, **options: Any) -> nn.Module:
    """Build a model by name; under ``with torch.device("meta")`` without allocating its parameters.

    Args:
        name: one of :func:`names`.
        options: the options of its builder.

    Raises:
        UnknownModel: there is no such name.
        ZooError: there is no such option.

    >>> sf.zoo.build("mlp", sizes=(4, 3, 2))[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    model = entry(name)
    _check_options(name, options, model.defaults)
    return model.builder(**{**model.preset, **options})


def small_options(name: str) -> dict[str, Any]:
    """Options under which ``build(name, **options)`` and its example input are small and fast.

    >>> sf.zoo.small_options("mlp")
    {'sizes': (5, 7, 6, 3)}
    """
    return dict(entry(name).small)


def example_input(
    name: str,
    /,
    batch: int = 2,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: Any,
) -> torch.Tensor:
    """A batch that ``build(name, **options)`` takes, as :meth:`Sample.batch` makes it.

    Args:
        name: one of :func:`names`.
        batch: the number of samples.
        device: the device; by default torch's default device. On ``"meta"`` there are shapes but no numbers.
        dtype: the type of real inputs; by default torch's default dtype. Ids are always ``torch.int64``.
        seed: seed of the random numbers.
        options: the options of the model. Models that take inputs of any size have one more here: ``image_size``
            for ``resnet18``, ``length`` for ``gpt``.

    >>> sf.zoo.example_input("vgg16", batch=1, image_size=32).shape
    torch.Size([1, 3, 32, 32])
    >>> sf.zoo.example_input("resnet18", image_size=64, device="meta").shape
    torch.Size([2, 3, 64, 64])
    """
    model = entry(name)
    _check_options(name, options, [*model.defaults, *(_arguments(model.example).keys() - model.defaults)])
    return model.sample(options).batch(batch, device=device, dtype=dtype, seed=seed)


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function, with their defaults."""
    return {argument.name: argument.default for argument in inspect.signature(function).parameters.values()}


def _check_builder(name: str, builder: Callable[..., nn.Module]) -> None:
    """Refuse options without a default, and those with the name of an argument of :func:`example_input`."""
    for argument, default in _arguments(builder).items():
        if default is _REQUIRED:
            raise ZooError(
                f"builder of {name!r}: argument {argument!r} has no default, so the name alone would not "
                "build a model; give it one"
            )
        if argument in _RESERVED:
            raise ZooError(f"builder of {name!r}: {argument!r} is an argument of example_input; rename it")


def _check_entry(new: Entry) -> None:
    """Refuse an entry that names options which do not exist, or has the name of another.

    The same function defined again (a module reloaded, a notebook's cell run twice) replaces itself.
    """
    required = [option for option, default in _arguments(new.example).items() if default is _REQUIRED]
    _check_options(new.name, (*new.preset, *new.small, *required), _arguments(new.builder))
    old = _ENTRIES.get(new.name)
    if old is not None and _origin(old.builder) != _origin(new.builder):
        raise ZooError(f"the name {new.name!r} is taken by {_origin(old.builder)}; choose another")


def _check_options(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    listed = list(known)
    for option in options:
        if option not in listed:
            raise ZooError(f"{name}: {unknown('option', option, listed)}")


def _origin(builder: Callable[..., nn.Module]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"
