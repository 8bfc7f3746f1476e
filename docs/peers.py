"""Write ``peers.md``: surefoot next to other packages, on the same work, in one run, as ratios.

``make peers`` installs the packages into ``build/peers`` and ``build/autobound`` and runs
``python -m docs.peers``, which measures what is not yet in ``build/beside`` and rewrites the page.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import cells, input_lipschitz, peers
from benchmarks.baselines import ADAM, CERTIFIED, PACKAGES, PEERS, TUNED, missing, train
from benchmarks.growth import GROWTH, exponent
from benchmarks.networks import problems
from benchmarks.safe_step import curvature_along, longest_safe_step
from benchmarks.safe_step import network as deep_network
from benchmarks.training import NOTHING
from docs.training import machine, number, table
from torch import nn

import surefoot as sf
from surefoot.calculus.segment.along import Along

ROOT = Path(__file__).resolve().parent.parent
PAGE, KEPT = ROOT / "docs" / "peers.md", ROOT / "build" / "beside"
AUTOBOUND = ROOT / "build" / "autobound" / "bin" / "python"
BUDGET = 150  # gradients of work in the comparison of training methods
LEVEL = 1.05  # ratios up to this are level
TRAINED = ("digits, 3 layers, tanh", "digits, 2 layers, ReLU")
LIPSCHITZ = ("random 0", "random 1", "digits 0", "digits 2")
HIDDEN = (1, 2, 4, 8)
LBFGS = "torch LBFGS"

TEXT = """\
# Beside its peers

surefoot next to packages that do a part of what it does: the same work, on one thread, in processor
time, each row's methods one after the other. A ratio is that of the other package to surefoot, so that above 1
surefoot is ahead; where it is behind, the row says so. Written by `make peers`, which installs the packages into
a folder of their own and leaves the installed PyTorch alone. {absent}

## Second-order steps

A Gauss-Newton step of the same model on the same batch with the same damping κ, to a relative residual of 1e-6
where a package lets one choose. Residuals are judged in double precision. curvlinops and BackPACK have products,
to which plain conjugate gradients are added; torch-levenberg-marquardt and pytorch-minimize solve models of their
own to an accuracy of their own: less work for less. A convolutional network and other residuals are on the page
of [benchmarks](benchmarks.md).

{steps}

## Lipschitz constants in the input

Fully connected networks with rectifiers, all inputs. surefoot's numbers are proved, round-off included; the others
are what floating-point arithmetic and a solver return. LipSDP-Neuron is written for cvxpy and solved by Clarabel.

{lipschitz}

## Training

The loss after the work of {budget} gradients, all data at every step, double precision, one seed. surefoot is
`CertifiedDescent` with its defaults, whose every step is proved; Adam has the best of {rates} learning rates,
chosen afterwards. Losses below {nothing:g} count as equal. [More networks and budgets](training.md).

{training}

## Taylor bounds

The longest step along the negative gradient that a bound of the objective on the whole segment proves safe, as a
fraction of the step of the true curvature along it, and the time of one bound. Networks 784-100^H-10, soft-plus,
square loss, 256 samples, double precision. autobound is compiled by JAX; its bound is of degree 2, and it does not
count round-off. surefoot's bound has 5 Taylor coefficients, counts round-off and is not compiled.

{taylor}

## Growth

Exponents p of processor time ~ size^p, fitted to {sizes}. A gradient by PyTorch stands for what cannot be avoided.
At these sizes fixed costs count: exponents far below those of a gradient are mostly overhead.
With processes that share the same data, −1 would be perfect: the time is that of the busiest one, with messages.

{growth}

