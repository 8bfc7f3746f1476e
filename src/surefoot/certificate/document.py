"""A certificate as a document: plain values that JSON can hold, and back.

The schema is ``surefoot/certificate/2``. Every magnitude is written three times: as a number, rounded up, or
``null`` where it is beyond the range of doubles; as decimal text, under the same name in an object ``text`` beside
it; and exactly, as its binary logarithm, in an object ``log2``. Other infinite numbers are written as the text
``"∞"`` or ``"-∞"`` (the logarithm of zero). What a certificate computes lazily (the table, step sizes by block,
the constant of Gauss-Newton steps) is written out, so a certificate that is read back says the same without its
model.

The field ``digest`` is the SHA-256 of everything else, with keys in order and every number as a double. It reveals
that a document was changed by accident or by hand; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot import __version__
from surefoot.attained import Estimate, LowerBound
from surefoot.certificate.advice import headline, limits, verdict
from surefoot.certificate.rows import Row
from surefoot.errors import SurefootError
from surefoot.guarantees import GuaranteeError
from surefoot.magnitude import Magnitude
from surefoot.report.document import plain

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate

SCHEMA = "surefoot/certificate/2"
_CONSTANTS = ("bound", "lipschitz", "smoothness")
_AS_THEY_ARE = (
    "version", "domain", "wrt", "constants", "scalar", "nonnegative", "weights_inside", "regularizer", "effort",
    "gradients",
)  # fmt: skip
_TEXTS = ("reasons", "flags", "remarks")


class CertificateError(SurefootError, ValueError):
    """A document is not a certificate, or an estimate is about another problem; the message says why."""


def write(certificate: Certificate) -> dict[str, Any]:
    """Everything a certificate says, as plain values."""
    composite = None if certificate.make_damping is None else certificate.make_damping()
    estimate = certificate.estimate
    constants = {name: getattr(certificate, name) for name in _CONSTANTS}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **{name: getattr(certificate, name) for name in _AS_THEY_ARE},
        **{name: list(getattr(certificate, name)) for name in _TEXTS},
        **{name: _size(value) for name, value in constants.items()},
        "text": {name: str(value) for name, value in constants.items()},
        "certified": not certificate.flags and certificate.smoothness.is_finite,
        "headline": headline(certificate),
        "verdict": verdict(certificate),
        "limits": limits(certificate),
        "inverse_smoothness": certificate.inverse_smoothness,
        "step_size": certificate.step_size,
        "block_step_sizes": _if_guaranteed(lambda: certificate.block_step_sizes) or {},
        "safe_step": certificate.segment_step,
        "gradient_step": certificate.gradient_step,
        "radius": certificate.radius,
        "curvature": None if certificate.curvature is None else float(certificate.curvature),
        "one_step": _size(certificate.one_step),
        "damping": _if_guaranteed(lambda: certificate.damping),
        "composite": composite and {"log2": composite[0].log2, "is_quadratic": composite[1]},
        "blocks": {path: _size(value) for path, value in certificate.block_lipschitz.items()},
        "block_gradients": certificate.block_gradients,
        "log2": {
            **{name: value.log2 for name, value in constants.items()},
            "blocks": [value.log2 for value in certificate.block_lipschitz.values()],
            "one_step": None if certificate.one_step is None else certificate.one_step.log2,
            "block_smoothness": np.asarray(certificate.block_smoothness.log2).tolist(),
        },
        "estimate": None,
        "bracket": estimate and certificate.bracket(estimate).splitlines(),
        "rows": [_written_row(row) for row in certificate.rows],
    }
    if estimate is not None:
        values = {name: float(getattr(estimate, name)) for name in _CONSTANTS}
        document["estimate"] = values | {"domain": estimate.domain, "wrt": estimate.wrt}
    document = plain(document)
    return document | {"digest": _digest(document)}


def dump(certificate: Certificate, indent: int | None) -> str:
    """The document as text."""
    return json.dumps(write(certificate), indent=indent, ensure_ascii=False, allow_nan=False)


def parse(text: str) -> Any:
    """The document that a text holds.

    Raises:
        CertificateError: if the text is not JSON.
    """

    def refuse(name: str) -> Any:
        raise CertificateError(f"the document holds {name}, which no certificate writes and JSON does not have")

    try:
        return json.loads(text, parse_constant=refuse)
    except (json.JSONDecodeError, TypeError, RecursionError) as error:
        raise CertificateError(f"this is not a JSON document: {error}. Expected what to_json wrote") from error


def read(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the certificate that a document describes.

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
        if _digest(content) == document.get("digest"):
            return _fields(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CertificateError(f"the document is not a whole certificate: {error!r}. Certify again") from error
    raise CertificateError(
        "the document was changed since it was written, so it proves nothing: its digest is not that of its "
        "content. Use the original, or certify again"
    )


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a document whose digest is right."""
    exact, composite, estimate = content["log2"], content["composite"], content["estimate"]
    rows = tuple(_read_row(row) for row in content["rows"])
    names = list(content["blocks"])
    matrix = np.array([[_number(entry) for entry in row] for row in exact["block_smoothness"]], dtype=np.float64)
    damping = composite and (_magnitude(composite["log2"]), bool(composite["is_quadratic"]))
    if estimate is not None:
        bounds = {name: LowerBound(float(estimate[name])) for name in _CONSTANTS}
        estimate = Estimate(**bounds, domain=estimate["domain"], wrt=estimate["wrt"])
    return {
        **{name: content[name] for name in _AS_THEY_ARE},
        **{name: tuple(content[name]) for name in _TEXTS},
        **{name: _magnitude(exact[name]) for name in _CONSTANTS},
        **{name: _number(content.get(name)) for name in ("block_gradients", "gradient_step", "radius")},
        "segment_step": _number(content["safe_step"]),
        "block_lipschitz": dict(zip(names, map(_magnitude, exact["blocks"]), strict=True)),
        "block_smoothness": Magnitude(matrix.reshape(len(names), len(names))),
        "curvature": None if content["curvature"] is None else LowerBound(float(content["curvature"])),
        "one_step": None if exact.get("one_step") is None else _magnitude(exact["one_step"]),
        "estimate": estimate,
        "make_rows": lambda: rows,
        "make_damping": None if damping is None else lambda: damping,
        "written_block_steps": _number(content["block_step_sizes"]) or None,
    }


