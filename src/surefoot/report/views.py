"""From a document to what the page shows: a verdict, figures, sentences, charts, tables.

A view has the same keys whatever it is about: ``name``, ``good``, ``word``, ``sentence``, ``facts`` (pairs),
``figures`` (value, name), ``notes``, ``charts``, ``tables`` (title, head, rows), ``caveats``, ``file``, ``data``.
A cell of a table is a text; in the column of shares it is a number between 0 and 1, drawn as a bar.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.magnitude import Magnitude
from surefoot.numbers import down, quotient, readable, short

_NUMBER = re.compile(r"\b\d(?:\.\d+)?e[+-]\d+\b")
_MOST_STEPS = 120
_WIDTH, _HEIGHT = 720.0, 220.0
CERTIFICATE_CAVEATS = (
    "It speaks of the function that the weights define in real arithmetic, without what floating point adds.",
    "It holds on the domain that it names, and for this batch or any within the norm that it names.",
    "It is an upper bound: the true constants may be much smaller, and larger steps may work.",
    "It says nothing about generalisation.",
)
CONVERGENCE_CAVEATS = (
    "It speaks of the method in real arithmetic, from the weights as they are stored, for these data.",
    "Rates are upper bounds: the method may be faster, and it may converge where that is not proved.",
    "It says nothing about generalisation.",
)
RUN_CAVEATS = (
    "A proved decrease is one of the objective of the data that the step saw.",
    "It says nothing about generalisation.",
)


def view(document: Mapping[str, Any], name: str, anchor: str) -> dict[str, Any]:
    """What a page shows of a document."""
    kind = document["schema"].split("/")[1]
    parts = {"certificate": _certificate, "convergence": _convergence, "run": _run}[kind](document)
    text = json.dumps(document, ensure_ascii=False, default=str)
    shown = name or {"certificate": "Certificate", "convergence": "Convergence", "run": "Run"}[kind]
    return {
        "name": shown,
        "anchor": anchor,
        "document": document,
        "data": base64.b64encode(text.encode()).decode(),
        "file": f"{re.sub('[^A-Za-z0-9_-]', '-', shown)[:60]}.json",
        **parts,
    }


def _certificate(d: Mapping[str, Any]) -> dict[str, Any]:
    word, _, rest = d["verdict"].partition(": ")
    point = "parameters" if d["wrt"] == "params" else "the input"
    kind = "" if d["constants"] == "certified" else "Constants as the paper prints them, "
    figures = [(d["text"][key], name) for key, name in (
        ("bound", "bound m"), ("lipschitz", "Lipschitz ℓ"), ("smoothness", "smoothness L"))]  # fmt: skip
    if d["scalar"] and not d["flags"] and _value(d["step_size"]):
        figures.append((down(_value(d["step_size"])), "step size"))
    facts = [("Domain", f"{kind}with respect to {point}: {d['domain']}"), ("Verdict", _sentence(rest))]
    if d["regularizer"]:
        facts.append(("Objective", f"with {d['regularizer']} added"))
    if d["weights_inside"] is False:
        facts.append(
            ("Centre", f"the present {point} lie outside of the domain".replace("input lie", "input lies"))
        )
    notes = [*(f"not a bound: {flag}" for flag in d["flags"]), *d["remarks"], *d["reasons"], *d["limits"]]
    finite = d["log2"]["smoothness"] != "∞"
    rows = [
        [row["module"] or "(model)", row["operation"], "×".join(map(str, row["shape"])) or "scalar",
         *(row["text"][key] for key in ("bound", "lipschitz", "smoothness")),
         row["share"] if finite else ("∞" if row["share"] else "")]
        for row in d["rows"]
    ]  # fmt: skip
    steps, gradients = d["block_step_sizes"], d["block_gradients"] or {}
    blocks = [
        [path or "(model)", short(_size(log2)),
         f"{_value(gradients[path]):.3e}" if path in gradients else "–",
         down(_value(steps[path])) if path in steps else "–"]
        for path, log2 in zip(d["blocks"], d["log2"]["blocks"], strict=True)
    ]  # fmt: skip
    return {
        "good": word == "useful",
        "word": _sentence(word),
        "sentence": d["headline"],
        "facts": facts,
        "figures": figures,
        "notes": [*notes, *(d["bracket"] or ())],
        "charts": [],
        "tables": [
            ("Layers", ("module", "operation", "output", "m", "ℓ", "L", "share of L"), rows),
            ("Blocks", ("block", "ℓ", "gradient", "step size"), blocks),
        ],
        "caveats": CERTIFICATE_CAVEATS,
    }


def _convergence(d: Mapping[str, Any]) -> dict[str, Any]:
    bounds = {"radius": "radius: no step leaves this ball", "distance": "distance to the limit, at most",
              "rate": "rate, at most", "loss": "objective at the weights, at most"}  # fmt: skip
    figures = [(short(Magnitude.of(_value(d[key]))), name) for key, name in bounds.items() if d[key] is not None]
    exact = {"step_size": "step size", "momentum": "momentum"}
    figures += [(down(_value(d[key])), name) for key, name in exact.items() if d.get(key) is not None]
    rows = [
        [h["symbol"], h["meaning"], h["bound"], h["needs"],
         "" if h["holds"] is None else "yes" if h["holds"] else "no"]
        for h in d["hypotheses"]
    ]  # fmt: skip
    blocks = [[path, down(_value(step))] for path, step in (d.get("block_step_sizes") or {}).items()]
    return {
        "good": d["proved"],
        "word": "Proved" if d["proved"] else "Not proved",
        "sentence": d["verdict"],
        "facts": [("Method", d["method"].replace("_", " ")), ("Theorem", d["theorem"])],
        "figures": figures
        if d["proved"]
        else [(short(Magnitude.of(_value(d["missing"]))), "factor that is missing")],
        "notes": [*d["obstacles"], *d["advice"]],
        "charts": [],
        "tables": [
            ("Hypotheses", ("symbol", "what it is", "verified", "needed", "holds"), rows),
            ("Step sizes by block", ("block", "step size"), blocks),
        ],
        "caveats": CONVERGENCE_CAVEATS,
    }


def _run(d: Mapping[str, Any]) -> dict[str, Any]:
    steps, proved = d["steps"], d["proved_steps"]
    figures = [
        (f"{steps[-1]['loss']:.3e}", f"objective before the last step; {steps[0]['loss']:.3e} at first"),
        (f"{proved} of {len(steps)}", "steps proved"),
        (f"{d['smallest_gradient']:.3e}", "smallest gradient"),
    ]
    if d["proved_gradient"] is not None:
        figures.append((short(Magnitude.of(d["proved_gradient"])), "bound on it, from the proved decreases alone"))
    chosen = sorted({round(k * (len(steps) - 1) / (_MOST_STEPS - 1)) for k in range(_MOST_STEPS)})
    keys = ("loss", "gradient_norm", "step_size", "proved_decrease", "decrease")
    rows = []
    for k in chosen:
        numbers = [steps[k][key] for key in keys]
        rows.append([str(k), *("–" if number is None else f"{number:.3e}" for number in numbers)])
    return {
        "good": proved == len(steps),
        "word": f"{'Every' if proved == len(steps) else 'Not every' if proved else 'No'} step is proved",
        "sentence": d["guarantee"],
        "facts": [("Optimizer", d["optimizer"])],
        "figures": figures,
        "notes": [],
        "charts": [
            chart("The objective before each step", {"objective": [step["loss"] for step in steps]}),
            chart("Decrease by each step", {
                "proved": [step["proved_decrease"] for step in steps],
                "computed": [step["decrease"] for step in steps]}),
        ],
        "tables": [("Steps", ("step", "loss", "gradient", "step size", "proved", "decrease"), rows)],
        "caveats": RUN_CAVEATS,
    }  # fmt: skip


def chart(title: str, curves: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Curves by step on a logarithmic axis, as points of SVG polylines; what is not positive leaves a gap."""
    logs = {
        name: [None if value is None or not 0 < value < math.inf else math.log10(value) for value in values]
        for name, values in curves.items()
    }
    finite = [log for values in logs.values() for log in values if log is not None] or [0.0]
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    high = max(high, low + 1)
    count = max(map(len, logs.values()))

    def place(step: int, log: float) -> str:
        return f"{_WIDTH * step / max(count - 1, 1):.1f},{_HEIGHT * (high - log) / (high - low):.1f}"

    every = math.ceil((high - low) / 6)
    return {
        "title": title,
        "width": _WIDTH,
        "height": _HEIGHT,
        "lines": [
            (name, " ".join(place(k, log) for k, log in enumerate(values) if log is not None))
            for name, values in logs.items()
        ],
        "ticks": [
            (_HEIGHT * (high - k) / (high - low), in_digits(f"1e{k:+03d}")) for k in range(low, high + 1, every)
        ],
        "last": count - 1,
    }


def comparison(views: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[list[Any]]] | None:
    """Head and rows of a table of several certificates, with ratios to the first finite constant."""
    documents = [each["document"] for each in views]
    if len(views) < 2 or any("/certificate/" not in d["schema"] for d in documents):
        return None
    rows = []
    for each in views:
        d, row = each["document"], [each["word"]]
        for key in ("lipschitz", "smoothness"):
            sizes = [_size(e["log2"][key]) for e in documents]
            first = next((size for size in sizes if size.is_finite and not size.is_zero), sizes[0])
            row += [d["text"][key], quotient(_size(d["log2"][key]), first) or "–"]
        rows.append([each["name"], *row, d["domain"]])
    return ("model", "verdict", "ℓ", "ratio", "L", "ratio", "domain"), rows


def _size(log2: float | str) -> Magnitude:
    return Magnitude(_value(log2))


def _value(number: Any) -> float:
    """A number of a document, where infinity is a text."""
    return {"∞": math.inf, "-∞": -math.inf}[number] if isinstance(number, str) else float(number)


def in_digits(text: str) -> str:
    """A text with its numbers as people write them."""
    return _NUMBER.sub(lambda match: readable(match[0]).removeprefix("1×"), text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
