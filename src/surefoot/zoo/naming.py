"""What the zoo says when a name is not known: the closest one, and the whole list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from surefoot.errors import SurefootError


class ZooError(SurefootError, ValueError):
    """A model of the zoo was asked for in a way it cannot be built, or fed an input it cannot take."""


class UnknownModel(ZooError, LookupError):
    """No model of the zoo has this name."""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """The sentence for a name that is not in a list: what was asked, the closest match, all that exists.

    Args:
        kind: what is named, for example ``"model"``.
        name: the name that was asked for.
        known: the names that exist.

    >>> unknown("activation", "softpuls", ["relu", "softplus"])
    "there is no activation 'softpuls': did you mean 'softplus'? Known: relu, softplus."
    >>> unknown("activation", "??", ["relu", "softplus"])
    "there is no activation '??'. Known: relu, softplus."
    """
    listed = list(known)
    close = difflib.get_close_matches(str(name).lower(), listed, n=1, cutoff=0.5)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return f"there is no {kind} {name!r}{hint} Known: {', '.join(listed) or 'none'}."
