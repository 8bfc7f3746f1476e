"""Projected stochastic gradient descent whose noise vanishes: variance reduction by full gradients now and
then.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.domains import Box, Domain
from surefoot.guarantees import GuaranteeError, iterations
from surefoot.magnitude import Magnitude
from surefoot.objectives import Objective, Regularizer
from surefoot.optim.base import Closure, OptimizerError
from surefoot.optim.evaluation import explained
from surefoot.optim.record import StepRecord
from surefoot.optim.stochastic import BatchCertificates
from surefoot.optim.stored import norm_of

Pairs = Sequence[tuple[Any, Any]]


class ProjectedSVRG(BatchCertificates):
    r"""Variance-reduced projected gradient descent: one call of :meth:`step` is an epoch of m short steps.

    The objective is the average of those of B batches, :math:`F = \frac1B\sum_if_i`, on a set. An epoch starts at
    :math:`\tilde u = u_0` with all gradients :math:`\nabla f_i(\tilde u)`, which are kept, and takes for :math:`t
    < m` the step :math:`u_{t+1} = P(u_t - \gamma v_t)` with the average over b batches, drawn independently and
    uniformly,

    .. math:: v_t = \nabla F(\tilde u) + \tfrac1b\sum_{i\in I_t}(\nabla f_i(u_t) - \nabla f_i(\tilde u)) .

    **Theorem** (the paper's second remark on Theorem conv_grad; with other constants Li and Li, NeurIPS 2018). Let
    L be a smoothness of every :math:`f_i` on the set, which is convex, and :math:`\gamma = \theta/L` with
    :math:`\theta = 2/(1 + \sqrt{1 + 2m(m-1)/b})`. For an iterate :math:`u_R` drawn uniformly from all
    :math:`u_t` of N short steps and the gradient mapping G of step :math:`\gamma`,

    .. math:: \mathbb{E}\|G(u_R)\|^2 \le \frac{2L(F(u_0) - F^*)}{\theta N} .

    There is no term for the noise. Proof. Let :math:`\delta = v_t - \nabla F(u_t)` and :math:`d_t = \|u_{t+1} -
    u_t\|^2`. As in :class:`ProjectedSGD`,

    .. math:: F(u_{t+1}) \le F(u_t) - \tfrac\gamma2\|G(u_t)\|^2 - \big(\tfrac1{2\gamma} - \tfrac L2\big)d_t
        + \tfrac\gamma2\|\delta\|^2 .

    :math:`\delta` is the mean of b independent draws less its expectation, so :math:`\mathbb{E}\|\delta\|^2 \le
    \frac1{bB}\sum_i\|\nabla f_i(u_t) - \nabla f_i(\tilde u)\|^2 \le \frac{L^2}b\|u_t - \tilde u\|^2`, and by
    Cauchy-Schwarz :math:`\|u_t - \tilde u\|^2 \le t\sum_{s<t}d_s`. Over an epoch :math:`\sum_{t<m}t\sum_{s<t}d_s
    \le \frac{m(m-1)}2\sum_sd_s`, so that the factors of :math:`\sum_s\mathbb{E}d_s` add up to
    :math:`-\frac L2(\frac1\theta - 1 - \theta\frac{m(m-1)}{2b})`, which is zero for this :math:`\theta`. Add up
    all epochs. (For m = 1 it is projected gradient descent.) Absolute values in a regulariser change nothing
    (:mod:`surefoot.optim.constrained`).

    Args:
        model, objective, domain, regularizer, lower, progress: see :class:`ProjectedGradient`.
        inner: m; by default B/b, so that the short steps of an epoch cost as much as its full gradient.
        draws: b.
        seed: of the draws.

    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(12, 2).double()
    >>> batches = [(part, part.sum(1, keepdim=True)) for part in x.split(3)]
    >>> optimizer = sf.optim.ProjectedSVRG(model, sf.Square(), sf.Ball(0.5))
    >>> losses = [optimizer.step(batches) for _ in range(10)]
    >>> losses[-1] < losses[0]
    True
    """

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        domain: Domain | Box | None = None,
        *,
        inner: int | None = None,
        draws: int = 1,
        seed: int = 0,
        regularizer: Regularizer | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        for name, count in (("inner", inner), ("draws", draws)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} is a whole number from 1, got {count!r}")
        super().__init__(model, objective, domain, regularizer=regularizer, lower=lower, progress=progress)
        self.inner, self.draws = inner, draws
        self._random = torch.Generator().manual_seed(seed)
        self._count = 0  # batches of an epoch

    def prepare(self, batches: Iterable[tuple[Any, Any]]) -> Magnitude:
        """Certify all batches before the first epoch; returns the largest smoothness."""
        listed = list(batches)
        self._count = len(listed)
        return super().prepare(listed)

    def check_data(self, x: Any, y: Any) -> None:
        """All batches, each with its targets.

        Raises:
            OptimizerError: if it is anything else.
        """
        pairs = isinstance(x, Sequence) and x and all(isinstance(pair, tuple) and len(pair) == 2 for pair in x)
        if y is not None or not pairs:
            raise OptimizerError(
                "an epoch is about all batches: step([(x, y), (x, y), …]), for example list(loader)"
            )
        for batch in x:
            super().check_data(*batch)

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One epoch."""
        if closure is not None:
            raise OptimizerError("the short steps of an epoch need more than one loss: leave the closure out")
        batches: Pairs = x
        for batch in batches:
            self.graph(batch[0])
            self._see(*batch)
        region = self.region(batches[0][0])
        note = self.enter(region)
        self._count = count = len(batches)
        found = [self.value_and_gradient(*batch) for batch in batches]
        slopes = [{name: slope.double() for name, slope in gradient.items()} for _, gradient in found]
        mean = {name: torch.stack([slope[name] for slope in slopes]).mean(0) for name in slopes[0]}
        inner, step = self.short_steps, self.length
        mapping = self.project(mean, step, region)[2]
        for _ in range(inner):
            drawn = self.drawn(count)
            now = [self.value_and_gradient(*batches[i])[1] for i in drawn]
            self.write(self.project(_corrected(mean, now, [slopes[i] for i in drawn]), step, region)[0])
        names = [self.fingerprint(*batch) for batch in batches]
        loss = math.fsum(value for value, _ in found) / count
        return StepRecord(
            len(self.history),
            loss,
            norm_of(mean),
            step,
            smoothness=float(self.smoothness),
            stationarity=mapping,
            data=hashlib.sha256("".join(names).encode()).hexdigest()[:16],
            note="; ".join(filter(None, (note, f"{inner} short steps"))),
        )

    def drawn(self, count: int) -> list[int]:
        """The numbers of b batches, drawn independently and uniformly."""
        return torch.randint(count, (self.draws,), generator=self._random).tolist()

    @property
    def short_steps(self) -> int:
        """m, of one epoch."""
        return max(self._count // self.draws, 1) if self.inner is None else self.inner

    @property
    def theta(self) -> float:
        r""":math:`\theta`, rounded down."""
        m = self.short_steps
        return 2 / (1 + math.sqrt(1 + 2 * m * (m - 1) / self.draws)) * (1 - 2.0**-48)

    @property
    def length(self) -> float:
        r"""The length :math:`\theta/L` of the short steps."""
        return self.theta / float(self.smoothness) if float(self.smoothness) else 1.0

    def iterations(self, eps: float, gap: float | None = None) -> int:
        r"""How many short steps make :math:`\mathbb{E}\|G(u_R)\|^2 \le \varepsilon^2`; an epoch takes m of them.

        Args:
            eps: the accuracy.
            gap: :math:`F(u_0) - F^*`; by default what certificates say.

        Raises:
            GuaranteeError: if no batch was seen yet.
        """
        if not self.batches:
            raise GuaranteeError("the number of steps depends on the data: call prepare(batches) or step first")
        larger = self.smoothness * (1 / self.theta * (1 + 2.0**-48))
        return iterations(larger, self.largest_gap if gap is None else gap, eps)

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        if not self.batches:
            return "nothing yet: certificates are computed with the first data"
        return (
            f"L = {self.smoothness} is the largest of the {len(self.batches)} batches, valid on the set "
            f"({self.domain}) for each of them. The gradient mapping at a random iterate is at most eps in mean "
            f"square after iterations(eps) short steps, {self.short_steps} to an epoch, counted from "
            f"epoch {self.since}; there is no noise in it."
        )

    def extra_state(self) -> dict[str, Any]:
        """The set, the constants of the batches, and the state of the draws."""
        return {**super().extra_state(), "random": self._random.get_state(), "count": self._count}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        super().load_extra_state(state)
        self._random.set_state(state["random"])
        self._count = state["count"]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: generators are copied by their state."""
        return {**super().__getstate__(), "_random": self._random.clone_state()}


def _corrected(
    mean: dict[str, Tensor], now: Sequence[dict[str, Tensor]], then: Sequence[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The full gradient of the start, moved by how much the drawn ones have changed."""
    found = dict(mean)
    for present, before in zip(now, then, strict=True):
        for name in found:
            found[name] = found[name] + (present[name].double() - before[name]) / len(now)
    return found