def _written_row(row: Row) -> dict[str, Any]:
    sizes = {name: getattr(row, name) for name in (*_CONSTANTS, "slope", "curvature")}
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    values |= {name: _size(size) for name, size in sizes.items()}
    values["text"] = {name: None if size is None else str(size) for name, size in sizes.items()}
    values["log2"] = {name: None if size is None else size.log2 for name, size in sizes.items()}
    return values


def _read_row(content: Mapping[str, Any]) -> Row:
    sizes: dict[str, Any] = {name: None if x is None else _magnitude(x) for name, x in content["log2"].items()}
    shape = tuple(map(int, content["shape"]))
    return Row(content["module"], content["operation"], shape, **sizes, share=float(content["share"]))


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


def _if_guaranteed(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except GuaranteeError:
        return None


def _digest(content: Mapping[str, Any]) -> str:
    # With doubles alone, as programs that rewrite a document write whole numbers differently.
    text = json.dumps(plain(content, doubles=True), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _number(value: Any) -> Any:
    """The number that was written, or a mapping of such numbers, or ``None``."""
    if isinstance(value, Mapping):
        return {path: _number(entry) for path, entry in value.items()}
    if isinstance(value, str):
        return {"∞": math.inf, "-∞": -math.inf}[value]
    return None if value is None else float(value)


def _size(magnitude: Magnitude | None) -> float | None:
    number = math.inf if magnitude is None else float(magnitude)
    return number if math.isfinite(number) else None


def _magnitude(log2: float | str) -> Magnitude:
    return Magnitude(float(_number(log2)))


CITATION = f"""@article{{roulet2020elementary,
  title   = {{An Elementary Approach to Convergence Guarantees of Optimization Algorithms for Deep Networks}},
  author  = {{Roulet, Vincent and Harchaoui, Zaid}},
  journal = {{arXiv preprint arXiv:2002.09051}},
  year    = {{2020}},
  url     = {{https://arxiv.org/abs/2002.09051}}
}}

@software{{surefoot,
  title   = {{surefoot}},
  author  = {{{{The surefoot developers}}}},
  version = {{{__version__}}},
  note    = {{Smoothness certificates and exact optimization oracles for PyTorch models}}
}}"""
