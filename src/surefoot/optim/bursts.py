"""What training in bursts of mini-batches needs: records, states to go back to, batches, data that stay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from surefoot.batches import are_all, refuse_random_samples, regrouped, samples_of, tensors_of
from surefoot.torch_private import moved_together

_LARGER = 8  # how many batches of training make one of passes over all data, unless samples are large
_BYTES, _TOKEN = 2**22, 512  # of the inputs of such a batch, at the most; of a whole number, which stands for many
_NEAR = 2  # by which factor that may differ, so that all of them have one size


@dataclass(frozen=True)
class BurstRecord:
    """One burst of mini-batches and what became of it.

    Attributes:
        burst: its number, from 0.
        before: the objective of all data at the weights that were kept last.
        before_error: how far the exact value may be from that.
        after: the same at the end of the burst; infinite if it was not finite.
        after_error: how far the exact value may be from that.
        rate: the learning rate of its first epoch, of the first parameter group.
        kept: whether the exact value is proved to be lower than before.
        batches: how many mini-batches the burst took; none for steps on all data.
        epochs: passes over the loader, or over all data, for gradients.
        work: of the burst and all that was done for it, counted, in gradients of all data.
        note: what else is to be said.

    >>> model, data = nn.Linear(2, 1), [(torch.eye(2), torch.ones(2, 1))]
    >>> training = sf.ProvedEpochs(torch.optim.Adam, sf.Square(), data, model=model)
    >>> loss = training.step()
    >>> training.history[0].kept
    True
    """

    burst: int
    before: float
    before_error: float
    after: float
    after_error: float
    rate: float
    kept: bool
    batches: int
    epochs: float
    work: float
    note: str = ""


class Snapshot:
    """Parameters and buffers of a model and the state of an optimizer, to go back to, bit by bit."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._tensors = {name: value.detach().clone() for name, value in _tensors(model).items()}
        self._state = deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        """Write everything back."""
        live = _tensors(self.model)
        with torch.no_grad():
            for name, value in self._tensors.items():
                live[name].copy_(value)
        self.optimizer.load_state_dict(deepcopy(self._state))

    def is_live(self) -> bool:
        """Whether parameters and buffers are still these, here."""
        live = _tensors(self.model)
        return live.keys() == self._tensors.keys() and all(
            live[name].shape == value.shape and torch.equal(live[name], value)
            for name, value in self._tensors.items()
        )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


class Average:
    """The mean of parameters over the last steps of an epoch.

    Args:
        parameters: what counts.
        skipped: how many of the first steps do not.
    """

    def __init__(self, parameters: list[Tensor], skipped: int) -> None:
        self.parameters = parameters
        self._means: list[Tensor] = []
        self.count = -skipped

    def add(self) -> None:
        """Count the present parameters in."""
        self.count += 1
        if self.count < 1:
            return
        present = [parameter.detach() for parameter in self.parameters]
        if self._means:
            moved_together(self._means, present, 1 / self.count)
        else:
            self._means = [value.clone() for value in present]

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Set the parameters to their means, if there are any, and back afterwards."""
        if not self._means:
            yield
            return
        present = [parameter.detach().clone() for parameter in self.parameters]
        _copy(self.parameters, self._means)
        try:
            yield
        finally:
            _copy(self.parameters, present)


@contextmanager
def only_looking(model: nn.Module) -> Iterator[None]:
    """A pass that leaves no trace: no gradients, and buffers and random numbers as they were."""
    held = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        _copy(model.buffers(), held)


def _copy(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def built_up(optimizer: Optimizer, steps: int) -> float:
    r"""How far the first steps of an optimizer with momentum go, on the average, as a part of what later ones do.

    With momentum μ and a gradient that stays the same, step k goes :math:`1-\mu^k` times as far as later ones.
    """
    momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    return sum(1 - momentum**k for k in range(1, steps + 1)) / steps if 0 < momentum < 1 else 1.0


class EndlessBatches:
    """The batches of a loader, one pass after the other."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._stream, self._drawn = self._forever(), 0
        try:
            self.per_epoch = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.per_epoch = sum(1 for _ in loader)

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def take(self, count: int) -> Iterator[Any]:
        """The next ones."""
        for batch in islice(self._stream, count):
            self._drawn += 1
            yield batch

    def begin(self) -> None:
        """Begin a new pass, unless the last one has just ended."""
        if self._drawn % self.per_epoch:
            self._stream, self._drawn = self._forever(), 0

    def length(self, parts: Sequence[Tensor]) -> float:
        """The norm of all parameters, or of what is of their shapes."""
        return math.hypot(*(float(part.double().norm()) for part in parts))


class Regrouped:
    """Batches that a loader would have cut in another way."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def fixed_data(loader: Iterable[Any]) -> Iterable[Any]:
    """The samples that a loader gives, in a fixed order and in larger batches, where it is a plain ``DataLoader``
    that tells which these are (:func:`surefoot.batches.samples_of`); anything else as it is.

    Batches are eight times as large, or less where samples are large, so that memory stays near that of training.
    All have the same size if a number near that divides the samples.
    """
    refuse_random_samples(loader)
    samples = samples_of(loader)
    if samples is None or not isinstance(loader, DataLoader) or not len(samples):
        return loader
    batch = loader.batch_size or 1
    count, wanted = len(samples), _LARGER * batch
    most = max(batch, _BYTES // max(_weight_of_a_sample(loader, samples[0]), 1))
    wanted = min(wanted, most)
    near = [size for size in range(wanted // _NEAR, min(wanted * _NEAR, most) + 1) if size and count % size == 0]
    size = max(near, default=min(wanted, count))
    plain = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
    if plain and are_all(loader, samples):
        return Regrouped(list(zip(*(tensor.split(size) for tensor in loader.dataset.tensors), strict=True)))  # type: ignore[attr-defined]
    return Regrouped(regrouped(loader, samples, size))


def _weight_of_a_sample(loader: DataLoader[Any], index: int) -> int:
    """The bytes of an input, for what a network makes of it; 0 where they are not known."""
    with torch.random.fork_rng(devices=[]):
        sample = loader.collate_fn([loader.dataset[index]])
    if not isinstance(sample, list | tuple) or not isinstance(sample[0], Tensor | list | tuple | Mapping):
        return 0
    parts = (value for value in tensors_of(sample[0]) if isinstance(value, Tensor))
    return sum(v.numel() * (v.element_size() if v.is_floating_point() else _TOKEN) for v in parts)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards all modes are what they were."""
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, mode in modes:
            module.training = mode

    try:
        model.eval()
        yield
    finally:
        try:
            restore()
        except BaseException:  # an interrupt on the way back leaves no module behind
            restore()
            raise
