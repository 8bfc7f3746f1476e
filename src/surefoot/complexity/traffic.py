r"""Predictions of the traffic between processes that have a part of the data each, and of the time of a call.

With p parameters, d numbers of output of all samples and P processes (:mod:`surefoot.chain.batched`), process 0
sends and all hand over

* pull-back: the slope, d numbers; gradients, p numbers in double precision, added up;
* push-forward: the direction, p numbers; outputs, d numbers, added up row by row;
* certificate that follows all directions (:mod:`surefoot.certificate.pieces`): second derivatives, p² numbers, and
  a gradient, added up once; some thousand bytes for each ball.

Words, failures and sizes are some hundred bytes. An addition of N bytes over a ring moves :math:`2\frac{P-1}PN`
bytes through each process in :math:`2(P - 1)` messages, sending N bytes to all takes :math:`\lceil\log_2P\rceil`
turns. (R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, 2005.)
The time of a call is that of the multiplications, shared by all, and of these; nothing is overlapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DOUBLE = 8


@dataclass(frozen=True)
class Traffic:
    """Bytes that processes hand over for each call of the automatic-differentiation oracle, and its time.

    Attributes:
        processes: P.
        parameters: p.
        outputs: d, of all samples.
        width: bytes of one number of the model.
        multiplications: multiplications of a forward and a backward pass over all samples.
    """

    processes: int
    parameters: int
    outputs: int
    width: int
    multiplications: int

    @property
    def pull(self) -> tuple[int, int]:
        """Bytes of a pull-back: what process 0 hands over, and what each of the others does."""
        return self.width * self.outputs + _DOUBLE * self.parameters, _DOUBLE * self.parameters

    @property
    def push(self) -> tuple[int, int]:
        """Bytes of a push-forward."""
        return self.width * (self.parameters + self.outputs), self.width * self.outputs

    @property
    def descent(self) -> tuple[int, int]:
        """Bytes of a pass of proved descent: weights are sent, gradients added up."""
        return (self.width + _DOUBLE) * self.parameters, _DOUBLE * self.parameters

    @property
    def hessian(self) -> tuple[int, int]:
        """Bytes of a gradient and a second derivative at the weights, for certificates."""
        return (_DOUBLE * (self.parameters + self.parameters**2),) * 2

    def gauss_newton(self, iterations: int) -> tuple[int, int]:
        """Bytes of a step by conjugate gradients: a gradient, a push-forward and a pull-back for each iteration,
        and both once more to measure the residual.
        """
        (first, others), (first_push, others_push) = self.pull, self.push
        pulls, pushes = iterations + 2, iterations + 1
        return pulls * first + pushes * first_push, pulls * others + pushes * others_push

    def seconds(self, rate: float, bandwidth: float, latency: float) -> float:
        """The time of one gradient of proved descent: weights are sent, gradients added up.

        ``rate`` is multiplications per second of a process, ``bandwidth`` bytes per second, ``latency`` seconds
        per message.
        """
        size = self.processes
        sent = math.ceil(math.log2(size)) * (latency + self.width * self.parameters / bandwidth)
        added = 2 * (size - 1) * (_DOUBLE * self.parameters / size / bandwidth + latency)
        return self.multiplications / (size * rate) + (sent + added)