{machine}
"""


def verdict(ratio: float) -> str:
    """Whether surefoot is ahead, from a ratio of costs of the other one to it."""
    if not math.isfinite(ratio):
        return "–" if math.isnan(ratio) else "ahead"
    return "ahead" if ratio > LEVEL else "**behind**" if ratio < 1 / LEVEL else "level"


def steps() -> list[list[str]]:
    """Rows: what, by whom, gradients, residual, ratio, verdict."""

    def compute() -> dict[str, Any]:
        found = [measure() for measure in peers.run(tolerances=(1e-6,), first=1)]
        return {"rows": [[m.subject, m.ratio, m.residual, m.error] for m in found]}

    rows, best = [], {}
    for subject, ratio, residual, _ in kept("steps", compute)["rows"]:
        work, package, what = subject.split(": ")
        kind = (work, "product" in what)
        if package == "surefoot":
            best[kind] = min(best.get(kind, math.inf), ratio)
        there = ratio / best[kind]
        shown = "" if residual is None else f"{residual:.0e}"
        ends = ["", ""] if package == "surefoot" else [f"{there:.2f}", verdict(there)]
        rows.append([work, package, what, f"{ratio:.1f}", shown, *ends])
    return rows


def lipschitz() -> list[list[str]]:
    """Rows: network, then constant and seconds of each method, and ratios."""

    def compute() -> dict[str, Any]:
        fast = _import("eclipse_nn.eclipsE_fast")
        input_lipschitz.certified(input_lipschitz.random_network((2, 2, 2), 0))
        input_lipschitz.lipsdp([torch.eye(2).double()] * 2)
        found = {}
        for title, model in input_lipschitz.networks(None):
            if title not in LIPSCHITZ:
                continue
            weights = [layer.weight.detach() for layer in model if isinstance(layer, nn.Linear)]
            slopes = len(weights) - 1
            ends = ([0.0] * slopes, [1.0] * slopes)
            found[f"{title}, {'-'.join(map(str, (weights[0].shape[1], *map(len, weights))))}"] = {
                "surefoot": input_lipschitz.timed(lambda m=model: input_lipschitz.certified(m)),
                "ECLipsE-Fast": input_lipschitz.timed(lambda w=weights, e=ends: fast.ECLipsE_Fast(w, *e))
                if fast
                else (math.nan, math.nan),
                "ECLipsE": input_lipschitz.timed(lambda w=weights: input_lipschitz.eclipse(w))
                if fast
                else (math.nan, math.nan),
                "LipSDP, cvxpy": input_lipschitz.timed(lambda w=weights: input_lipschitz.lipsdp(w)),
            }
        return found

    rows = []
    for network, methods in kept("lipschitz", compute).items():
        mine, spent = methods["surefoot"]
        for name, (value, seconds) in methods.items():
            ends = ["", "", "", ""]
            if name != "surefoot":
                constant, cost = value / mine, seconds / spent
                ends = [f"{constant:.4f}", _close(constant), f"{cost:.2g}", verdict(cost)]
            rows.append([network, name, f"{value:.5g}", ends[0], ends[1], f"{seconds:.2f} s", ends[2], ends[3]])
    return rows


def _close(ratio: float) -> str:
    """A verdict about constants, which differ in the third digit."""
    if not math.isfinite(ratio):
        return "not run" if math.isnan(ratio) else "refused"
    return "ahead" if ratio > 1.001 else "**behind**" if ratio < 0.999 else "level"


def training() -> list[list[str]]:
    """Rows: network, method, loss, ratio, verdict."""

    def loss(problem: Any, method: str, setting: float | None) -> dict[str, Any]:
        return {"loss": train(problem, method, setting, 0, BUDGET).loss_at(BUDGET)}

    rows, absent = [], missing()
    for problem in problems():
        if problem.name not in TRAINED:
            continue
        found: dict[str, float] = {}
        for method in (CERTIFIED, LBFGS, ADAM, *PACKAGES):
            if method not in absent:
                found[method] = min(
                    kept(f"{problem.name} {method} {s}", lambda p=problem, m=method, s=s: loss(p, m, s))["loss"]
                    for s in (TUNED[ADAM] if method == ADAM else [None])
                )
        for method, value in found.items():
            ratio = max(value, NOTHING) / max(found[CERTIFIED], NOTHING)
            ends = ["", ""] if method == CERTIFIED else [f"{ratio:.3g}", verdict(ratio)]
            rows.append([problem.name, method, number(value), *ends])
    return rows


def taylor() -> list[list[str]]:
    """Rows: hidden layers, fractions and seconds of both, ratios."""
    rows = []
    for hidden in HIDDEN:
        found = kept(f"taylor {hidden}", lambda h=hidden: _safe(h))
        mine, other = found["surefoot"], found["autobound"]
        longer, cost = mine[0] / other[0], other[1] / mine[1]
        shown = [f"{mine[0]:.3f}", f"{other[0]:.3f}", f"{longer:.3f}", _close(longer)]
        rows.append([str(hidden), *shown, f"{mine[1]:.3f} s", f"{other[1]:.3f} s", f"{cost:.2g}", verdict(cost)])
    return rows


def _safe(hidden: int) -> dict[str, Any]:
    """Fraction of the ideal step, and seconds of one bound, by surefoot and by autobound."""
    torch.manual_seed(0)
    model = deep_network(hidden)
    x, y = torch.randn(256, 784).double() / 28, torch.randn(256, 10).double()
    loss = sf.Square(y)
    direction, curvature = curvature_along(model, x, loss)
    square = sum(float((d * d).sum()) for d in direction.values())
    ideal, along = square / curvature, Along(model, x, loss)
    step, times = longest_safe_step(along, direction, 5, ideal), []
    for _ in range(3):
        start = time.process_time()
        along.majorant(direction, step, 5)
        times.append(time.process_time() - start)
    layers = [k for k, layer in enumerate(model) if isinstance(layer, nn.Linear)]
    held: dict[str, Any] = {"x": x, "y": y, "square": square, "guess": ideal, "layers": len(layers)}
    for k, at in enumerate(layers):
        weight, bias = f"{at}.weight", f"{at}.bias"
        held |= {f"w{k}": model.state_dict()[weight], f"b{k}": model.state_dict()[bias]}
        held |= {f"dw{k}": direction[weight], f"db{k}": direction[bias]}
    other = {"step": math.nan, "seconds": math.nan}
    if AUTOBOUND.exists():
        with tempfile.TemporaryDirectory() as folder:
            np.savez(f"{folder}/problem.npz", **{name: np.asarray(value) for name, value in held.items()})
            run = subprocess.run(
                [str(AUTOBOUND), str(ROOT / "benchmarks" / "autobound_steps.py"), f"{folder}/problem.npz"],
                capture_output=True, text=True, check=True, env={"XLA_FLAGS": _ONE_THREAD, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        other = json.loads(run.stdout)
    return {
        "surefoot": (step / ideal, sorted(times)[1]),
        "autobound": (other["step"] / ideal, other["seconds"]),
    }


_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def growth() -> list[list[str]]:
    """Rows: what grows, and the exponents of each question."""
    found, names = {}, dict[str, None]()
    for what, (sizes, measure) in GROWTH.items():
        seconds = [kept(f"growth {what} {size}", lambda m=measure, s=size: m(s)) for size in sizes]
        found[what] = {name: exponent(sizes, [one[name] for one in seconds]) for name in seconds[0]}
        names |= dict.fromkeys(found[what])
    return [["what grows", *names]] + [
        [what, *(f"{each[name]:.2f}" if name in each else "–" for name in names)] for what, each in found.items()
    ]


def kept(name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """From its file, or computed."""
    print(name, flush=True)
    return cells.cell(name, compute, KEPT)


def _import(name: str) -> Any:
    """A module of another package, or ``None``."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        return None


