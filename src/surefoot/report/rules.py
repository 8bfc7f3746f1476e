"""How a bound was built: the rules of the operations that occur, and the errata that touch their constants."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from surefoot.certificate import Certificate, Row
from surefoot.operations.record import Rule, rules
from surefoot.report.docstrings import summary


@dataclass(frozen=True)
class RuleEntry:
    """One rule: the operations it covers, how often they occur, what it claims and why."""

    operations: str
    count: int
    claim: Markup
    proof: Markup


@dataclass(frozen=True)
class Family:
    """Rules that rest on the same argument."""

    title: Markup
    argument: Markup
    entries: list[RuleEntry]


@dataclass(frozen=True)
class Erratum:
    """A constant of the paper that is not the one used; the number is that of the list of errata."""

    number: int
    printed: str
    holds: str
    operations: frozenset[str] | None


def families(certificates: Iterable[Certificate]) -> list[Family]:
    """The rules behind certificates, by family, in the order in which they occur."""
    found: dict[str, dict[Rule, list[str]]] = {}
    for certificate in certificates:
        if certificate.constants != "certified":
            continue
        for row in certificate.rows:
            rule = rule_of(row)
            found.setdefault(rule.__module__, {}).setdefault(rule, []).append(row.operation)
    return [_family(module, entries) for module, entries in found.items()]


def rule_of(row: Row) -> Rule:
    """The rule of a row, which bears the name of its operation or of the scalar function that it computes."""
    known = rules()
    for namespace in ("aten.", "surefoot.", ""):
        rule = known.get(namespace + row.operation)
        if rule is not None and not (rule.__module__.startswith("surefoot.operations.losses.") and row.shape):
            return rule
    others = [rule for name, rule in known.items() if name.rpartition(".")[2] == row.operation and not row.shape]
    return others[0] if others else known["surefoot.scalar"]


def _family(module: str, entries: dict[Rule, list[str]]) -> Family:
    known = module.startswith("surefoot.")
    title, argument = summary(getattr(sys.modules.get(module), "__doc__", None) if known else None)
    written = []
    for rule, operations in entries.items():
        claim, proof = summary(rule.__doc__)
        written.append(RuleEntry(", ".join(dict.fromkeys(operations)), len(operations), claim, proof))
    heading = Markup(title.rstrip(".")) if known else Markup("Rules registered outside of the package")
    return Family(heading, argument, written)


_CONVOLUTIONS = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
_NORMALISATIONS = frozenset(("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm"))
_POOLINGS = frozenset(
    f"{adaptive}{kind}_pool{n}d" for adaptive in ("", "adaptive_") for kind in ("avg", "max") for n in (1, 2, 3)
)
_LOSSES = frozenset(("square", "cross_entropy"))
_SOFTMAX = frozenset(("softmax", "_softmax", "log_softmax", "masked_softmax", "cross_entropy", "logsumexp"))

_ERRATA = (
    Erratum(
        2,
        "The intercept of a convolution has constant √m⌈k/s⌉ (main text) or √m (appendix).",
        "√(m·positions): it is copied to every position of every sample. The printed number is not a bound.",
        _CONVOLUTIONS,
    ),
    Erratum(
        3,
        "Batch-normalisation: bound δm, ℓ = 2ε^(−1/2), L = 2m^(−1/2)ε^(−1).",
        "√(δm), ε^(−1/2) and 0.8587·m^(−1/2)ε^(−1); for images m counts positions too.",
        _NORMALISATIONS,
    ),
    Erratum(
        12,
        "Supervised objectives: only the smoothness of each loss is needed.",
        "The mean of n losses has L = max Lᵢ/n and ℓ = max ℓᵢ/√n.",
        _LOSSES,
    ),
    Erratum(
        13,
        "Logistic loss ℓ ≤ 2, L ≤ 2; soft-max ℓ = 2, L = 4.",
        "√2 and 1/2; 1/2 and √2/(3√3).",
        _SOFTMAX,
    ),
    Erratum(
        15,
        "Pooling: ℓ = 1.",
        "Averages of disjoint k×k patches have 1/k; maxima √(patches over one entry). For overlapping maxima the "
        "printed number is not a bound.",
        _POOLINGS,
    ),
    Erratum(
        17,
        "ℓ of a layer adds up the layers before it: ℓˣℓ + ℓᵘ.",
        "Parameters of different layers are orthogonal: one number per block, and a matrix for pairs of blocks.",
        None,
    ),
    Erratum(
        18,
        "Convergence of gradient descent in O(·) iterations.",
        "min‖∇F(uₖ)‖² ≤ 2L(F(u₀) − F_low)/N with step 1/L, while the iterates stay in the domain.",
        None,
    ),
)


def errata(certificates: Sequence[Certificate]) -> list[Erratum]:
    """Those that touch an operation which occurs."""
    met = {name for c in certificates for row in c.rows for name in row.operation.split(" → ")}
    scalar = any(c.scalar for c in certificates)
    return [e for e in _ERRATA if (scalar or e.number != 18 if e.operations is None else e.operations & met)]


__all__ = ["Erratum", "Family", "RuleEntry", "errata", "families", "rule_of"]
