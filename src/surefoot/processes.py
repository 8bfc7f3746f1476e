"""What the processes of a ``torch.distributed`` group say to each other: few numbers, and tensors added up.

Everything a process sends is counted. A process that stops or is silent for longer than the time-out of the group
(``timeout=`` of ``init_process_group`` or ``new_group``; 30 minutes for gloo by default) raises on the others.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import SurefootError


class ProcessError(SurefootError, RuntimeError):
    """Another process failed, or there is no group."""


class ProcessLost(ProcessError):
    """Another process stopped, or did not answer in time."""


class Processes:
    """The processes of a group, seen from one of them.

    Args:
        group: a process group of ``torch.distributed`` that this process belongs to.

    Attributes:
        group: the same.
        rank: the number of this process in the group; process 0 leads.
        size: how many there are.
        sent: bytes that this process handed over so far, each message and tensor counted once.

    Raises:
        ProcessError: if there is no such group, or this process is not in it.
    """

    def __init__(self, group: Any) -> None:
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ProcessError(
                "there is no process group: start the script by torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        self._torch, self._group, self.sent = distributed, group, 0
        self.group = group
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise ProcessError("this process is not in the group: only its members may ask for what they share")
        self.size = distributed.get_world_size(group)
        self._first = distributed.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides."""
        return self.rank == 0

    def gathered(self, compute: Callable[[], Any]) -> list[Any]:
        """What it gives on each process, by rank. If it raises on one, all raise: nobody waits for the others."""
        return self._exchanged(compute, lambda mine: mine)[1]

    def collected(self, compute: Callable[[], Any]) -> list[Any]:
        """The same on the leader; nothing is sent to the others, which get an empty list."""
        mine = self.together(compute)
        everyone: list[Any] | None = [None] * self.size if self.leads else None
        packed = b"" if self.leads else self._packed(mine)
        with _answering():
            self._torch.gather_object(packed, everyone, dst=self._first, group=self._group)
        return [mine, *map(pickle.loads, everyone[1:])] if everyone else []

    def together(self, compute: Callable[[], Any]) -> Any:
        """What it gives here, which is not sent. If it raises on one process, all raise."""
        return self._exchanged(compute, lambda mine: None)[0]

    def _exchanged(self, compute: Callable[[], Any], message_of: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        mine: Any = None
        failure: Exception | None = None
        try:
            mine = compute()
        except Exception as error:
            failure = error
        message = ("", message_of(mine)) if failure is None else (str(failure) or type(failure).__name__, None)
        packed, everyone = self._packed(message), list[Any]([None] * self.size)
        with _answering():
            self._torch.all_gather_object(everyone, packed, group=self._group)
        if failure is not None:
            raise failure
        messages = list(map(pickle.loads, everyone))
        for rank, (why, _) in enumerate(messages):
            if why:
                raise ProcessError(f"process {rank} of the group failed: {why}")
        return mine, [part for _, part in messages]

    def tell(self, message: Any = None) -> Any:
        """What the leader says, to all; the others pass nothing."""
        box = [self._packed(message) if self.leads else b""]
        with _answering():
            self._torch.broadcast_object_list(box, src=self._first, group=self._group)
        return message if self.leads else pickle.loads(box[0])

    def ask(self, word: Any) -> None:
        """On process 0 inside :meth:`led`: let all others serve this."""
        self.tell(("ask", word))

    def led(
        self, lead: Callable[[], Any], serve: Callable[[Any], object], failed: type[Exception] = ProcessError
    ) -> Any:
        """Process 0 leads; the others serve what it asks for, until it is done. So decisions are made once.

        Args:
            lead: called on process 0. What it returns is returned on all.
            serve: called on the others with each word that process 0 asks for.
            failed: raised on the others where it raises on process 0.

        Raises:
            ProcessLost: if one of them does not answer.
        """
        if self.leads:
            try:
                result = lead()
            except ProcessLost:
                raise
            except Exception as error:
                self.tell(("failed", str(error)))
                if type(error) is ProcessError:
                    raise failed(str(error)) from error
                raise
            self.tell(("done", result))
            return result
        failure: Exception | None = None
        while (word := self.tell())[0] == "ask":
            try:
                serve(word[1])
            except ProcessLost:
                raise
            except Exception as error:  # which process 0 was told of, and decides what it means
                failure = error
        if word[0] == "failed":
            raise failed(word[1]) from failure
        return word[1]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """The tensors of the leader replace those of all others, bit by bit."""
        for kind in _by_type(tensors):
            joined = torch.cat([tensor.detach().reshape(-1) for tensor in kind])
            if self.leads:
                self.sent += joined.nbytes
            with _answering():
                self._torch.broadcast(joined, src=self._first, group=self._group)
            if not self.leads:
                _write(kind, joined)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor becomes the sum of those of all processes. Sums may differ by round-off between them."""
        for kind in _by_type(tensors):
            joined = torch.cat([tensor.detach().reshape(-1) for tensor in kind])
            self.sent += joined.nbytes
            with _answering():
                self._torch.all_reduce(joined, group=self._group)
            _write(kind, joined)

    def _packed(self, message: Any) -> bytes:
        """A message as it is sent; it is counted."""
        file = io.BytesIO()
        _Packing(file).dump(message)
        self.sent += file.tell()
        return file.getvalue()


class _Packing(pickle.Pickler):
    """Writes a tensor that is a part of a longer one by itself: of its own, PyTorch would write the longer one."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if not is_plain or value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        return value.detach().clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


@contextmanager
def _answering() -> Iterator[None]:
    """Errors of ``torch.distributed`` as a sentence that says what to do."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            "another process of the group stopped, or did not answer within the time-out of the group. Look at "
            f"its output, and start all of them again from the last checkpoint ({str(error).splitlines()[0]})"
        ) from error


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that fit into one, in an order that is the same on all processes."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())


def _write(tensors: list[Tensor], joined: Tensor) -> None:
    parts = joined.split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


__all__ = ["ProcessError", "ProcessLost", "Processes"]
