"""Generators of random numbers: what state they are in, and putting them back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


def state_of(generator: Generator) -> Any:
    """The state of a generator, to compare with :func:`same_state` or to give to :func:`set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.get_state()
    )


def set_state(generator: Generator, state: Any) -> None:
    """Put a generator into a state it was in.

    >>> generator = random.Random(0)
    >>> state = state_of(generator)
    >>> first = generator.random()
    >>> set_state(generator, state)
    >>> generator.random() == first
    True
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def global_generators() -> dict[str, Generator]:
    """The generators behind the functions of the modules, by the name of the module."""
    python: Any = random.random
    numpy: Any = np.random.rand
    return {"random": python.__self__, "numpy.random": numpy.__self__, "torch": torch.default_generator}
