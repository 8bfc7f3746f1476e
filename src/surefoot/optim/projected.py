r"""The paper's projected methods: Theorem conv_grad and its remarks, with explicit constants.

The objective is :math:`F = \sum_ip_if_i` on a closed convex set, with :math:`f_i` those of batches and
:math:`p_i` their parts of all samples. Every :math:`f_i` is certified to be L-smooth on the set, so F is. P is the
projection on the set, and :math:`G(u) = (u - P(u - \gamma\nabla F(u)))/\gamma` the gradient mapping, which is the
gradient where the projection does nothing. All follow from one inequality: a projected point :math:`p = P(u -
\gamma g)` satisfies :math:`\langle u - \gamma g - p, z - p\rangle \le 0`, that is, for all z of the set

.. math:: \langle g, p - z\rangle \le \tfrac1{2\gamma}(\|z - u\|^2 - \|p - u\|^2 - \|z - p\|^2) . \tag{1}

Let :math:`u^+ = P(u - \gamma\hat g)`, :math:`\bar u = P(u - \gamma\nabla F(u))`, :math:`\delta = \hat g - \nabla
F(u)`. By (1) with :math:`p = u^+, z = \bar u`, and with :math:`p = \bar u, z = u`,

.. math:: \langle\nabla F(u), u^+ - u\rangle &= \langle\hat g, u^+ - \bar u\rangle
    - \langle\delta, u^+ - \bar u\rangle + \langle\nabla F(u), \bar u - u\rangle \\
    &\le \tfrac1{2\gamma}\big(\|\bar u - u\|^2 - \|u^+ - u\|^2 - \|\bar u - u^+\|^2\big)
    + \|\delta\|\|u^+ - \bar u\| - \tfrac1\gamma\|\bar u - u\|^2 \\
    &\le -\tfrac\gamma2\|G(u)\|^2 - \tfrac1{2\gamma}\|u^+ - u\|^2 + \tfrac\gamma2\|\delta\|^2,

as :math:`\|\delta\|t - \frac1{2\gamma}t^2 \le \frac\gamma2\|\delta\|^2`; and smoothness adds
:math:`\frac L2\|u^+ - u\|^2`:

.. math:: F(u^+) \le F(u) - \tfrac\gamma2\|G(u)\|^2 - \big(\tfrac1{2\gamma} - \tfrac L2\big)\|u^+ - u\|^2
    + \tfrac\gamma2\|\delta\|^2 . \tag{2}

*The first remark*, on gradient descent without a set, is :func:`surefoot.guarantees.require_room`: a ball with
room for all steps takes the place of the sub-level set.
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
from surefoot.errors import EvaluationError
from surefoot.graph.checks import plainly
from surefoot.guarantees import GuaranteeError, gap_of, iterations, require_smooth
from surefoot.magnitude import Magnitude, maximum
from surefoot.objectives import Objective, Regularizer
from surefoot.optim.descent import OptimizerError, check_loss
from surefoot.optim.history import History, StepRecord
from surefoot.optim.problem import Point, Problem


class ProjectedGradient:
    r"""Projected gradient descent, :math:`u_{k+1} = P(u_k - \gamma\nabla F(u_k))` with :math:`\gamma = 1/L`.

    **Theorem** (paper, Theorem conv_grad (i); Ghadimi, Lan and Zhang, Math. Program. 155, 2016). Every step has

    .. math:: F(u_{k+1}) \le F(u_k) - \tfrac1{2L}\|G(u_k)\|^2, \qquad\text{so}\qquad
        \min_{k<N}\|G(u_k)\|^2 \le \frac{2L(F(u_0) - F^*)}{N}.

    Proof. (2) with :math:`\delta = 0` and :math:`\gamma = 1/L`. Add up N steps.

    Each step is also proved by evaluation, between weights as they are stored.

    Args:
        model: the network. What it computes must stay as it is.
        loss: without targets.
        data: a batch ``(x, y)``, or a list of batches.
        domain: the set, by default every block within 1 of the origin; ``center="present"`` means the weights now.
            Weights outside of it are projected into it at once.
        regularizer: a smooth function of the parameters that is part of every :math:`f_i`.
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

    factor = 2  # c in N = c L (F(u₀) − F*)/ε²

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
        if not isinstance(domain, ProductBall | Ball):
            raise TypeError(f"the set is a ProductBall or a Ball, got {type(domain).__name__}")
        if regularizer is not None and not regularizer.smooth:
            raise TypeError(f"the theorem is about smooth objectives, and {regularizer!r} has kinks")
        self.data = [data] if isinstance(data, tuple) else list(data)
        weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.problems = [Problem(model, loss, *pair, weights=weights, regularizer=regularizer) for pair in self.data]
        counts = torch.tensor([float(len(y)) for _, y in self.data], dtype=torch.float64)
        self.parts: list[float] = (counts / counts.sum()).tolist()
        self.domain, self.history, self.seed = domain, History[StepRecord](), seed
        centre = domain.center if isinstance(domain.center, Mapping) else weights if domain.center == "present" else {}
        self._centre = {name: value.detach().double().clone() for name, value in centre.items()}
        graph = self.problems[0].graph
        assert graph is not None
        blocks = {
            path: tuple(graph.leaves[name].path for name in block.parameters if graph.leaves[name].trainable)
            for path, block in graph.blocks.items()
        }
        self._groups = domain.groups({path: names for path, names in blocks.items() if names})
        self.smoothness, gap = Magnitude.zero(), Magnitude.zero()
        options: dict[str, Any] = {"domain": domain, "regularizer": regularizer}
        for x, y in self.data:
            certificate = certify_proved(model, x, objective=loss.bound_to(y), **options)
            require_smooth(certificate)
            self.smoothness = maximum(self.smoothness, certificate.smoothness)
            gap = maximum(gap, gap_of(certificate))
        self.gap, self._random = gap, torch.Generator().manual_seed(seed)
        self._point = self.project(self.problems[0].start.vector)
        self.problems[0].write(self._point)

    @property
    def length(self) -> float:
        r"""The step size :math:`\gamma`."""
        return self._over(1.0)

    def _over(self, divisor: float) -> float:
        smoothness = float(self.smoothness) * divisor
        if math.isinf(smoothness):
            raise GuaranteeError("1/L is beyond the range of doubles: take smaller radii, fewer layers, or a Ball")
        return math.nextafter(1 / smoothness, 0.0) if smoothness else 1.0

    def iterations(self, eps: float, gap: float | Magnitude | None = None) -> int:
        r"""How many steps the theorem asks for, by default with the gap that the certificates know.

        Args:
            eps: the accuracy.
            gap: at least :math:`F(u_0) - F^*`.
        """
        return iterations(self.smoothness, self.gap if gap is None else gap, eps, factor=self.factor)

    @plainly
    def step(self) -> float:
        """One step; returns the objective that it saw before.

        Raises:
            OptimizerError: if the model or the loss is not what was certified, or a value is not finite.
        """
        for problem, (x, y) in zip(self.problems, self.data, strict=True):
            if not problem.is_about(x, y):
                raise OptimizerError(
                    "data, model or loss were changed, and the certificate is about them as they were: make "
                    f"another {type(self).__name__}"
                )
        weights = self.problems[0].start
        if not torch.equal(weights.vector, self._point.vector):
            self._point = self.project(weights.vector)
        try:
            record = self.advance()
        except EvaluationError as error:
            raise OptimizerError(str(error)) from error
        self.problems[0].write(self._point)
        self.history.append(record)
        return record.loss

    def advance(self) -> StepRecord:
        """Move the point; the record of it."""
        before, length = self._point, self.length
        self._point = self.project(before.vector - length * self.mean(before, lambda point: point.gradient))
        decrease = self.mean(before, lambda p: p.value) - self.mean(self._point, lambda p: p.value)
        proved = self.mean(before, lambda p: p.enclosed(math.inf).lower)
        proved = proved - self.mean(self._point, lambda p: p.enclosed(math.inf).upper)
        proved -= (abs(proved) + abs(decrease) + before.value) * (len(self.parts) + 4) * 2.0**-52
        return self.record(before, length, decrease, max(proved, 0.0))

    def record(self, before: Point, length: float, decrease: float | None, proved: float | None) -> StepRecord:
        """Of a step from a point, with the objective that it saw."""
        size = float(torch.linalg.vector_norm(self.mean(before, lambda point: point.gradient)))
        mapping = float(torch.linalg.vector_norm(self._point.vector - before.vector)) / length
        loss, smoothness = self.mean(before, lambda point: point.value), float(self.smoothness)
        return StepRecord(loss, size, length, decrease, proved, mapping, smoothness)

    def mean(self, point: Point, of: Callable[[Point], Any]) -> Any:
        """The mean over all batches of something at a point."""
        points = point.__dict__.setdefault("in_batches", [problem.at(point.vector) for problem in self.problems])
        return sum(part * of(each) for part, each in zip(self.parts, points, strict=True))

    def draw(self) -> int:
        """The number of a batch, drawn with its part of all samples."""
        return int(torch.multinomial(torch.tensor(self.parts), 1, generator=self._random))

    def project(self, vector: Tensor) -> Point:
        """The nearest point of the set, rounded to the types of the weights so that it stays in it.

        On one ball the triangle inequality gives :math:`\\|u - z\\| \\ge \\|u - c\\| - R` for every z in it, which
        :math:`c + R(u - c)/\\|u - c\\|` attains; on a product each group is for itself.
        """
        problem, stored = self.problems[0], self.problems[0].at(vector)
        aim = problem.unpack(vector)
        for names, radius in self._groups:
            away = {name: aim[name] - self._centre.get(name, torch.zeros_like(aim[name])) for name in names}
            scale, slack = 1.0, 2.0**-50
            while self._distance(stored, names) > radius:
                if slack > 4:
                    raise DomainError(
                        f"no number of the type of the weights is within {radius:g} of the centre of '{names[0]}': "
                        "take a larger radius or double precision"
                    )
                scale = min(scale, radius / max(float(norm(list(away.values()))), 1e-300)) * max(1 - slack, 0.0)
                slack *= 4
                for name in names:
                    moved = self._centre.get(name, 0.0) + scale * away[name]
                    stored.weights[name] = moved.to(stored.weights[name].dtype)
        return problem.at(problem.pack(stored.weights))

    def _distance(self, point: Point, names: tuple[str, ...]) -> float:
        """From the centre, rounded up."""
        away = [point.weights[name].double() - self._centre.get(name, 0.0) for name in names]
        return float(norm(away)) * (1 + 2.0**-50)


