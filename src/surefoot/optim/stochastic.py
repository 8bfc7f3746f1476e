"""Projected stochastic gradient descent with the step 1/(2L) of a certificate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.calculus.adjoint.gradient import proved_gradient
from surefoot.calculus.analysis import Analysis
from surefoot.certificate import Certificate
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Box, Domain
from surefoot.guarantees import GuaranteeError, gap_of, iterations, require_smooth
from surefoot.magnitude import Magnitude, maximum
from surefoot.objectives import Objective, Regularizer
from surefoot.optim.base import Closure
from surefoot.optim.constrained import ConstrainedOptimizer
from surefoot.optim.evaluation import explained
from surefoot.optim.record import StepRecord, last_run
from surefoot.optim.stored import Proposal, norm_of


@dataclass(frozen=True)
class VarianceBound:
    r""":math:`\sigma^2 \ge \sup_u\mathbb{E}\|\hat\nabla F(u) - \nabla F(u)\|^2` on the set.

    One that is given is not checked; :meth:`ProjectedSGD.certify_variance` proves one.

    >>> sf.optim.VarianceBound(0.25).value
    0.25
    """

    value: float


@dataclass(frozen=True)
class VarianceEstimate:
    r"""The variance of the mini-batch gradients seen at one point: an estimate, not a bound.

    Attributes:
        value: :math:`\frac1{b-1}\sum_i\|g_i - \bar g\|^2`.
        batches: b.

    >>> sf.optim.VarianceEstimate(value=0.25, batches=10).value
    0.25
    """

    value: float
    batches: int


class BatchCertificates(ConstrainedOptimizer):
    """What optimizers on mini-batches share: L is the largest of the certificates of the batches seen so far.

    Attributes:
        smoothness: L.
        bound: the largest bound of them.
        batches: logarithms of smoothness and bound, by the fingerprint of the batch.
    """

    certificate: Certificate | None = None  # of the full objective, where it was given

    def __init__(
        self, model: nn.Module, objective: Objective, domain: Domain | Box | None, **options: Any
    ) -> None:
        super().__init__(model, objective, domain, **options)
        self.forget()

    def forget(self) -> None:
        """Drop the certificates of batches; the theorem begins anew."""
        self._since = len(self.history)
        self.batches: dict[str, tuple[float, float]] = {}  # logarithms of smoothness and bound
        if self.certificate is None:
            self.smoothness, self.bound = Magnitude.zero(), Magnitude.zero()

    @property
    def since(self) -> int:
        """The number of the step with which the theorem begins: L, weights and function were left alone since."""
        return max(self._since, last_run(self.history)[0].step if self.history else 0)

    def prepare(self, batches: Iterable[tuple[Any, Any]]) -> Magnitude:
        """Certify all batches of the full objective before the first step; returns the largest smoothness."""
        self.look_around()
        for x, y in batches:
            self.graph(x)
            self._see(x, y)
        return self.smoothness

    def extra_state(self) -> dict[str, Any]:
        """The set and the constants of the batches seen."""
        batches = {name: list(pair) for name, pair in self.batches.items()}
        return {**super().extra_state(), "batches": batches, "since": self._since}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        super().load_extra_state(state)
        self.forget()
        self.batches = {name: (pair[0], pair[1]) for name, pair in state["batches"].items()}
        for pair in self.batches.values():
            self._raise(pair)
        self._since = state.get("since", 0)

    @property
    def largest_gap(self) -> Magnitude:
        """F(u₀) − F*, at most: what the bounds of the batches say."""
        below = self.bound if self.lower == -math.inf else Magnitude.of(abs(min(self.lower, 0.0)))
        return self.bound + below

    def _see(self, x: Any, y: Any) -> None:
        """Certify a batch that is new."""
        data = self.fingerprint(x, y)
        if data not in self.batches:
            certificate = self.certify(x, y)
            self.batches[data] = float(certificate.smoothness.log2), float(certificate.bound.log2)
            self._raise(self.batches[data])

    def _raise(self, pair: tuple[float, float]) -> None:
        if self.smoothness < Magnitude(pair[0]):
            self._since = len(self.history)
        self.smoothness = maximum(self.smoothness, Magnitude(pair[0]))
        self.bound = maximum(self.bound, Magnitude(pair[1]))


class ProjectedSGD(BatchCertificates):
    r"""Projected stochastic gradient descent: :math:`u_{k+1} = P(u_k - \gamma\hat g_k)`, :math:`\gamma = 1/(2L)`.

    **Theorem** (paper, Theorem conv_grad (ii), with its constants). Let :math:`\hat g_k` be a random estimate of
    :math:`\nabla F(u_k)` with :math:`\mathbb{E}\|\hat g_k - \nabla F(u_k)\|^2 \le \sigma^2`, and
    :math:`G(u) = (u - P(u - \gamma\nabla F(u)))/\gamma` the gradient mapping. For R drawn uniformly from 0, …, N
    - 1,

    .. math:: \mathbb{E}\|G(u_R)\|^2 \le \frac{4L(F(u_0) - F^*)}{N} + \sigma^2 .

    So :math:`N \ge 4L(F(u_0) - F^*)/\varepsilon^2` makes :math:`\mathbb{E}\|G(u_R)\| \le \varepsilon + \sigma`.

    Proof. Let :math:`u^+ = P(u - \gamma\hat g)`, :math:`\bar u = P(u - \gamma\nabla F(u))`,
    :math:`\delta = \hat g - \nabla F(u)`. A projected point :math:`p = P(u - \gamma g)` satisfies for all z of
    the set :math:`\langle g, p - z\rangle \le \frac1{2\gamma}(\|z - u\|^2 - \|p - u\|^2 - \|z - p\|^2)`, which is
    :math:`\langle u - \gamma g - p, z - p\rangle \le 0` written out. With :math:`p = u^+, z = \bar u`, and with
    :math:`p = \bar u, z = u`,

    .. math:: \langle\nabla F(u), u^+ - u\rangle &= \langle\hat g, u^+ - \bar u\rangle
        - \langle\delta, u^+ - \bar u\rangle + \langle\nabla F(u), \bar u - u\rangle \\
        &\le \tfrac1{2\gamma}\big(\|\bar u - u\|^2 - \|u^+ - u\|^2 - \|\bar u - u^+\|^2\big)
        + \|\delta\|\|u^+ - \bar u\| - \tfrac1\gamma\|\bar u - u\|^2 \\
        &\le -\tfrac\gamma2\|G(u)\|^2 - \tfrac1{2\gamma}\|u^+ - u\|^2 + \tfrac\gamma2\|\delta\|^2,

    as :math:`\|\delta\|t - \frac1{2\gamma}t^2 \le \frac\gamma2\|\delta\|^2`. Smoothness adds
    :math:`\frac L2\|u^+ - u\|^2`, less than the second term takes away since :math:`\gamma \le 1/L`. Hence
    :math:`\mathbb{E}F(u_{k+1}) \le \mathbb{E}F(u_k) - \frac\gamma2\mathbb{E}\|G(u_k)\|^2 + \frac\gamma2\sigma^2`;
    add up, and put :math:`\gamma = 1/(2L)`. (Any :math:`\gamma \le 1/L` does, with :math:`2/\gamma` in place of
    4L.)

    **Which L.** Let the full objective be an average of the objectives of the batches. Then the largest of their
    constants will do for it, but only once all are known: a step that was made with a smaller one is none of the
    theorem. So the theorem begins where L rose last (:attr:`since`), with the point of that step as :math:`u_0`,
    and begins anew whenever a batch that needs a larger L is seen, or the function is changed. With
    :meth:`prepare` it begins at the first step.

    The theorem names a random iterate, so that the number of steps is drawn: :meth:`random_iterations`. The best
    iterate is no worse, but to know it takes full gradients. The stationarity in the history is that of the
    mini-batch, an estimate.

    Args:
        model, objective, domain, regularizer, lower, progress: see :class:`ProjectedGradient`.
        smoothness: a certificate of the full objective on the set, or ``"batch"``: the largest of the
            certificates of the batches seen so far; see :meth:`prepare`.
        variance: :math:`\sigma^2`, as a number (a bound) or an estimate (see :meth:`estimate_variance`).

    Attributes:
        smoothness: L.

    >>> model, x, y = nn.Linear(2, 1), torch.eye(2), torch.ones(2, 1)
    >>> optimizer = sf.optim.ProjectedSGD(model, sf.Square(), domain=sf.ProductBall(2.0))
    >>> loss = optimizer.step(x[:1], y[:1])
    >>> optimizer.smoothness.is_finite
    True
    """

    @explained
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        domain: Domain | Box | None = None,
        *,
        regularizer: Regularizer | None = None,
        smoothness: Literal["batch"] | Certificate = "batch",
        variance: float | VarianceBound | VarianceEstimate | None = None,
        lower: float | None = None,
        progress: Callable[[StepRecord], object] | None = None,
    ) -> None:
        super().__init__(model, objective, domain, regularizer=regularizer, lower=lower, progress=progress)
        self.variance = VarianceBound(float(variance)) if isinstance(variance, float | int) else variance
        if self.variance is not None and not 0 <= self.variance.value < math.inf:
            raise ValueError(f"a variance is a finite number ≥ 0, got {self.variance.value!r}")
        self.certificate = smoothness if isinstance(smoothness, Certificate) else None
        self.forget()
        if self.certificate is not None:
            require_smooth(self.certificate)
            if self.certificate.domain != str(self.domain):
                raise GuaranteeError(
                    f"the certificate holds where {self.certificate.domain}, the optimizer runs where "
                    f"{self.domain}"
                )
            self.smoothness, self.bound = self.certificate.smoothness, gap_of(self.certificate)
        elif smoothness != "batch":
            raise ValueError(f"smoothness is 'batch' or a certificate of the full objective, got {smoothness!r}")

    def advance(self, x: Any, y: Any, closure: Closure | None) -> StepRecord:
        """One projected step of length 1/(2L) on a mini-batch."""
        region = self.region(x)
        if self.certificate is None:
            self._see(x, y)
        note = self.enter(region)
        loss, gradient = self.value_and_gradient(x, y, closure)
        smoothness = float(self.smoothness)
        step = math.nextafter(0.5 / smoothness, 0.0) if smoothness else 1.0
        after, _, mapping = self.project(gradient, step, region)
        proposal = Proposal(after, step, smoothness, note=note)
        return self.take(proposal, loss, norm_of(gradient), self.fingerprint(x, y), stationarity=mapping)

    def estimate_variance(self, batches: Iterable[tuple[Any, Any]]) -> VarianceEstimate:
        """The sample variance of the gradients of these batches at the present parameters.

        It speaks of one point; the theorem needs a bound over the set. So the result is an estimate, and what is
        computed from it is not proved.

        Raises:
            ValueError: if there are fewer than two batches.
        """
        mean: dict[str, Tensor] = {}
        total, count = 0.0, 0
        for x, y in batches:
            gradient = {name: slope.double() for name, slope in self.value_and_gradient(x, y)[1].items()}
            count += 1
            mean = mean or {name: torch.zeros_like(slope) for name, slope in gradient.items()}
            away = {name: gradient[name] - mean[name] for name in gradient}
            mean = {name: mean[name] + away[name] / count for name in gradient}
            total += sum(float(torch.sum(away[name] * (gradient[name] - mean[name]))) for name in gradient)
        if count < 2:
            raise ValueError(f"a variance takes two batches at least, got {count}")
        return VarianceEstimate(total / (count - 1), count)

    def certify_variance(self, batches: Iterable[tuple[Any, Any]]) -> VarianceBound:
        r"""A proved bound on the variance of the gradient of a batch, drawn uniformly from these, over the set.

        Let :math:`f_i` be the objectives of the batches and F their average. The variance is the smallest second
        moment, so for every a it is at most :math:`\frac1B\sum_i\|\nabla f_i(u) - a\|^2`. With a = 0 each term is
        at most :math:`\ell_i^2`. With the present weights :math:`u_0`, :math:`a = \nabla F(u_0)` and :math:`D \ge
        \|u - u_0\|` on the set, it is at most :math:`(\|\nabla f_i(u_0) - \nabla F(u_0)\| + L_iD)^2`. The smaller
        of the two sums is the bound, with :math:`\ell_i` and :math:`L_i` from certificates of the batches and
        gradients with their errors. A regulariser is the same for all batches and adds nothing.

        The result is also kept as :attr:`variance`.

        Raises:
            ValueError: if there is no batch.
            GuaranteeError: if nothing finite is proved.
        """
        listed = list(batches)
        if not listed:
            raise ValueError("a variance takes one batch at least")
        reach = self.region(listed[0][0]).reach(self.trainable)
        gradients, slopes, bends = [], [], []
        for x, y in listed:
            objective = self.objective.bound_to(y)
            gradients.append(proved_gradient(Analysis.of(self.model, x, objective)))
            certificate = certify_proved(self.model, x, objective=objective, domain=self.domain)
            slopes.append(float(certificate.lipschitz))
            bends.append(float(certificate.smoothness))
        names, count = list(self.trainable), len(listed)
        mean = {name: sum(found.slopes[name] for found in gradients) / count for name in names}
        off = [sum(found.errors[name] for name in names) for found in gradients]
        size = max(norm_of(found.slopes) for found in gradients)
        slack = max(off) * 2 + size * (count + 8) * 2.0**-50
        apart = [norm_of({name: found.slopes[name] - mean[name] for name in names}) + slack for found in gradients]
        around = sum((d + bend * reach) ** 2 for d, bend in zip(apart, bends, strict=True))
        total = min(sum(slope**2 for slope in slopes), around) / count * (1 + (count + 64) * 2.0**-50)
        if not math.isfinite(total):
            raise GuaranteeError(
                "no finite variance is proved: use smooth activations (surefoot.smooth(model)), or a smaller set"
            )
        self.variance = VarianceBound(total)
        return self.variance

    def iterations(self, eps: float, gap: float | None = None) -> int:
        r"""The N of the theorem, :math:`\lceil 4L(F(u_0) - F^*)/\varepsilon^2\rceil`: then E‖G‖² ≤ eps² + σ².

        They are counted from step :attr:`since`.

        Args:
            eps: the accuracy beyond the noise.
            gap: :math:`F(u_0) - F^*`, of the full objective. By default what the certificates' bound says.

        Raises:
            GuaranteeError: if no certificate is known yet.
        """
        if self.certificate is None and not self.batches:
            raise GuaranteeError(
                "the number of steps depends on the data: take a step first, or pass a certificate"
            )
        return iterations(self.smoothness, self.largest_gap if gap is None else gap, eps, factor=4)

    def iterations_within(self, eps: float, gap: float | None = None) -> int:
        r"""The N that makes E‖G‖² ≤ eps²: :math:`\lceil 4L(F(u_0) - F^*)/(\varepsilon^2 - \sigma^2)\rceil`.

        Raises:
            GuaranteeError: if the variance is not known or only estimated, or is not below eps².
        """
        if not isinstance(self.variance, VarianceBound):
            what = "an estimate, which proves nothing" if self.variance else "not given"
            raise GuaranteeError(
                f"the variance is {what}: pass variance=… as a number that bounds it over the set, or use "
                "iterations(eps), which counts the accuracy beyond the noise"
            )
        rest = eps**2 - self.variance.value
        if not rest > 0:
            raise GuaranteeError(
                f"no number of steps goes below the noise, √{self.variance.value:g}: ask for a larger eps, or "
                "take larger batches (the variance falls with their size)"
            )
        return self.iterations(math.sqrt(math.nextafter(rest, 0.0)) * (1 - 2.0**-50), gap)

    def random_iterations(self, eps: float, gap: float | None = None, seed: int | None = None) -> int:
        """R, uniform on 0, …, N - 1: after R steps the parameters are the iterate the theorem speaks of."""
        return random.Random(seed).randrange(max(self.iterations(eps, gap), 1))

    @property
    def guarantee(self) -> str:
        """What is proved of this run, in words."""
        noise = {
            VarianceBound: "the square root of the given bound on the variance",
            VarianceEstimate: "the noise, of which only an estimate is known",
            type(None): "the noise, the square root of a variance that was not given",
        }[type(self.variance)]
        theorem = (
            f"the steps of size 1/(2L) reach, in expectation and at a random iterate, a gradient mapping of at "
            f"most eps + {noise}, in iterations(eps) steps"
        )
        if self.certificate is not None:
            return (
                f"L = {self.smoothness} is the given certificate's; if that is of the full objective, {theorem}."
            )
        return (
            f"L = {self.smoothness} is the largest of the {len(self.batches)} batches seen so far, valid on the "
            f"set ({self.domain}) for each of them and for every average of them. If these are all the batches "
            f"of the full objective, {theorem}, counted from step {self.since}, before which L was smaller or not "
            f"known; a batch not seen yet may need a smaller step, and then the count begins anew."
        )
