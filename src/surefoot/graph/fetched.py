r"""Weights that lie with several processes, whole only while they are read.

Each process runs the operations of a model on its own data, and reads one weight after the other, on the way
forward and back. A weight is gathered for that, and dropped when others are. The gradient in it is summed up over
all processes as soon as it is known, and each keeps its part. Both take all processes. But these need not do the
same: they may have more batches or fewer, or none, and look at weights again where others do not. So they meet in
*rounds*. In each, every process says what it wants next, a weight or a sum; what is wanted by anyone is done by
all, in the order of numbers. Who has finished, or failed, goes on meeting the others until all are done. Processes
with batches of the same kind want the same, and gather a weight once for each of its readers.

Small weights, and vectors (biases, scales), are gathered in bundles (:mod:`surefoot.graph.placed`), and so are
gradients in them summed up: where all of them fit into one, a pass is two messages for them. At one time a process
holds the last two large weights and the last two bundles it read, those that an operation is reading, and one that
another process wants. What is computed from weights alone, such as one that is divided by its norm, stays as long
as its readers need it.

Directions along which derivatives are taken lie as the weights do, and are read in the same way.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from surefoot.graph.placed import Placed, bundled, gathered, norms
from surefoot.processes import Processes, ProcessLost
from surefoot.torch_private import Deferred, Known

_NOTHING, _FAILED = -1, -2
_KEPT = 2  # large weights, and bundles
_CLOSED = "weights that lie with several processes are read where these do not meet"


class Fetched(dict[str, Tensor]):
    """Weights by path, each a tensor whose numbers are gathered when it is read, inside :meth:`open`.

    Args:
        processes: all that hold a part, and no others; all of them make this at the same time.
        places: how they lie, by path, in the same order on all.
        parts: those of this process, by path; not to be changed while these weights are in use.
        measured: whether norms and largest entries are found at once, for proofs.

    Attributes:
        failed: whether the body of the last :meth:`open` raised on any process.
        slopes: this process' parts of the sums of what was added, by path.
        most: the most bytes of whole weights that were here at one time.
    """

    def __init__(
        self,
        processes: Processes,
        places: Mapping[str, Placed],
        parts: Mapping[str, Tensor],
        *,
        measured: bool = True,
    ) -> None:
        super().__init__()
        self.processes, self.slopes, self.most, self.failed = processes, dict[str, Tensor](), 0, False
        self._paths, self._places = list(places), list(places.values())
        self._bundles = bundled(self._places)
        self._bundle_of = {number: k for k, bundle in enumerate(self._bundles) for number in bundle}
        self._parts = [[parts[path].detach() for path in places], []]  # of weights, and of what is read with them
        self._kept, self._alive = OrderedDict[int, list[Tensor]](), list[weakref.ref[Tensor]]()
        self._sums: tuple[int, dict[int, Tensor]] = (_NOTHING, {})  # of one bundle, not summed up over processes
        self._is_open = False
        known = self._measured(self._parts[0]) if measured else [None] * len(places)
        self.update(self._deferred(0, known))

    def _deferred(self, kind: int, known: Sequence[Known | None]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, (path, part) in enumerate(zip(self._paths, self._parts[kind], strict=True)):
            like = torch.empty(self._places[number].shape, dtype=part.dtype, device="meta")
            fetch = partial(_fetched, weakref.ref(self), kind, number)
            found[path] = Deferred.made(like, part.device, fetch, known[number])
        return found

    def norms(self, parts: Mapping[str, Tensor]) -> dict[str, float]:
        """Of other tensors that lie as the weights do, by path; all processes call this with their parts."""
        counts = {
            path: place.counts for path, place in zip(self._paths, self._places, strict=True) if path in parts
        }
        found = norms(self.processes, [parts[path] for path in counts], list(counts.values()))
        return dict(zip(counts, found, strict=True))

    def _measured(self, parts: Sequence[Tensor]) -> list[Known]:
        """Norms and largest entries, of the parts of all processes together."""
        peaks = [float(part.abs().max()) if part.numel() else 0.0 for part in parts]
        mine = torch.tensor(peaks, dtype=torch.float64, device=parts[0].device).nan_to_num(math.inf, math.inf)
        largest = self.processes.beside([mine], len(mine)).amax(0)
        sizes = norms(self.processes, parts, [place.counts for place in self._places])
        return [Known(size, peak) for size, peak in zip(sizes, largest.tolist(), strict=True)]

    def along(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Other tensors of the same shapes, of which these are the parts here: directions, to be read together
        with the weights until others take their place.
        """
        self._parts[1] = [parts[path].detach() for path in self._paths]
        return self._deferred(1, [None] * len(self._paths))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Weights may be read and sums added to in the body; all processes are in theirs at the same time.

        Raises:
            ProcessLost: if another process stops, or does not answer.
        """
        self._is_open, self.failed = True, False
        try:
            yield
            self._serve(_NOTHING)
        except ProcessLost:
            raise
        except Exception:
            self._serve(_FAILED)
            raise
        finally:
            self._is_open, self._sums = False, (_NOTHING, {})
            self._kept.clear()

    def add(self, path: str, slope: Tensor) -> None:
        """Add this, whole, to the sum over all processes for a weight."""
        number = self._paths.index(path)
        bundle = self._bundle_of[number]
        if self._sums[0] not in (_NOTHING, bundle):
            self._sum_up_soon()
        sums = self._sums[1]
        sums[number] = sums[number] + slope if number in sums else slope.double()
        self._sums = bundle, sums
        if self._is_large(bundle):
            self._sum_up_soon()

    def _sum_up_soon(self) -> None:
        self._round(2 * len(self._bundles) + self._sums[0])

    def _serve(self, word: int) -> None:
        if self._sums[0] != _NOTHING:
            self._sum_up_soon()
        while self._round(word):
            pass

    def _is_large(self, bundle: int) -> bool:
        return not self._places[self._bundles[bundle][0]].small

    def _whole(self, kind: int, number: int) -> Tensor:
        if self._places[number].is_copy:
            return self._parts[kind][number]
        bundle = self._bundle_of[number]
        code = kind * len(self._bundles) + bundle
        if code not in self._kept:
            self._round(code)
        self._kept.move_to_end(code)
        return self._kept[code][self._bundles[bundle].index(number)]

    def _round(self, wanted: int) -> bool:
        """Say what is wanted here and do what is wanted anywhere; whether there was anything."""
        if not self._is_open:
            raise ProcessLost(_CLOSED)
        found = self.processes.announced(wanted, self._parts[0][0].device)
        self.failed = _FAILED in found
        for code in sorted({*found} - {_NOTHING, _FAILED}):
            kind, bundle = divmod(code, len(self._bundles))
            if kind == 2:
                self._sum_up(bundle)
            else:
                self._gather(kind, bundle, code == wanted)
        return any(code >= 0 for code in found)

    def _gather(self, kind: int, bundle: int, wanted: bool) -> None:
        numbers, large = self._bundles[bundle], self._is_large(bundle)
        alike = [code for code in self._kept if self._is_large(code % len(self._bundles)) == large]
        if (wanted or not large) and len(alike) >= _KEPT:
            del self._kept[alike[0]]
        wholes = gathered(
            self.processes, [self._places[k] for k in numbers], [self._parts[kind][k] for k in numbers]
        )
        self._alive = [one for one in self._alive if one() is not None] + [weakref.ref(whole) for whole in wholes]
        self.most = max(self.most, sum(one.nbytes for one in (ref() for ref in self._alive) if one is not None))
        if wanted or not large:
            self._kept[kind * len(self._bundles) + bundle] = wholes

    def _sum_up(self, bundle: int) -> None:
        """Of what was added here so far, if that is what all have come for."""
        given: dict[int, Tensor] = {}
        if self._sums[0] == bundle:
            given, self._sums = self._sums[1], (_NOTHING, {})
        numbers, device = self._bundles[bundle], self._parts[0][0].device
        places = [self._places[number] for number in numbers]
        wholes = [
            given[k] if k in given else torch.zeros(place.shape, dtype=torch.float64, device=device)
            for k, place in zip(numbers, places, strict=True)
        ]
        if self._is_large(bundle):
            self.processes.sent += wholes[0].nbytes
            parts = [places[0].summed(wholes[0])]
        else:
            joined = torch.cat([whole.reshape(-1) for whole in wholes])
            self.processes.add([joined])
            sums = joined.split([place.numel for place in places])
            parts = [place.part_of(total.view(place.shape)) for place, total in zip(places, sums, strict=True)]
        for number, part in zip(numbers, parts, strict=True):
            path = self._paths[number]
            self.slopes[path] = self.slopes[path] + part if path in self.slopes else part


def opened(weights: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
    """A context in which weights may be read, wherever they lie."""
    return weights.open() if isinstance(weights, Fetched) else nullcontext()


def _fetched(owner: weakref.ref[Fetched], kind: int, number: int) -> Tensor:
    """A weight; its tensor does not hold the others, so that all parts are freed once nobody reads them."""
    weights = owner()
    if weights is None:
        raise ProcessLost(_CLOSED)
    return weights._whole(kind, number)
