"""Data in pieces: batches ``(x, y)`` that are read many times, always the same, and mean one objective together.

To see how far a pass is, wrap the loader in a progress bar: ``tqdm(loader)`` is read like the loader itself, and
starts again with each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from surefoot.errors import CaptureError, EvaluationError, ObjectiveError, describe
from surefoot.graph import Graph
from surefoot.graph.checks import as_inputs, check_inputs

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        _refuse_random_samples(loader)
        self.loader = _in_order(loader) if ordered else loader
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
                targets = torch.as_tensor(batch[1]).detach()
            if self._seen is not None:
                self._compare(number, sum(map(digest, (*tensors_of(batch[0]), targets))))
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


def _in_order(loader: Iterable[Any]) -> Iterable[Any]:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler):
        return loader
    return DataLoader(
        loader.dataset, loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn
    )


def _refuse_random_samples(loader: Iterable[Any]) -> None:
    if not isinstance(loader, DataLoader) or not loader.drop_last or not isinstance(loader.sampler, RandomSampler):
        return
    if len(loader.sampler) % (loader.batch_size or 1):
        raise EvaluationError(
            "the loader leaves out samples at random (shuffle with drop_last), so that each pass is another "
            "objective: use drop_last=False"
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


def digest(tensor: Tensor) -> int:
    """The bits of all entries, added up as whole numbers: the same for the same entries in any order."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))


def digest_of(tensors: Iterable[Tensor]) -> int:
    """The same where several tensors are, in their order."""
    return sum((2 * k + 1) * digest(tensor) for k, tensor in enumerate(tensors))


def refuse_other_models(digests: Sequence[int]) -> None:
    """Refuse processes that do not have the same parameters and buffers."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise EvaluationError(
            f"process {other} has other parameters or buffers than process 0, so that they speak of different "
            "functions: load the same checkpoint on all, or send those of one by torch.distributed.broadcast"
        )
