"""One case of the attack: certify, then try to exceed the certificate, each tensor's enclosure and each rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attack.enclosures import values_at, wrong_enclosures
from attack.networks import Case, Network
from attack.operations import wrong_rules
from judges import Target, attack, violations
from judges.function import in_double
from surefoot.calculus.analysis import Analysis
from surefoot.calculus.forward import forward
from surefoot.certificate.proving import certify_proved


@dataclass(frozen=True)
class Verdict:
    """What came of one case.

    Attributes:
        wrong: everything found that a certificate, an enclosure or a rule excludes.
        finite: whether the smoothness is finite, so that there was something to attack.
        ratio: how far the Lipschitz constant is above what was found.
    """

    wrong: list[str]
    finite: bool
    ratio: float


class Judge:
    """A network with its twin in double precision, which all cases share."""

    def __init__(self, network: Network) -> None:
        self.network = network
        model, x = network.model, network.x
        reals = [value.dtype for value in (x, *model.parameters()) if value.is_floating_point()]
        self.twin = in_double(model, reals[0])
        self.inputs = (x.double() if x.is_floating_point() else x,)

    def verdict(self, case: Case, seed: int) -> Verdict:
        """Certify the case and attack it."""
        model, x = self.network.model, self.network.x
        certificate = certify_proved(model, x, domain=case.domain, wrt=case.wrt, input_norm=case.input_norm)
        target = Target.on(self.twin, self.inputs, case.domain, case.wrt)
        found = attack(target, seed=seed)
        wrong = [*map(str, violations(certificate, found)), *self._wrong_inside(case, target, found.points, seed)]
        ratio = float(certificate.lipschitz) / found.lipschitz if found.lipschitz > 0 else math.inf
        return Verdict(wrong, certificate.smoothness.is_finite, ratio)

    def _wrong_inside(self, case: Case, target: Target, points: list[Tensor], seed: int) -> list[str]:
        model, x = self.network.model, self.network.x
        analysis = Analysis.of(model, x)
        graph, ready = analysis.reading.graph, analysis.reading.prepared
        (leaf,) = graph.inputs
        leaves, region = analysis.enclosed(case.domain, case.wrt, case.input_norm)
        result = forward(ready, leaves, region)
        base = {name: enclosure.value for name, enclosure in leaves.items()} | {leaf.name: self.inputs[0]}
        if case.wrt == "input":
            base[leaf.name] = target.center.reshape(x.shape)
        center = values_at(ready, base)
        computed = torch.cat([center[name].reshape(-1) for name in ready.outputs])
        if not torch.allclose(computed, target.value(target.center), rtol=1e-9, atol=1e-9):
            return ["the graph the calculus reads is not the model"]
        messages = []
        for point in points:
            parts = dict(zip(target.names, target.split(point), strict=True))
            moved = {
                name: parts[graph.leaves[name].path if case.wrt == "params" else 0] for name in region.variables
            }
            values = values_at(ready, base | moved)
            messages += wrong_enclosures(result, center, values)
        return [*messages, *wrong_rules(result, center, torch.Generator().manual_seed(seed))]
