"""Projected gradient descent with the step 1/L of a certificate."""

from __future__ import annotations

import math
from typing import Any

from surefoot.certificate import Certificate
from surefoot.graph import Graph
from surefoot.guarantees import GuaranteeError, gap_of, iterations
from surefoot.magnitude import Magnitude
from surefoot.optim.base import Closure
from surefoot.optim.constrained import ConstrainedOptimizer
from surefoot.optim.record import StepRecord, last_run
from surefoot.optim.stored import Proposal, norm_of, resolution


class ProjectedGradient(ConstrainedOptimizer):
    r"""Projected gradient descent, :math:`u_{k+1} = P(u_k - \gamma\nabla F(u_k))` with :math:`\gamma = 1/L`.

    P is the projection on the set and L the certified smoothness of F on it. The stationarity measure is the norm
    of the gradient mapping :math:`g_k = (u_k - u_{k+1})/\gamma`, which is the gradient where the projection does
    nothing.

    **Theorem** (paper, Theorem conv_grad (i); Ghadimi, Lan and Zhang, Math. Program. 155, 2016). Every step has

    .. math:: F(u_{k+1}) \le F(u_k) - \tfrac1{2L}\|g_k\|^2, \qquad\text{so}\qquad
        \min_{k<N}\|g_k\|^2 \le \frac{2L(F(u_0) - F^*)}{N}.

    Proof. The set is convex, so with :math:`v = u_{k+1} - u_k` Taylor's formula on the segment between them gives
    :math:`F(u_{k+1}) \le F(u_k) + \langle\nabla F(u_k), v\rangle + \frac L2\|v\|^2`. The projection satisfies
    :math:`\langle u_k - \gamma\nabla F(u_k) - u_{k+1}, u_k - u_{k+1}\rangle \le 0`, that is
    :math:`\langle\nabla F(u_k), v\rangle \le -\frac1\gamma\|v\|^2 = -L\|v\|^2`. Together the decrease is at least
    :math:`\frac L2\|v\|^2 = \frac1{2L}\|g_k\|^2`. Add up N steps.

    What a step promises in the history is :math:`-\langle\nabla F, v\rangle - \frac L2\|v\|^2` for the v between
    the weights as they are stored, at least as much, and true however the projection was rounded.

    A regulariser is part of F; absolute values in it (:class:`surefoot.objectives.ElasticNet`) are met by proximal
    steps, of which the same is proved (:mod:`surefoot.optim.constrained`).

    The data of all steps should be the same (a full batch); the certificate is computed once for them. The first
    step projects the start into the set and says so in its record.

    >>> model = nn.Linear(2, 1).double()
    >>> x, y = torch.eye(2).double(), torch.ones(2, 1).double()
    >>> optimizer = sf.optim.ProjectedGradient(model, sf.Square(), domain=sf.ProductBall(1.0))
    >>> losses = [optimizer.step(x, y) for _ in range(20)]
    >>> all(after <= before for before, after in zip(losses, losses[1:]))
    True
    """

    _key: tuple[Any, ...] | None = None
    certificate: Certificate | None = None

    def prepare(self, x: Any, y: Any = None) -> Certificate:
        """The certificate of the objective on the set, for this batch; computed when anything it rests on changed.

        Raises:
            GuaranteeError: if it gives no step size, for example for a network with kinks.
        """
        self.look_around()
        return self._current(x, y, self.graph(x))

    def _current(self, x: Any, y: Any, graph: Graph) -> Certificate:
        key = self.fingerprint(x, y), graph
        if self.certificate is None or key != self._key:
            self.certificate, self._key = self.certify(x, y), key
        return self.certificate

    def forget(self) -> None:
        """Drop the certificate."""
        self.certificate = None

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One projected step of length 1/L."""
        graph, region = self.graph(x), self.region(x)
        certificate = self._current(x, y, graph)
        note = self.enter(region)
        loss, gradient = self.value_and_gradient(x, y, closure)
        smoothness = float(certificate.smoothness)
        step = certificate.inverse_smoothness if smoothness else 1.0  # an affine function descends with any step
        after, move, mapping = self.project(gradient, step, region)
        proved = self.proved_gradient(x, y, loss)
        promise = self.promise(proved, move, after, smoothness)
        if mapping > 0 and not promise > 0:
            note = f"{note}; " * bool(note) + resolution(self.trainable)
        proposal = Proposal(after, step, smoothness, promise, note=note)
        data = self.fingerprint(x, y)
        return self.take(proposal, loss, norm_of(gradient), data, stationarity=mapping, step_size=step)

    def iterations(self, eps: float, gap: float | None = None) -> int:
        r"""How many steps bring the gradient mapping to eps: :math:`\lceil 2L(F(u_0)-F^*)/\varepsilon^2\rceil`.

        Args:
            eps: the accuracy.
            gap: :math:`F(u_0) - F^*`. By default the first loss of the run minus the lower bound of the
                objective, before the first step what the certificate's bound says.

        Raises:
            GuaranteeError: if no certificate was computed yet.
        """
        if self.certificate is None:
            raise GuaranteeError(
                "the number of steps depends on the data: call prepare(x, y) or take a step first"
            )
        return iterations(self.certificate.smoothness, self._gap(self.certificate) if gap is None else gap, eps)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if self.certificate is None:
            return "nothing yet: the certificate is computed with the first data"
        return (
            f"On the set ({self.domain}) the objective of these data is {self.certificate.smoothness}-smooth, so "
            f"every step of size {self.certificate.inverse_smoothness:.3e} decreases it by at least half the step "
            "size times the squared norm of the gradient mapping, in exact arithmetic."
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the certificate, which is computed anew."""
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("certificate", "_key")}

    def _gap(self, certificate: Certificate) -> float | Magnitude:
        if self.lower == -math.inf:
            return gap_of(certificate)
        if self.history:
            return math.nextafter(max(last_run(self.history)[0].loss - self.lower, 0.0), math.inf)
        return gap_of(certificate) if self.lower == 0 else certificate.bound + abs(self.lower)
