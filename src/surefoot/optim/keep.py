"""Epoch checks: weights are accepted only if the objective of all data is proved to be lower."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from surefoot.batches import refuse_random_samples, regrouped, samples_of, tensors_of
from surefoot.errors import EvaluationError
from surefoot.graph.guard import Guard
from surefoot.objectives import Objective
from surefoot.optim.descent import check_loss
from surefoot.optim.history import History
from surefoot.processes import Processes
from surefoot.program.checks import plainly, unwrapped
from surefoot.valuation.streamed import StreamedValuer
from surefoot.valuation.valuer import Evaluation, InfiniteValue

_FASTER = 1.5  # factor of lowered rates after weights were accepted
_LARGER = 8  # how many batches of training make one of an evaluation, unless samples are large
_BYTES, _TOKEN = 2**22, 512  # of the inputs of such a batch, at the most; of a whole number, which stands for many


@dataclass(frozen=True)
class EpochRecord:
    """One epoch check.

    Attributes:
        value: the objective of all data, in evaluation mode; infinite if it is not finite.
        error: how far the exact value may be from that.
        accepted: whether the exact value is proved to be lower than at the weights that were accepted before.
        rate: the learning rate of the first parameter group until then.
        epochs: that were trained since the last check, where that is known.
        note: what else is to be said.
    """

    value: float
    error: float
    accepted: bool
    rate: float
    epochs: int = 0
    note: str = ""

    @property
    def proved(self) -> bool:
        """Whether a decrease is proved."""
        return self.accepted


class KeepIfLower:
    """Accept the weights after an epoch only if the objective of all data is proved to be lower; else roll back.

    Whatever trains the model in between, the exact values at the accepted weights decrease: if the upper end of
    the new value is below the lower end of the old one, the exact value is lower too. The objective is that of the
    model in evaluation mode, with its buffers as they are then. Rolling back restores weights, buffers and the
    state of the optimizer, bit by bit, and lowers its learning rates; they rise again with weights that are
    accepted, up to what they were at first. Random numbers are not rolled back, so that an epoch that failed is
    not repeated. If the model computes another function than at the last check (an attribute, a hook), the weights
    accepted before are evaluated anew, so that one function is compared at both.

    Args:
        model: the model that is trained.
        optimizer: whose state is rolled back with the weights; or several.
        loss: without targets, ours or of torch.nn.
        data: what the objective is the mean over: re-iterable batches ``(x, y)`` without augmentation, or one such
            pair. Data that are held out from training will do as well.
        slower: factor of the learning rates after weights were rolled back; 1 leaves them to your own schedule.
        group: a process group in which each process has a part of the data; all of them call this together.

    Attributes:
        history: one record per check; the first is that of the weights at the start.
        value: the objective at the weights that were accepted last.

    >>> model, x, y = nn.Linear(2, 1), torch.eye(2), torch.ones(2, 1)
    >>> keep = sf.KeepIfLower(model, torch.optim.SGD(model.parameters(), lr=0.1), sf.Square(), [(x, y)])
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(100.0)
    >>> keep(), bool(model.weight.max() < 50)
    (False, True)
    """

    @plainly
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Objective | nn.Module,
        data: Any,
        *,
        slower: float = 0.5,
        group: Any = None,
    ) -> None:
        self.model, self.loss = unwrapped(model), check_loss(loss, "the batches (x, y)")
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if not self.optimizers or not all(isinstance(each, Optimizer) for each in self.optimizers):
            raise TypeError("KeepIfLower(model, optimizer, loss, data) rolls back a torch optimizer: pass it")
        self.slower, self.processes = slower, None if group is None else Processes(group)
        self._stream = StreamedValuer(
            self.model, [data] if isinstance(data, tuple) else larger_batches(data), self.loss, self.processes
        )
        self._guard: Guard | None = None
        self._buffers: list[Tensor] = []
        self._functions: dict[Any, str] = {}
        self._level = 0  # how exactly values have to be known to decide
        self._lowered, self._failed = 1.0, 0  # rates, over those of the caller; checks in a row
        self.value = self._evaluated(2)
        if not math.isfinite(self.value.error):
            raise EvaluationError(
                f"no error of the value {self.value.value:g} can be proved: "
                f"{self._stream.obstacle or 'the model'} is too steep at these weights, or jumps"
            )
        self.history: History[EpochRecord] = History(
            [EpochRecord(self.value.value, self.value.error, True, self._rate)]
        )
        self._accepted = self.snapshot()

    @plainly
    def __call__(self, epochs: int = 0) -> bool:
        """Accept the present weights, or roll back; says which."""
        if self.check(epochs):
            return True
        self.roll_back()
        self._failed += 1
        self._scale_rates(self.slower**self._failed)
        return False

    def check(self, epochs: int = 0) -> bool:
        """Accept the present weights, if they are proved to be lower; nothing else is done."""
        value, note = Evaluation(math.inf, 0.0), ""
        if all(bool(tensor.isfinite().all()) for tensor in _tensors(self.model).values()):
            with suppress(InfiniteValue):
                value, note = self._judged()
        accepted = value.upper < self.value.lower
        self.history.append(EpochRecord(value.value, value.error, accepted, self._rate, epochs, note))
        if accepted:
            self.accept(value)
        return accepted

    def accept(self, value: Evaluation | None = None) -> None:
        """Accept the present weights, whose value is this, whatever it is."""
        self.value, self._failed = self._evaluated(2) if value is None else value, 0
        self._scale_rates(min(_FASTER, 1 / self._lowered))
        self._accepted = self.snapshot()

    def roll_back(self) -> None:
        """Restore weights, buffers and optimizers as they were accepted last, bit by bit."""
        self.restore(self._accepted)

    def _judged(self) -> tuple[Evaluation, str]:
        """The value of the present weights, as exactly as it takes to decide whether it is lower."""
        functions, note = self._functions, ""
        for level in range(self._level, 3):
            self._level = level  # as training goes on, decreases get smaller, and rough values decide no more
            value = self._evaluated(level)
            other = any(
                self._functions[kind] != functions.get(kind, self._functions[kind]) for kind in self._functions
            )
            if other:
                note, functions = "the model computes another function than at the last check", self._functions
            if other or (level == 2 and value.value < self.value.value and value.upper >= self.value.lower):
                self._revalue()
            if value.upper < self.value.lower or value.lower >= self.value.upper:
                break
        return value, note

    def _revalue(self) -> None:
        """Evaluate the accepted weights by the function as it is now, as exactly as can be."""
        present = self.snapshot()
        self.restore(self._accepted)
        try:
            self.value = self._evaluated(2)
        finally:
            self.restore(present)

    def _evaluated(self, level: int) -> Evaluation:
        """The objective of all data: by a pass forward in single precision, in double, or with derivatives."""
        with evaluating(self.model):
            buffers = list(self.model.buffers())
            same = len(buffers) == len(self._buffers) and all(map(torch.equal, buffers, self._buffers))
            if self._guard is None or not (same and self._guard.holds()):
                self._stream = self._stream if self._guard is None else self._stream.anew()  # of the same data
                self._guard = Guard(self.model)
            self._buffers = [buffer.clone() for buffer in buffers]
            single = level == 0 and self.processes is None
            streamed = self._stream.evaluate(derivatives=level == 2, single=single, summed=False)
            self._functions = self._stream.functions
        return streamed.evaluation

    @property
    def _rate(self) -> float:
        return float(self.optimizers[0].param_groups[0].get("lr", math.nan))

    def _scale_rates(self, factor: float) -> None:
        self._lowered *= factor
        for optimizer in self.optimizers if factor != 1 else ():
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def snapshot(self) -> tuple[dict[str, Tensor], list[dict[str, Any]], float]:
        """Copies of weights, buffers and the states of optimizers; how much rates are lowered."""
        tensors = {name: value.detach().clone() for name, value in _tensors(self.model).items()}
        return tensors, [deepcopy(each.state_dict()) for each in self.optimizers], self._lowered

    def restore(self, snapshot: tuple[dict[str, Tensor], list[dict[str, Any]], float]) -> None:
        """Write a snapshot back."""
        live = _tensors(self.model)
        with torch.no_grad():
            for name, value in snapshot[0].items():
                live[name].copy_(value)
        for optimizer, state in zip(self.optimizers, snapshot[1], strict=True):
            optimizer.load_state_dict(deepcopy(state))
        self._lowered = snapshot[2]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards all modes are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        try:
            for module, mode in modes:
                module.training = mode
        finally:  # an interrupt on the way back leaves no module behind
            for module, mode in modes:
                module.training = mode


class _Regrouped:
    """Batches that the loader cut in another way: no list, whose batches are what somebody made them."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def larger_batches(loader: Iterable[Any]) -> Iterable[Any]:
    """The samples that a plain ``DataLoader`` gives, in a fixed order and in batches that are eight times as
    large, or less where samples are large, so that memory stays near that of training; anything else as it is.
    """
    refuse_random_samples(loader)
    samples = samples_of(loader)
    if samples is None or not isinstance(loader, DataLoader) or not len(samples):
        return loader
    with torch.random.fork_rng(devices=[]):
        sample, size = loader.collate_fn([loader.dataset[samples[0]]]), 0
    if isinstance(sample, list | tuple) and isinstance(sample[0], Tensor | list | tuple | Mapping):
        for value in tensors_of(sample[0]):
            size += value.numel() * (value.element_size() if value.is_floating_point() else _TOKEN)
    batch = loader.batch_size or 1
    most = min(_LARGER * batch, max(batch, _BYTES // max(size, 1)))
    # batches of one size share what is known of their operations
    exact = [k for k in range(most // 2, most + 1) if k and len(samples) % k == 0]
    chosen = max(exact, default=min(most, len(samples)))
    if type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
        rows = torch.tensor(list(samples)).split(chosen)  # which does not stack samples one by one
        return _Regrouped([tuple(tensor[part] for tensor in loader.dataset.tensors) for part in rows])
    return regrouped(loader, samples, chosen)
