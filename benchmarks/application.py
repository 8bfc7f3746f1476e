"""The paper's application section, computed: the tables of ``docs/application.md``, which a test compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from benchmarks.runner import Case, Row, benchmark
from surefoot import paper


@cache
def study() -> paper.Application:
    """All readings of all networks."""
    return paper.application()


def verdict(result: paper.Result) -> str:
    """Whether a number is an upper bound, or which errata say that it is not."""
    if not result.flags:
        return "yes"
    return "no: " + ", ".join(flag.partition(":")[0] for flag in result.flags)


@benchmark("application-claims", "application", "the paper | computed | verdict")
def claims() -> Iterator[Case]:
    """What the paper claims, and what comes out."""
    yield "all", _claims


def _claims() -> list[Row]:
    vgg = study().vgg
    rows: list[Row] = [
        ["ℓ of VGG on ‖u_t‖ ≤ 1, ‖x‖ = 1, batch 128 (no number is printed)", f"{vgg.lipschitz.format(4)}",
         f"as printed; an upper bound? {verdict(vgg)}"],
        ["ℓ of VGG and of smooth VGG differ by at most 10⁻⁴, relatively",
         f"{study().relative_difference:g} if ‖a(0)‖ is left out",
         f"only so: Algorithm 4 as printed gives a factor of **{study().factor:.1f}** (ERRATA 4)"],
    ]  # fmt: skip
    for epsilon, sign in ((1e-2, "≤"), (1e2, "≥")):
        entries = [entry for entry in study().batch_norm if entry.epsilon == epsilon]
        main = [entry for entry in entries if entry.reading.name == "every entry, main text"]
        for index, (symbol, name) in enumerate((("ℓ", "lipschitz"), ("L", "smoothness"))):
            pairs = [(getattr(entry.smooth, name), getattr(entry.normalised, name)) for entry in main]
            shown = "; ".join(f"{plain.format(2)} {sign} {normalised.format(2)}" for plain, normalised in pairs)
            true = sum(entry.increases[index] is (sign == "≤") for entry in entries)
            claim = f"ε = {epsilon:g}: {symbol} of smooth VGG {sign} {symbol} with batch-normalisation"
            rows.append([claim, f"{shown} (‖a(0)‖ left out; kept)", f"holds in {true} of {len(entries)} readings"])
    return rows


@benchmark("application-networks", "application", "ℓ, L (upper bounds?) | ‖a(0)‖ left out | "
           "Algorithm 4 as printed | ERRATA 2, 5 and 7 applied")  # fmt: skip
def networks() -> Iterator[Case]:
    """The four networks in three readings."""
    builds: dict[str, Callable[..., list[paper.Layer]]] = {
        "VGG": paper.vgg,
        "smooth VGG": paper.smooth_vgg,
        "batch-normalised, ε = 10⁻²": partial(paper.batch_norm_vgg, 1e-2),
        "batch-normalised, ε = 10²": partial(paper.batch_norm_vgg, 1e2),
    }
    for name, build in builds.items():
        yield name, partial(_network, name, build)


def _network(name: str, build: Callable[..., list[paper.Layer]]) -> Row:
    printed, corrected = (
        build(reading=each)
        for each in (paper.Reading(), paper.Reading(linear_part="proved", normalised_over="images"))
    )
    runs = (
        paper.algorithm_4(printed, 1.0, 1.0, keep_value_at_zero=False).result,
        paper.algorithm_4(printed, 1.0, 1.0).result,
        paper.algorithm_4(corrected, 1.0, 1.0, corrected=True).result,
    )
    cells = (f"{run.lipschitz.format(4)}, {run.smoothness.format(4)} ({verdict(run)})" for run in runs)
    return [name, *cells]


@benchmark("application-readings", "application", "reading | ℓ of VGG | upper bound?")
def readings() -> Iterator[Case]:
    """ℓ of VGG in every reading that matters."""
    yield "all", lambda: [[name, run.lipschitz.format(4), verdict(run)] for name, run in study().readings]


@benchmark("application-normalisations", "application", "ε | normalised over; L from | ℓ, L, ‖a(0)‖ left out | "
           "ℓ, L, ‖a(0)‖ kept | layers at the bound δm")  # fmt: skip
def normalisations() -> Iterator[Case]:
    """The comparison with batch-normalisation in every reading of its constants."""
    yield "all", _normalisations


def _normalisations() -> list[Row]:
    found = {(entry.epsilon, entry.reading, entry.keep_value_at_zero): entry for entry in study().batch_norm}
    rows: list[Row] = []
    for epsilon, reading in dict.fromkeys((entry.epsilon, entry.reading) for entry in study().batch_norm):
        pair = [found[epsilon, reading, keep] for keep in (False, True)]
        cells = [f"{entry.normalised.lipschitz}, {entry.normalised.smoothness}" for entry in pair]
        rows.append([f"{epsilon:g}", reading.name, *cells, "; ".join(str(each.active_bounds) for each in pair)])
    return rows