class ProjectedSGD(ProjectedGradient):
    r"""Projected stochastic gradient descent, :math:`u_{k+1} = P(u_k - \gamma\nabla f_i(u_k))`,
    :math:`\gamma = 1/(2L)`, with a batch i drawn with probability :math:`p_i`.

    **Theorem** (paper, Theorem conv_grad (ii), with its constants). Let :math:`\mathbb{E}\|\nabla f_i(u) - \nabla
    F(u)\|^2 \le \sigma^2` on the set. For R drawn uniformly from 0, …, N - 1,

    .. math:: \mathbb{E}\|G(u_R)\|^2 \le \frac{4L(F(u_0) - F^*)}{N} + \sigma^2 .

    Proof. In (2) the third term is not positive. So :math:`\mathbb{E}F(u_{k+1}) \le \mathbb{E}F(u_k) -
    \frac\gamma2\mathbb{E}\|G(u_k)\|^2 + \frac\gamma2\sigma^2`; add up. So ``iterations(eps)`` steps make
    :math:`\mathbb{E}\|G(u_R)\| \le \varepsilon + \sigma`. What the history records is measured on the batch.
    """

    factor = 4

    @property
    def length(self) -> float:
        return self._over(2.0)

    def advance(self) -> StepRecord:
        number, length, before = self.draw(), self.length, self._point
        seen = self.problems[number].at(before.vector)
        self._point = self.project(before.vector - length * seen.gradient)
        mapping = float(torch.linalg.vector_norm(self._point.vector - before.vector)) / length
        return StepRecord(seen.value, seen.gradient_norm, length, None, None, mapping, float(self.smoothness))


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
    def theta(self) -> float:
        r""":math:`\theta`, rounded down."""
        count = len(self.problems)
        return 2 / (1 + math.sqrt(1 + 2 * count * (count - 1))) * (1 - 2.0**-50)

    @property
    def length(self) -> float:
        return self._over(1 / self.theta)

    def iterations(self, eps: float, gap: float | Magnitude | None = None) -> int:
        """How many short steps the theorem asks for; an epoch has as many as there are batches."""
        gap = self.gap if gap is None else gap
        return iterations(self.smoothness * (1 / self.theta * (1 + 2.0**-50)), gap, eps)

    def advance(self) -> StepRecord:
        before, length = self._point, self.length
        whole = self.mean(before, lambda point: point.gradient)
        for _ in self.problems:
            number, current = self.draw(), self._point
            change = self.problems[number].at(current.vector).gradient - before.__dict__["in_batches"][number].gradient
            self._point = self.project(current.vector - length * (whole + change))
        after = self.mean(self._point, lambda point: point.value)
        return self.record(before, length, self.mean(before, lambda point: point.value) - after, None)
