"""A certificate as a document: plain values that JSON can hold, and back.

The schema ``surefoot/certificate/1``. Every magnitude is there twice: as text, rounded upwards, for people, and
exactly, as its binary logarithm, under the same name in an object ``log2`` beside it. A number that JSON has no
sign for is written as the text ``"∞"`` or ``"-∞"`` (the logarithm of zero). What is computed when it is asked for
(the table, step sizes by block, the constant of Gauss-Newton steps) is written down, and a certificate that is
read back says the same without its model.

The field ``digest`` is the SHA-256 of everything else with keys in order and every number as a double. It tells a
document that was changed by accident or by hand; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from surefoot import guarantees
from surefoot.certificate import Certificate, Row
from surefoot.certificate.advice import limits, verdict
from surefoot.errors import SurefootError
from surefoot.lower.value import Estimate, LowerBound
from surefoot.magnitude import Magnitude

SCHEMA = "surefoot/certificate/1"
_CONSTANTS = ("bound", "lipschitz", "smoothness")


class CertificateError(SurefootError, ValueError):
    """A document is no certificate, or an estimate is not of the same problem; the message says why."""


def write(certificate: Certificate) -> dict[str, Any]:
    """Everything a certificate knows, as plain values."""
    composite = None if certificate.make_damping is None else certificate.make_damping()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": certificate.version,
        "domain": certificate.domain,
        "wrt": certificate.wrt,
        "constants": certificate.constants,
        **{name: str(getattr(certificate, name)) for name in _CONSTANTS},
        "scalar": certificate.scalar,
        "nonnegative": certificate.nonnegative,
        "certified": not certificate.flags and certificate.smoothness.is_finite,
        "verdict": verdict(certificate),
        "limits": limits(certificate),
        "step_size": _number(certificate.step_size),
        "block_step_sizes": {path: _number(step) for path, step in _block_steps(certificate).items()},
        "safe_step": _optional(certificate.segment_step),
        "damping": _optional(_damping(certificate)),
        "composite": composite and {"log2": _number(composite[0].log2), "is_quadratic": composite[1]},
        "blocks": {path: str(value) for path, value in certificate.block_lipschitz.items()},
        "block_gradients": _optional_numbers(certificate.block_gradients),
        "log2": {
            **{name: _number(getattr(certificate, name).log2) for name in _CONSTANTS},
            "blocks": [_number(value.log2) for value in certificate.block_lipschitz.values()],
            "block_smoothness": [
                [_number(entry) for entry in row] for row in np.asarray(certificate.block_smoothness.log2).tolist()
            ],
        },
        "reasons": list(certificate.reasons),
        "flags": list(certificate.flags),
        "estimate": certificate.estimate and _write_estimate(certificate.estimate),
        "bracket": certificate.estimate and certificate.bracket(certificate.estimate).splitlines(),
        "rows": [_write_row(row) for row in certificate.rows],
    }
    return document | {"digest": _digest(document)}


def dump(certificate: Certificate, indent: int | None) -> str:
    """The document as text."""
    return json.dumps(write(certificate), indent=indent, ensure_ascii=False, allow_nan=False)


def load(text: str) -> Certificate:
    """The certificate that a text describes.

    Raises:
        CertificateError: if the text is not JSON or not a document of this schema.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise CertificateError(f"this is not a JSON document: {error}. Expected what to_json wrote") from error
    return read(document)


def _refuse_constant(name: str) -> Any:
    raise CertificateError(f"the document holds {name}, which no certificate writes and JSON does not have")


def read(document: Mapping[str, Any]) -> Certificate:
    """The certificate that a document describes.

    Raises:
        CertificateError: if it has another schema, was changed since it was written, or lacks something.
    """
    if not isinstance(document, Mapping):
        raise CertificateError(f"a certificate is an object with a schema, got {type(document).__name__}")
    if document.get("schema") != SCHEMA:
        raise CertificateError(
            f"the document has the schema {document.get('schema')!r}, and this version of surefoot reads "
            f"{SCHEMA!r}: use the version that wrote it, or certify again"
        )
    content = {key: value for key, value in document.items() if key != "digest"}
    try:
        intact = _digest(content) == document.get("digest")
        certificate = _certificate(content) if intact else None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the document is not a whole certificate: {error!r}. Certify again") from error
    if certificate is None:
        raise CertificateError(
            "the document was changed since it was written, so it proves nothing: its digest is not that of its "
            "content. Use the original, or certify again"
        )
    return certificate


