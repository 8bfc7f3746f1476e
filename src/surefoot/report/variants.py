"""Certificates for comparison, at the same weights: with other radii and with other layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surefoot.certificate import Certificate
from surefoot.certifying import certify
from surefoot.domains import Ball, Domain, ProductBall
from surefoot.errors import SurefootError
from surefoot.smoothing import smooth

_FACTORS = tuple(2.0**k for k in range(-6, 4))  # of the radius
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class WhatIf:
    """Certificates that differ from the first one in one respect.

    Attributes:
        radii: certificates of the same model on smaller and larger balls, by radius, in rising order.
        variants: certificates of other models, by the name of the change.

    >>> sf.report.WhatIf().radii
    ()
    """

    radii: Sequence[tuple[float, Certificate]] = ()
    variants: Sequence[tuple[str, Certificate]] = ()


def what_if(
    model: nn.Module, x: Any, certificate: Certificate, *, domain: Domain | None = None, **options: Any
) -> WhatIf:
    """Certify again with other radii, with smooth activations and with layer normalisation.

    Variants that cannot be certified, or do not change the model, are left out. A certificate without a radius has
    no variants.

    Args:
        model: the certified model.
        x: the batch.
        certificate: its certificate.
        domain: the domain of the certificate; by default the ball around the weights that it chose.
        options: the other arguments of :func:`surefoot.certify`.

    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.eye(2)
    >>> ball = sf.Ball(0.1)
    >>> different = sf.report.what_if(model, x, sf.certify(model, x, domain=ball), domain=ball)
    >>> len(different.radii), [name for name, _ in different.variants]
    (10, ['half the radius', 'smooth activations', 'layer normalisation'])
    """
    if domain is None and isinstance(certificate.radius, float):
        domain = Ball(certificate.radius)
    if not isinstance(domain, Ball | ProductBall) or not isinstance(domain.radius, float | int):
        return WhatIf()
    radii = []
    for factor in _FACTORS if domain.radius else ():
        ball: Any = replace(domain, radius=factor * domain.radius)
        radii.append((ball.radius, certificate if factor == 1 else certify(model, x, domain=ball, **options)))
    variants = [("half the radius", smaller) for radius, smaller in radii if radius == domain.radius / 2]
    makers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "smooth activations": smooth,
        "layer normalisation": normalised,
    }
    for name, maker in makers.items():
        try:
            variant = maker(model)
            if list(map(type, variant.modules())) != list(map(type, model.modules())):
                variants.append((name, certify(variant, x, domain=domain, **options)))
        except SurefootError:
            continue
    return WhatIf(radii, variants)


def normalised(model: nn.Module) -> nn.Module:
    """A copy with a normalisation without parameters after each linear or convolutional layer except the last.

    A model that already has normalisations is only copied.

    >>> normalised(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))[0]
    Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
      (1): LayerNorm((3,), eps=1e-05, elementwise_affine=False, bias=False)
    )
    """
    made = copy.deepcopy(model)
    if any("Norm" in type(module).__name__ for module in made.modules()):
        return made
    layers = [path for path, module in made.named_modules() if type(module) in (nn.Linear, *_CONVOLUTIONS)]
    for path in layers[:-1]:
        layer: Any = made.get_submodule(path)
        norm = (
            nn.LayerNorm(layer.out_features, elementwise_affine=False, bias=False)
            if type(layer) is nn.Linear
            else nn.GroupNorm(1, layer.out_channels, affine=False)
        )
        parent, _, name = path.rpartition(".")
        setattr(made.get_submodule(parent), name, nn.Sequential(layer, norm))
    return made