def absent() -> str:
    """What took part, and what could not be installed."""
    wanted = "curvlinops-for-pytorch backpack-for-pytorch torch-levenberg-marquardt pytorch-minimize eclipse-nn "
    wanted += "prodigyopt schedulefree dadaptation"
    held = {d.metadata["Name"].lower(): d.version for d in distributions(path=[str(PEERS), *sys.path])}
    there = [f"{name} {held[name]}" for name in wanted.split() if name in held]
    left = [name for name in wanted.split() if name not in held]
    if AUTOBOUND.exists():
        there.append("autobound 0.1.4 on jax 0.4.18 (it cannot be imported with jax 0.10)")
    else:
        left.append("autobound")
    text = f"Installed: {', '.join(there)}."
    return text + (f" Could not be installed: {', '.join(left)}." if left else "")


def _sizes() -> Iterator[str]:
    for what, (sizes, _) in GROWTH.items():
        yield f"{what} {', '.join(map(str, sizes))}"


def render(parts: dict[str, str]) -> str:
    """The page."""
    return TEXT.format(
        absent=absent(),
        budget=BUDGET,
        nothing=NOTHING,
        rates=len(TUNED[ADAM]),
        sizes="; ".join(_sizes()),
        machine=machine(),
        **parts,
    )


def main() -> None:
    """Measure what is missing, and write the page; ``--without-steps`` leaves that table to the benchmarks."""
    torch.set_num_threads(1)
    left_out = sys.argv[1:] == ["--without-steps"]
    head, *exponents = growth()
    shown: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {
        "taylor": (
            ("H", "surefoot", "autobound", "longer by", "", "surefoot, one bound", "autobound", "ratio", ""),
            taylor(),
        ),
        "growth": (head, exponents),
        "training": (("network", "method", "loss", "ratio", ""), training()),
        "lipschitz": (("network", "method", "constant", "ratio", "", "time", "ratio", ""), lipschitz()),
        "steps": (("work", "package", "what", "gradients", "residual", "ratio", ""), [] if left_out else steps()),
    }
    parts = {name: table(*each) for name, each in shown.items()}
    if left_out:
        parts["steps"] = "Not measured in this run: the numbers of an earlier one are on that page."
    PAGE.write_text(render(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