def _certificate(content: Mapping[str, Any]) -> Certificate:
    """The certificate, once the document is known to be as it was written."""
    exact, names = content["log2"], list(content["blocks"])
    rows = tuple(_read_row(row) for row in content["rows"])
    count = len(names)
    matrix = np.array([[_float(entry) for entry in row] for row in exact["block_smoothness"]], dtype=np.float64)
    composite = content["composite"]
    damping = None if composite is None else (_magnitude(composite["log2"]), bool(composite["is_quadratic"]))
    gradients = content["block_gradients"]
    certificate = Certificate(
        **{name: _magnitude(exact[name]) for name in _CONSTANTS},
        block_lipschitz=dict(zip(names, map(_magnitude, exact["blocks"]), strict=True)),
        block_smoothness=Magnitude(matrix.reshape(count, count)),
        reasons=tuple(content["reasons"]),
        domain=content["domain"],
        wrt=content["wrt"],
        constants=content["constants"],
        flags=tuple(content["flags"]),
        scalar=content["scalar"],
        block_gradients=None if gradients is None else {path: _float(value) for path, value in gradients.items()},
        nonnegative=content["nonnegative"],
        segment_step=None if content["safe_step"] is None else _float(content["safe_step"]),
        estimate=content["estimate"] and _read_estimate(content["estimate"]),
        version=content["version"],
        make_rows=lambda: rows,
        make_damping=None if damping is None else lambda: damping,
    )
    if content["block_step_sizes"]:  # as they were, not as another machine would round them
        steps = {path: _float(step) for path, step in content["block_step_sizes"].items()}
        certificate.__dict__["block_step_sizes"] = steps
    return certificate


def _write_row(row: Row) -> dict[str, Any]:
    sizes = {name: getattr(row, name) for name in (*_CONSTANTS, "slope", "curvature")}
    return {
        "module": row.module,
        "operation": row.operation,
        "shape": list(row.shape),
        **{name: None if size is None else str(size) for name, size in sizes.items()},
        "log2": {name: None if size is None else _number(size.log2) for name, size in sizes.items()},
        "share": row.share,
        "epsilon": row.epsilon,
        "bits_by_radius": row.bits_by_radius,
        "bits_by_epsilon": row.bits_by_epsilon,
    }


def _read_row(content: Mapping[str, Any]) -> Row:
    sizes = {name: None if log2 is None else _magnitude(log2) for name, log2 in content["log2"].items()}
    epsilon = content["epsilon"]
    return Row(
        module=content["module"],
        operation=content["operation"],
        shape=tuple(map(int, content["shape"])),
        share=float(content["share"]),
        epsilon=None if epsilon is None else float(epsilon),
        bits_by_radius=float(content["bits_by_radius"]),
        bits_by_epsilon=float(content["bits_by_epsilon"]),
        **sizes,  # type: ignore[arg-type]
    )


def _write_estimate(estimate: Estimate) -> dict[str, Any]:
    found = {name: float(getattr(estimate, name)) for name in _CONSTANTS}
    return {**found, "domain": estimate.domain, "wrt": estimate.wrt}


def _read_estimate(content: Mapping[str, Any]) -> Estimate:
    bound, lipschitz, smoothness = (LowerBound(float(content[name])) for name in _CONSTANTS)
    return Estimate(bound, lipschitz, smoothness, content["domain"], content["wrt"])


def require_same_problem(certificate: Certificate, estimate: Estimate) -> None:
    """Refuse an estimate over another domain or of other variables.

    Raises:
        CertificateError: naming both.
    """
    if not isinstance(estimate, Estimate):
        raise CertificateError(f"an estimate is what surefoot.estimate returns, got {type(estimate).__name__}")
    if estimate.wrt != certificate.wrt or not certificate.domain.startswith(estimate.domain):
        raise CertificateError(
            f"the estimate is with respect to {estimate.wrt}, {estimate.domain}; the certificate with respect to "
            f"{certificate.wrt}, {certificate.domain}: search where the certificate speaks"
        )


def _block_steps(certificate: Certificate) -> Mapping[str, float]:
    """The step sizes per block where there are any."""
    try:
        return certificate.block_step_sizes
    except guarantees.GuaranteeError:
        return {}


def _damping(certificate: Certificate) -> float | None:
    try:
        return certificate.damping
    except guarantees.GuaranteeError:
        return None


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """The same with whole numbers as doubles: programs differ in how they write 3.0."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(entry) for entry in value]
    return float(value) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def _number(value: float) -> float | str:
    """A number that JSON can hold."""
    if math.isfinite(value):
        return float(value)
    return "∞" if value > 0 else "-∞"


def _optional(value: float | None) -> float | str | None:
    return None if value is None else _number(value)


def _optional_numbers(values: Mapping[str, float] | None) -> dict[str, float | str] | None:
    return None if values is None else {path: _number(value) for path, value in values.items()}


def _float(value: float | str) -> float:
    """The number that was written."""
    if isinstance(value, str):
        return {"∞": math.inf, "-∞": -math.inf}[value]
    return float(value)


def _magnitude(log2: float | str) -> Magnitude:
    return Magnitude(_float(log2))


__all__ = ["SCHEMA", "CertificateError", "dump", "load", "read", "require_same_problem", "write"]
