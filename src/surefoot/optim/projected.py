r"""The paper's projected methods: Theorem conv_grad and its remarks, with explicit constants.

The objective is :math:`F = \sum_ip_if_i` on a closed convex set, with :math:`f_i` those of batches and
:math:`p_i` their parts of all samples; every :math:`f_i` is certified to be L-smooth on the set. P is the
projection, :math:`G(u) = (u - P(u - \gamma\nabla F(u)))/\gamma` the gradient mapping. A projected point :math:`p =
P(u - \gamma g)` satisfies :math:`\langle u - \gamma g - p, z - p\rangle \le 0`, that is, for all z of the set

.. math:: \langle g, p - z\rangle \le \tfrac1{2\gamma}(\|z - u\|^2 - \|p - u\|^2 - \|z - p\|^2) . \tag{1}

Let :math:`u^+ = P(u - \gamma\hat g)`, :math:`\bar u = P(u - \gamma\nabla F(u))`, :math:`\delta = \hat g - \nabla
F(u)`. By (1) with :math:`p = u^+, z = \bar u`, and with :math:`p = \bar u, z = u`,

.. math:: \langle\nabla F(u), u^+ - u\rangle &= \langle\hat g, u^+ - \bar u\rangle
    - \langle\delta, u^+ - \bar u\rangle + \langle\nabla F(u), \bar u - u\rangle \\
    &\le \tfrac1{2\gamma}\big(\|\bar u - u\|^2 - \|u^+ - u\|^2 - \|\bar u - u^+\|^2\big)
    + \|\delta\|\|u^+ - \bar u\| - \tfrac1\gamma\|\bar u - u\|^2 \\
    &\le -\tfrac\gamma2\|G(u)\|^2 - \tfrac1{2\gamma}\|u^+ - u\|^2 + \tfrac\gamma2\|\delta\|^2,

as :math:`\|\delta\|t - \frac1{2\gamma}t^2 \le \frac\gamma2\|\delta\|^2`. Smoothness adds
:math:`\frac L2\|u^+ - u\|^2`:

.. math:: F(u^+) \le F(u) - \tfrac\gamma2\|G(u)\|^2 - \big(\tfrac1{2\gamma} - \tfrac L2\big)\|u^+ - u\|^2
    + \tfrac\gamma2\|\delta\|^2 . \tag{2}

The first remark, on gradient descent without a set, is :func:`surefoot.guarantees.require_room`: a ball with room
for all steps takes the place of the sub-level set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball, Domain, DomainError, ProductBall
from surefoot.enclosure import norm
from surefoot.guarantees import GuaranteeError, gap_of, iterations, require_smooth
from surefoot.magnitude import Magnitude, maximum
from surefoot.objectives import Objective, Regularizer
from surefoot.optim.descent import OptimizerError, check_loss
from surefoot.optim.history import History, StepRecord
from surefoot.optim.problem import Point, Problem
from surefoot.program.checks import plainly


class ProjectedGradient:
    r"""Projected gradient descent, :math:`u_{k+1} = P(u_k - \gamma\nabla F(u_k))` with :math:`\gamma = 1/L`.

    **Theorem** (paper, Theorem conv_grad (i); Ghadimi, Lan and Zhang, Math. Program. 155, 2016).

    .. math:: F(u_{k+1}) \le F(u_k) - \tfrac1{2L}\|G(u_k)\|^2, \qquad\text{so}\qquad
        \min_{k<N}\|G(u_k)\|^2 \le \frac{2L(F(u_0) - F^*)}{N}.

    Proof. (2) with :math:`\delta = 0`. Add up N steps. Each step is also proved by evaluation, between weights as
    they are stored.

    Args:
        model: the network. What it computes must stay as it is.
        loss: without targets.
        data: a batch ``(x, y)``, or a list of batches.
        domain: the set, by default every block within 1 of the origin; ``center="present"`` means the weights now.
            Weights outside of it are projected into it.
        regularizer: a smooth function of the weights that is part of every :math:`f_i`.
        seed: of batches that are drawn.

    Attributes:
        smoothness: L.
        history: a record per step.

    >>> model = nn.Linear(2, 1).double()
    >>> x, y = torch.eye(2).double(), torch.ones(2, 1).double()
    >>> optimizer = sf.optim.ProjectedGradient(model, sf.Square(), (x, y), domain=sf.ProductBall(1.0))
    >>> losses = [optimizer.step() for _ in range(20)]
    >>> all(after <= before for before, after in zip(losses, losses[1:]))
    True
    """

    factor = 2.0  # the step is 2/(factor · L), and N = factor · L (F(u₀) − F*)/ε²

    @plainly
    def __init__(
        self,
        model: nn.Module,
        loss: Objective | nn.Module,
        data: Any,
        domain: Domain | None = None,
        *,
        regularizer: Regularizer | None = None,
        seed: int = 0,
    ) -> None:
        loss, domain = check_loss(loss, "the data"), ProductBall(1.0) if domain is None else domain
        if not isinstance(domain, ProductBall | Ball) or not (regularizer is None or regularizer.smooth):
            raise TypeError(
                f"the theorem is for a ProductBall or a Ball, and no kinks: got {domain}, {regularizer}"
            )
        self.data = [data] if isinstance(data, tuple) else list(data)
        weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._problems = [
            Problem(model, loss, *pair, weights=weights, regularizer=regularizer) for pair in self.data
        ]
        counts = torch.tensor([float(len(y)) for _, y in self.data], dtype=torch.float64)
        self._parts: list[float] = (counts / counts.sum()).tolist()
        centre = (
            domain.center if isinstance(domain.center, Mapping) else weights if domain.center == "present" else {}
        )
        self._centre = {name: value.detach().double().clone() for name, value in centre.items()}
        graph = self._problems[0].graph
        assert graph is not None
        blocks = {
            path: tuple(graph.leaves[name].path for name in block.parameters if graph.leaves[name].trainable)
            for path, block in graph.blocks.items()
        }
        self._groups = domain.groups({path: names for path, names in blocks.items() if names})
        self.smoothness, self.gap = Magnitude.zero(), Magnitude.zero()
        for x, y in self.data:
            bound = loss.bound_to(y)
            certificate = certify_proved(model, x, objective=bound, domain=domain, regularizer=regularizer)
            require_smooth(certificate)
            self.smoothness = maximum(self.smoothness, certificate.smoothness)
            self.gap = maximum(self.gap, gap_of(certificate))
        divided = 0.5 * self.factor * float(self.smoothness)
        if math.isinf(divided):
            raise GuaranteeError("1/L is beyond the range of doubles: take smaller radii, fewer layers, or a Ball")
        self.length = math.nextafter(1 / divided, 0.0) if divided else 1.0  # an affine function takes any step
        self.history: History[StepRecord] = History()
        self._random = torch.Generator().manual_seed(seed)
        self._point = self._problems[0].start

    def iterations(self, eps: float, gap: float | Magnitude | None = None) -> int:
        r"""The N of the theorem that makes its bound :math:`\varepsilon^2`, but for noise.

        Args:
            eps: the accuracy.
            gap: at least :math:`F(u_0) - F^*`; by default what the certificates say.
        """
        part = 0.5 * self.factor * (1 + 2.0**-50)
        return iterations(self.smoothness * part, self.gap if gap is None else gap, eps)

    @plainly
    def step(self) -> float:
        """One step; returns the objective that it saw before.

        Raises:
            OptimizerError: if the model or the loss is not what was certified, or a value is not finite.
        """
        for problem, (x, y) in zip(self._problems, self.data, strict=True):
            if not problem.is_about(x, y):
                raise OptimizerError("data, model or loss are not what was certified: make another optimizer")
        present = self._problems[0].start
        if not self.history or not torch.equal(present.vector, self._point.vector):
            self._point = self._project(present.vector)
        before = self._point
        proved = self._advance()
        record = self._record(before, proved)
        if not math.isfinite(record.loss + record.gradient_norm):
            self._point = before
            raise OptimizerError(f"the loss is {record.loss} with a gradient mapping of {record.gradient_norm}")
        self._problems[0].write(self._point)
        self.history.append(record)
        return record.loss

    def _advance(self) -> bool:
        """Move the point; says whether the step is proved one by one."""
        self._point = self._project(
            self._point.vector - self.length * self._mean(self._point, lambda p: p.gradient)
        )
        return True

    def _record(self, before: Point, proved: bool) -> StepRecord:
        loss, after = (self._mean(point, lambda p: p.value) for point in (before, self._point))
        mapping = float(torch.linalg.vector_norm(self._point.vector - before.vector)) / self.length
        promise = None
        if proved:  # but for the round-off of these means
            lower = self._mean(before, lambda p: p.enclosed(math.inf).lower)
            upper = self._mean(self._point, lambda p: p.enclosed(math.inf).upper)
            promise = max(lower - upper - (abs(lower) + abs(upper)) * (len(self._parts) + 4) * 2.0**-52, 0.0)
        return StepRecord(loss, mapping, self.length, loss - after, promise, float(self.smoothness))

    def _in_batches(self, point: Point) -> list[Point]:
        """The same point for each batch."""
        each: list[Point] = point.__dict__.setdefault("each", [p.at(point.vector) for p in self._problems])
        return each

    def _mean(self, point: Point, of: Callable[[Point], Any]) -> Any:
        """The mean over all samples of something at a point."""
        return sum(part * of(each) for part, each in zip(self._parts, self._in_batches(point), strict=True))

    def _draw(self) -> int:
        """The number of a batch, drawn with its part of all samples."""
        return int(torch.multinomial(torch.tensor(self._parts), 1, generator=self._random))

    def _project(self, vector: Tensor) -> Point:
        r"""The nearest point of the set, rounded to the types of the weights so that it stays in it.

        On a ball the triangle inequality gives :math:`\|u - z\| \ge \|u - c\| - R` for every z in it, which
        :math:`c + R(u - c)/\|u - c\|` attains; on a product each group is for itself.
        """
        problem = self._problems[0]
        aim, stored = problem.unpack(vector), dict(problem.at(vector).weights)
        for names, radius in self._groups:
            centre = {name: self._centre.get(name, torch.zeros_like(aim[name])) for name in names}
            scale, slack = 1.0, 2.0**-50
            while (size := norm([stored[n].double() - centre[n] for n in names]) * (1 + 2.0**-50)) > radius:
                if slack > 4:
                    raise DomainError(
                        f"no weights of this type are within {radius:g} of the centre of '{names[0]}'"
                    )
                scale *= min(radius / float(size), 1.0) * max(1 - slack, 0.0)
                slack *= 4
                for n in names:
                    stored[n] = (centre[n] + scale * (aim[n] - centre[n])).to(stored[n].dtype)
        return problem.at(problem.pack(stored))


class ProjectedSGD(ProjectedGradient):
    r"""Projected stochastic gradient descent, :math:`u_{k+1} = P(u_k - \gamma\nabla f_i(u_k))`,
    :math:`\gamma = 1/(2L)`, with a batch i drawn with probability :math:`p_i`.

    **Theorem** (paper, Theorem conv_grad (ii), with its constants). Let :math:`\mathbb{E}\|\nabla f_i(u) - \nabla
    F(u)\|^2 \le \sigma^2` on the set. For R drawn uniformly from 0, …, N - 1,

    .. math:: \mathbb{E}\|G(u_R)\|^2 \le \frac{4L(F(u_0) - F^*)}{N} + \sigma^2 .

    Proof. In (2) the third term is not positive. So :math:`\mathbb{E}F(u_{k+1}) \le \mathbb{E}F(u_k) -
    \frac\gamma2\mathbb{E}\|G(u_k)\|^2 + \frac\gamma2\sigma^2`; add up. So ``iterations(eps)`` steps make
    :math:`\mathbb{E}\|G(u_R)\| \le \varepsilon + \sigma`.
    """

    factor = 4.0

    def _advance(self) -> bool:
        slope = self._in_batches(self._point)[self._draw()].gradient
        self._point = self._project(self._point.vector - self.length * slope)
        return False


class ProjectedSVRG(ProjectedGradient):
    r"""Variance-reduced projected gradient descent: one call of :meth:`step` is an epoch of m short steps.

    An epoch starts at :math:`\tilde u = u_0` with all gradients there, and takes for :math:`t < m` the step
    :math:`u_{t+1} = P(u_t - \gamma v_t)`, :math:`v_t = \nabla F(\tilde u) + \nabla f_i(u_t) - \nabla f_i(\tilde
    u)`, with a batch i drawn with probability :math:`p_i`; m is the number of batches.

    **Theorem** (the paper's second remark on Theorem conv_grad; with other constants Li and Li, NeurIPS 2018).
    With :math:`\gamma = \theta/L`, :math:`\theta = 2/(1 + \sqrt{1 + 2m(m-1)})`, and an iterate :math:`u_R` drawn
    uniformly from all :math:`u_t` of N short steps,

    .. math:: \mathbb{E}\|G(u_R)\|^2 \le \frac{2L(F(u_0) - F^*)}{\theta N} .

    There is no term for the noise. Proof. Let :math:`d_t = \|u_{t+1} - u_t\|^2`. In (2),
    :math:`\mathbb{E}\|\delta\|^2 \le \sum_ip_i\|\nabla f_i(u_t) - \nabla f_i(\tilde u)\|^2 \le L^2\|u_t - \tilde
    u\|^2`, and by Cauchy-Schwarz :math:`\|u_t - \tilde u\|^2 \le t\sum_{s<t}d_s`. Over an epoch
    :math:`\sum_{t<m}t\sum_{s<t}d_s \le \frac{m(m-1)}2\sum_sd_s`, so that the factors of
    :math:`\sum_s\mathbb{E}d_s` add up to :math:`-\frac L2(\frac1\theta - 1 - \theta\frac{m(m-1)}2)`, which is zero
    for this :math:`\theta`. Add up all epochs. (For m = 1 it is projected gradient descent.)
    """

    @property
    def factor(self) -> float:  # type: ignore[override]
        r""":math:`2/\theta`, rounded up."""
        count = len(self.data)
        return (1 + math.sqrt(1 + 2 * count * (count - 1))) * (1 + 2.0**-50)

    def _advance(self) -> bool:
        start = self._point
        slopes, whole = self._in_batches(start), self._mean(start, lambda point: point.gradient)
        for _ in self.data:
            number, current = self._draw(), self._point
            change = self._problems[number].at(current.vector).gradient - slopes[number].gradient
            self._point = self._project(current.vector - self.length * (whole + change))
        return False
