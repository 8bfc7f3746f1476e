"""A certificate in a notebook: the beginning of its report, without a script; every name is escaped.

Colours are those of the notebook, light or dark, except for one stroke and the bars of shares.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from surefoot.certificate.advice import USEFUL, headline, verdict, worth
from surefoot.certificate.numbers import lower, per_cent, shape_text, sort_key, upper
from surefoot.certificate.rows import excerpt
from surefoot.certificate.text import MOST_LINES, OUTSIDE, clipped, footer, note
from surefoot.domains import VARIABLES
from surefoot.magnitude import Magnitude

if TYPE_CHECKING:
    from surefoot.certificate.record import Certificate


def html(certificate: Certificate) -> str:
    """A card with the headline, the numbers and their domain; the table, which scrolls; what limits them."""
    part, sentence = excerpt(certificate.rows, None, MOST_LINES), verdict(certificate)
    kind = "" if certificate.constants == "certified" else "Constants as the paper prints them. "
    where = f"{kind}With respect to {VARIABLES[certificate.wrt]}: {certificate.domain}"
    about = [where, sentence[:1].upper() + sentence[1:]]
    about += [OUTSIDE] if certificate.weights_inside is False else []
    about += [f"the objective plus {certificate.regularizer}"] if certificate.regularizer else []
    figures = {"bound m": upper(certificate.bound), "Lipschitz ℓ": upper(certificate.lipschitz)}
    figures["smoothness L"] = upper(certificate.smoothness)
    if certificate.scalar and certificate.step_size and not certificate.flags:
        figures["step size"] = lower(certificate.step_size)
    return rendered(
        "certificate.html.j2",
        useful=worth(certificate) == USEFUL,
        headline=headline(certificate),
        about=about,
        figures=figures,
        part=part,
        infinite=not certificate.smoothness.is_finite,
        notes=note(certificate, part),
        rest=footer(certificate),
    )


def rendered(template: str, **variables: Any) -> str:
    """A template of the folder ``templates`` with its variables filled in."""
    return str(environment("surefoot.certificate").get_template(template).render(variables))


@cache
def environment(package: str) -> Any:
    """The templates of a package, with filters that write numbers; every text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    templates.filters |= {
        "above": lambda size: upper(Magnitude.of(size)), "below": lower, "clipped": clipped, "per_cent": per_cent,
        "product": math.prod, "shape_text": shape_text, "sort_key": sort_key,
    }  # fmt: skip
    return templates
