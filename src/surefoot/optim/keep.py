"""Epoch checks: weights are accepted only if the objective of all data is proved to be lower."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, default_collate

from surefoot.batches import refuse_random_samples, regrouped, samples_of, tensors_of
from surefoot.errors import EvaluationError
from surefoot.graph.checks import plainly, unwrapped
from surefoot.graph.guard import Guard
from surefoot.objectives import Objective
from surefoot.optim.descent import check_loss
from surefoot.optim.history import History
from surefoot.processes import Processes
from surefoot.valuation.streamed import StreamedValuer
from surefoot.valuation.valuer import Evaluation, InfiniteValue

_FASTER = 1.5  # factor of lowered rates after an epoch that was accepted
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
    state of the optimizer, bit by bit, and lowers its learning rates; they rise again with epochs that are
    accepted, up to what they were at first. Random numbers are not rolled back, so that an epoch that failed is
    not repeated.

    If the model computes another function than at the last check (an attribute, a hook, a mode), the weights
    accepted before are evaluated anew, so that one function is compared at both.

    Args:
        model: the model that is trained.
        optimizer: whose state is rolled back with the weights; or several.
        loss: without targets, ours or of torch.nn.
        data: what the objective is the mean over: re-iterable batches ``(x, y)`` without augmentation, or one such
            pair. Data that are held out from training may be passed as well.
        slower: factor of the learning rates after weights were rolled back; 1 leaves them to your own schedule.
        patience: how many checks in a row may fail before weights are rolled back.
        group: a process group in which each process has a part of the data; all of them call this together.

    Attributes:
        history: one record per check; the first is that of the weights at the start.

    >>> model, x, y = nn.Linear(2, 1), torch.eye(2), torch.ones(2, 1)
    >>> keep = sf.KeepIfLower(model, torch.optim.SGD(model.parameters(), lr=0.1), sf.Square(), [(x, y)])
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(100.0)
    >>> keep(), bool(model.weight.max() < 50)
    (False, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Objective | nn.Module,
        data: Any,
        *,
        slower: float = 0.5,
        patience: int = 0,
        group: Any = None,
    ) -> None:
        self.model, self.loss = unwrapped(model), check_loss(loss, "the batches (x, y)")
        self.optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        if not self.optimizers or not all(isinstance(each, Optimizer) for each in self.optimizers):
            raise TypeError("KeepIfLower(model, optimizer, loss, data) rolls back a torch optimizer: pass it")
        if not 0 < slower <= 1:
            raise ValueError(f"rates are lowered by a factor between 0 and 1, got {slower!r}")
        self.slower, self.patience = slower, patience
        self.data = [data] if isinstance(data, tuple) else larger_batches(data)
        self.processes = None if group is None else Processes(group)
        self._stream: StreamedValuer | None = None
        self._guard: Guard | None = None
        self._buffers: list[Tensor] = []
        self._functions: dict[Any, str] = {}
        self._level = 0
        self._lowered, self._failed = 1.0, 0  # rates, over those of the caller; checks in a row
        self.value = self._evaluated(True, True)
        self.history: History[EpochRecord] = History()
        self._record(self.value, True)
        self._accepted = self.snapshot()

    @plainly
    def __call__(self, epochs: int = 0) -> bool:
        """Accept the present weights, or roll back; says which."""
        value, accepted, note = Evaluation(math.inf, 0.0), False, ""
        if all(bool(tensor.isfinite().all()) for tensor in _tensors(self.model).values()):
            try:
                value, accepted, note = self._judged()
            except InfiniteValue:
                pass
        self._record(value, accepted, epochs, note)
        if accepted:
            self.accept(value)
            return True
        self._failed += 1
        if self._failed > self.patience:
            self.roll_back()
            self._scale_rates(self.slower ** (self._failed - self.patience))
        return False

    def _judged(self) -> tuple[Evaluation, bool, str]:
        """The value of the present weights, as exactly as it takes to decide whether it is lower."""
        functions, note = self._functions, ""
        for level in range(self._level, 3):
            self._level = level  # as training goes on, decreases get smaller, and rough values decide no more
            value = self._evaluated(derivatives=level == 2, double=level > 0)
            if any(self._functions[kind] != functions.get(kind, self._functions[kind]) for kind in self._functions):
                note, functions = "the model computes another function than at the last check", self._functions
                self._revalue()
            if value.upper < self.value.lower:
                return value, True, note
            if value.lower >= self.value.upper:
                break
            if level == 2 and value.value < self.value.value:  # the old value may be known too roughly
                self._revalue()
        return value, value.upper < self.value.lower, note

    def _revalue(self) -> None:
        """Evaluate the accepted weights by the function as it is now."""
        present = self.snapshot()
        self.restore(self._accepted)
        try:
            self.value = self._evaluated(True, True)
        finally:
            self.restore(present)

    def _evaluated(self, derivatives: bool, double: bool) -> Evaluation:
        """The objective of all data in evaluation mode; roughly first, by a pass forward in single precision."""
        with evaluating(self.model):
            buffers = list(self.model.buffers())
            moved = len(buffers) != len(self._buffers) or not all(map(torch.equal, buffers, self._buffers))
            if self._stream is None:
                self._stream = StreamedValuer(self.model, self.data, self.loss, self.processes)
            elif moved or self._guard is None or not self._guard.holds():
                self._stream = self._stream.anew()  # of the same data: others are refused
            self._buffers = [buffer.clone() for buffer in buffers]
            single = not double and self.processes is None
            found = self._stream.evaluate(derivatives=derivatives, single=single, summed=False)
            self._functions = self._stream.functions
            self._guard = Guard(self.model)
        if not math.isfinite(found.evaluation.error) and derivatives and not hasattr(self, "history"):
            raise EvaluationError(
                f"no error of the value {found.evaluation.value:g} can be proved: {self._stream.obstacle or 'it'} "
                "is too steep at these weights, or jumps"
            )
        return found.evaluation

    def _record(self, value: Evaluation, accepted: bool, epochs: int = 0, note: str = "") -> None:
        rate = float(self.optimizers[0].param_groups[0].get("lr", math.nan))
        self.history.append(EpochRecord(value.value, value.error, accepted, rate, epochs, note))

    def accept(self, value: Evaluation) -> None:
        """Accept the present weights, whose value is this."""
        if self._lowered < 1:
            self._scale_rates(min(_FASTER, 1 / self._lowered))
        self.value, self._failed = value, 0
        self._accepted = self.snapshot()

    def roll_back(self) -> None:
        """Restore weights, buffers and optimizers as they were accepted last, bit by bit."""
        self.restore(self._accepted)

    def _scale_rates(self, factor: float) -> None:
        self._lowered = self._accepted_rate * factor if factor < 1 else self._lowered * factor
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    @property
    def _accepted_rate(self) -> float:
        """How much rates were lowered when weights were accepted last: rolling back restores that."""
        rate: float = self._accepted[2]
        return rate

    def snapshot(self) -> tuple[dict[str, Tensor], list[dict[str, Any]], float]:
        """Copies of weights, buffers and the states of optimizers."""
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
        for module, mode in modes:
            module.training = mode


def larger_batches(loader: Iterable[Any]) -> Iterable[Any]:
    """The samples that a plain ``DataLoader`` gives, in a fixed order and in batches that are eight times as large,
    or less where samples are large, so that memory stays near that of training; anything else as it is.
    """
    refuse_random_samples(loader)
    samples = samples_of(loader)
    if samples is None or not isinstance(loader, DataLoader) or not len(samples):
        return loader
    with torch.random.fork_rng(devices=[]):
        sample = loader.collate_fn([loader.dataset[samples[0]]])
    size = 0
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
        return [tuple(tensor[part] for tensor in loader.dataset.tensors) for part in rows]
    return regrouped(loader, samples, chosen)
