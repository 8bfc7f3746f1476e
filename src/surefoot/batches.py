"""Data in pieces: batches ``(x, y)`` that are read many times, always the same, and mean one objective together.

To see how far a pass is, wrap the loader in a progress bar: ``tqdm(loader)`` is read like the loader itself, and
starts again with each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from surefoot.errors import CaptureError, EvaluationError, ObjectiveError, describe
from surefoot.graph import Graph
from surefoot.program.checks import as_inputs, as_targets, check_inputs

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**20  # pieces of samples that are multiplied by weights
_EACH = 0x5851F42D4C957F2D  # odd, so that no number of samples below 2⁶⁴ is lost


class Batches:
    """The batches of a loader, looked at one by one.

    Args:
        loader: a ``DataLoader``, a list, or any other iterable of pairs ``(x, y)`` that can be read many times.
        ordered: whether a batch has to be the same at each pass, and not only all of them together. A
            ``DataLoader`` that shuffles is then read in the order of its data.

    Raises:
        EvaluationError: if the loader can be read only once, or leaves out samples at random.
    """

    def __init__(self, loader: Iterable[Any], *, ordered: bool = False) -> None:
        if isinstance(loader, Iterator):
            raise EvaluationError(
                f"a {type(loader).__name__} can be read only once: pass a DataLoader or a list of batches"
            )
        loader, self._bar = _apart(loader)
        refuse_random_samples(loader)
        self.loader = in_order(loader) if ordered else loader
        self.fixed = isinstance(loader, list | tuple)  # the batches are what somebody made them
        self._seen: list[int] | None = [] if ordered else None

    def __iter__(self) -> Iterator[tuple[int, Any, Tensor]]:
        """The number of each batch, its inputs and its targets.

        Raises:
            CaptureError: naming the batch, if its inputs are no tensors, or not finite.
            EvaluationError: if it is no pair, or not the batch of that number at the first pass.
        """
        if self._bar is not None:
            self._bar.reset()
        for number, batch in enumerate(self.loader):
            if self._bar is not None:
                self._bar.update()
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
                raise EvaluationError(f"a batch is a pair (x, y) of inputs and targets: batch {number} is {kind}")
            with numbered(number):
                check_inputs(*as_inputs(batch[0]))
                targets = as_targets(batch[1]).detach()
            if self._seen is not None:
                self._compare(number, digest(*tensors_of(batch[0]), targets))
            yield number, batch[0], targets

    def _compare(self, number: int, seen: int) -> None:
        assert self._seen is not None
        if number == len(self._seen):
            self._seen.append(seen)
        elif self._seen[number] != seen:
            raise EvaluationError(
                f"batch {number} of the loader is another one than in the first pass: take out random "
                "augmentation and shuffling, or pass a list of batches"
            )

    @property
    def name(self) -> str:
        """A name for the numbers that were seen in order; empty before."""
        return f"{hash(tuple(self._seen)) % 2**64:016x}" if self._seen else ""

    def joined(self) -> tuple[Any, Tensor]:
        """All of them as one batch."""
        parts = [(x, y) for _, x, y in self]
        if not parts:
            raise EvaluationError("the loader has no batches: there is nothing to evaluate")
        try:
            return _stacked([x for x, _ in parts]), torch.cat([y for _, y in parts])
        except RuntimeError as error:
            raise EvaluationError(
                f"the batches do not fit into one ({str(error).splitlines()[0]}): give them samples of one shape"
            ) from error


def _apart(loader: Any) -> tuple[Iterable[Any], Any]:
    """A loader without its progress bar, which closes after one pass if it is read itself; and the bar."""
    is_bar = all(hasattr(loader, name) for name in ("iterable", "reset", "update"))
    return (loader.iterable, loader) if is_bar else (loader, None)


def first_of(loader: Any) -> Any:
    """The first batch of a loader; ``None`` if there is none."""
    return next(iter(_apart(loader)[0]), None)


def _stacked(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def samples_of(loader: Iterable[Any]) -> Sequence[int] | None:
    """Which samples of its data set a ``DataLoader`` gives in each pass, in their order; ``None`` where only the
    loader itself can tell: it is of another class, or its samples are drawn in a way of their own.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    sampler, chosen = loader.sampler, None
    if type(sampler) is SubsetRandomSampler:
        chosen = sampler.indices
    elif type(sampler) in (SequentialSampler, RandomSampler):
        chosen = range(len(sampler.data_source))  # type: ignore[attr-defined]
    if chosen is None or not loader.drop_last:
        return chosen
    return chosen[: len(chosen) // loader.batch_size * loader.batch_size]


def are_all(loader: DataLoader[Any], samples: Sequence[int]) -> bool:
    """Whether samples of a loader are all those of its data set, in their order."""
    return isinstance(samples, range) and len(samples) == len(loader.dataset)  # type: ignore[arg-type]


def regrouped(loader: DataLoader[Any], samples: Sequence[int], size: int) -> DataLoader[Any]:
    """These samples of a loader in their order, in batches of this size."""
    data = loader.dataset if are_all(loader, samples) else Subset(loader.dataset, samples)
    options: dict[str, Any] = {"num_workers": loader.num_workers, "worker_init_fn": loader.worker_init_fn}
    return DataLoader(data, size, collate_fn=loader.collate_fn, **options)


def in_order(loader: Iterable[Any]) -> Iterable[Any]:
    """A ``DataLoader`` that shuffles, in the order of its samples; anything else as it is."""
    samples = samples_of(loader)
    if samples is None or not isinstance(loader, DataLoader) or type(loader.sampler) is SequentialSampler:
        return loader
    return regrouped(loader, samples, loader.batch_size or 1)


def refuse_random_samples(loader: Iterable[Any]) -> None:
    """Refuse a ``DataLoader`` whose passes are of different samples."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    by_batches = loader.batch_sampler if loader.batch_size is None else None
    sampler = getattr(by_batches, "sampler", loader.sampler)
    size = getattr(by_batches, "batch_size", loader.batch_size)
    shuffles = isinstance(sampler, RandomSampler | SubsetRandomSampler)
    drawn = isinstance(sampler, WeightedRandomSampler) or (
        isinstance(sampler, RandomSampler)
        and (sampler.replacement or sampler.num_samples != len(sampler.data_source))
    )
    drops = getattr(by_batches, "drop_last", loader.drop_last)
    if drawn or (shuffles and drops and len(sampler) % (size or 1)):  # type: ignore[arg-type]
        why = f"{type(sampler).__name__} draws them" if drawn else "shuffle with drop_last leaves some out"
        raise EvaluationError(
            f"each pass of the loader is of other samples ({why}), so that it has no objective of which anything "
            "could be proved: use drop_last=False, or pass a loader of all samples (to ProvedEpochs as data=)"
        )


def refuse_statistics(graph: Graph) -> None:
    """Refuse batch normalisation in training mode: what it computes of a sample depends on the others."""
    for node in graph.nodes:
        arguments = node.arguments
        if node.op == "aten.batch_norm" and (arguments["training"] or arguments["running_mean"] is None):
            raise EvaluationError(
                f"batch normalisation in {describe(node.module)} computes its statistics from each batch, so that "
                "the objective of all data is not a mean over batches: call model.eval(), or evaluate all data as "
                "one batch"
            )


@contextmanager
def numbered(number: int | None) -> Iterator[None]:
    """Say in which batch an error was met, if it is one of several."""
    if number is None:
        yield
        return
    try:
        yield
    except (EvaluationError, ObjectiveError) as error:
        raise type(error)(f"in batch {number} of the loader: {error}") from error
    except CaptureError as error:
        what = f"in batch {number} of the loader: {error.what}"
        raise CaptureError(what, where=error.where, remedy=error.remedy) from error


def tensors_of(x: Any) -> tuple[Tensor, ...]:
    """The tensors of an input, in the order in which a graph reads them."""
    args, kwargs = as_inputs(x)
    return (*args, *kwargs.values())


def kind_of(*tensors: Tensor) -> tuple[Any, ...]:
    """What a graph depends on."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def digest(*tensors: Tensor) -> int:
    r"""The same for the same samples in any order, and for others but by accident: those along the first dimension
    of the first tensor, to which all that is as long as it belongs.

    A sample, in pieces b of at most 32 bits, becomes :math:`h = \sum_j w_j b_j` modulo :math:`2^{64}` with random
    weights. Another piece changes h, but for one in :math:`2^{33}`: of :math:`2^{64}` weights at most
    :math:`2^{31}` solve :math:`w\delta = c` if :math:`0 < |\delta| < 2^{32}`. Squares of h are added up over the
    samples, so that targets count with their inputs. To each h a constant is added, so that samples of zeros count
    as well. Zeros at the end of a sample, as of padding, do not count.
    """
    samples = len(tensors[0]) if tensors[0].dim() else 1
    total: Any = _EACH
    for place, tensor in enumerate(tensors):
        total = total + _hashes(tensor, samples if tensor.dim() and len(tensor) == samples else 1, place)
    return int((total * total).sum())


def _hashes(tensor: Tensor, samples: int, place: int) -> Tensor:
    pieces = _bits_of(tensor).reshape(samples, -1)
    pieces = pieces.view(torch.int32) if pieces.element_size() == 8 else pieces
    width = pieces.shape[1]
    weights = _weights(place, width).to(pieces.device)
    parts = (part.long() for part in pieces.split(max(1, _AT_ONCE // max(1, width))))
    return torch.cat([part @ weights if part.is_cpu else (part * weights).sum(dim=1) for part in parts])


@lru_cache(maxsize=8)
def _weights(seed: int, count: int) -> Tensor:
    """Random whole numbers; fewer of them are the first of more."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=random, device="cpu")


def _bits_of(tensor: Tensor) -> Tensor:
    """The bits of all entries as whole numbers."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def digest_of(tensors: Iterable[Tensor]) -> int:
    """The same where several tensors are, in their order: their bits added up."""
    return sum((2 * k + 1) * int(_bits_of(tensor).sum(dtype=torch.int64)) for k, tensor in enumerate(tensors))


def refuse_other_models(digests: Sequence[int]) -> None:
    """Refuse processes that do not have the same parameters and buffers."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise EvaluationError(
            f"process {other} has other parameters or buffers than process 0, so that they speak of different "
            "functions: load the same checkpoint on all, or send those of one by torch.distributed.broadcast"
        )
