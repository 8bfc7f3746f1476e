"""Training without a learning rate: certified descent next to tuned and untuned methods, at equal work.

All data at every step, double precision, PyTorch's initialisation. Work is processor time over that of one
gradient of the same run. ``python -m benchmarks.training`` runs all that is not yet in ``build/training`` and
prints the tables; cut it off and start it again, it goes on.

    --quick             a fifth of MNIST, constant steps tuned with the smaller budget
    --seeds 3           medians of so many, with all data at every step
    --jobs 2            networks at the same time, one per core
    --again certified   forget the results whose names hold this word
    --only NETWORK      networks whose names hold this text

Prodigy, schedule-free AdamW and D-Adaptation take part if they are installed, best in a folder of their own:
``pip install --no-deps --target build/peers prodigyopt schedulefree dadaptation``.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from benchmarks import cells
from benchmarks.baselines import ADAM, CERTIFIED, CONSTANT, METHODS, PACKAGES, TUNED, Trace, missing, train
from benchmarks.minibatches import NOTHING
from benchmarks.networks import Problem, perceptron, problems
from benchmarks.timing import Duration, Measurement, compare

BUDGETS = (150, 500)
BEHIND = 1.1  # how far behind torch's LBFGS counts as equal
COST_TARGET, LOWEST_TARGET, OVERHEAD_TARGET = 1.6, 2 / 3, 1e-3
LBFGS = "torch LBFGS"


@dataclass(frozen=True)
class Result:
    """One method on one network.

    Attributes:
        losses: by budget, the median of the seeds, at the best setting for that budget.
        settings: by budget, what was chosen; ``None`` where nothing was tuned.
        runs: how many settings were tried.
        spent: gradients spent on trying them, per seed.
        traces: of all seeds, at the setting that is best for the largest budget.
    """

    losses: dict[int, float]
    settings: dict[int, float | None]
    runs: int
    spent: int
    traces: list[Trace] = field(repr=False)

    @property
    def trace(self) -> Trace:
        """The first seed."""
        return self.traces[0]


@dataclass(frozen=True)
class Study:
    """All methods on one network."""

    name: str
    samples: int
    seeds: int
    results: dict[str, Result]

    @property
    def cost(self) -> float:
        """Gradients per certified step, the median of the seeds."""
        return median(trace.work[-1] / max(trace.steps - 1, 1) for trace in self.results[CERTIFIED].traces)

    @property
    def ascents(self) -> int:
        """Certified steps that went up."""
        return sum(trace.ascents for trace in self.results[CERTIFIED].traces)

    def loss(self, method: str, budget: int) -> float:
        """Of a method; what is below the threshold counts as that."""
        return max(self.results[method].losses[budget], NOTHING)

    def level(self, budget: int) -> bool:
        """Whether certified descent is not behind torch's LBFGS."""
        return self.loss(CERTIFIED, budget) <= BEHIND * self.loss(LBFGS, budget)

    def lowest(self, budget: int) -> bool:
        """Whether no method is lower than certified descent."""
        return all(self.loss(CERTIFIED, budget) <= self.loss(method, budget) for method in self.results)


def _trace(problem: Problem, method: str, setting: float | None, seed: int, budget: int) -> Trace:
    shown = "" if setting is None else f" {setting:.4g}"
    name = f"{problem.name} {len(problem.x)} {method}{shown} seed {seed} of {budget}"
    try:
        return Trace(**cells.cell(name, lambda: train(problem, method, setting, seed, budget).to_dict()))
    except Exception as error:  # shown as a loss of ∞ and not kept, so that the next run tries again
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return Trace([0.0, 0.0], [math.inf, math.inf], 0, 0, math.nan, lost=True)


def tuned(problem: Problem, method: str, seeds: Sequence[int], quick: bool) -> Result:
    """The settings that end lowest, one per budget; more are tried while the best is at an end of the grid."""
    last = BUDGETS[0] if quick and method == CONSTANT else BUDGETS[-1]
    found: dict[float, list[Trace]] = {}

    def run(setting: float) -> None:
        found[setting] = [_trace(problem, method, setting, seed, last) for seed in seeds]

    def loss(setting: float, budget: int) -> float:
        return median(trace.loss_at(budget) for trace in found[setting])

    grid = sorted(TUNED[method])
    for setting in grid:
        run(setting)
    factor = grid[1] / grid[0]
    best: dict[int, float] = {}
    for budget in BUDGETS:
        judged = min(budget, last)
        while len(found) < 24:
            best[budget] = min(found, key=lambda setting: (loss(setting, judged), setting))
            if best[budget] == min(found):
                run(best[budget] / factor)
            elif best[budget] == max(found):
                run(best[budget] * factor)
            else:
                break
    chosen = best[BUDGETS[-1]]
    traces = [_trace(problem, method, chosen, seed, BUDGETS[-1]) for seed in seeds]
    losses = {b: loss(best[b], b) if b <= last else median(t.loss_at(b) for t in traces) for b in BUDGETS}
    return Result(losses, dict(best), len(found), len(found) * last, traces)


def untuned(problem: Problem, method: str, seeds: Sequence[int]) -> Result:
    """A method that has nothing to choose."""
    traces = [_trace(problem, method, None, seed, BUDGETS[-1]) for seed in seeds]
    losses = {budget: median(trace.loss_at(budget) for trace in traces) for budget in BUDGETS}
    return Result(losses, dict.fromkeys(BUDGETS), 1, 0, traces)


def methods() -> list[str]:
    """Those that can be run here."""
    absent = missing()
    return [method for method in METHODS if method not in absent]


def study(problem: Problem, seeds: Sequence[int], quick: bool) -> Study:
    """All methods on a problem."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results = {
            method: tuned(problem, method, seeds, quick) if method in TUNED else untuned(problem, method, seeds)
            for method in methods()
        }
    return Study(problem.name, len(problem.x), len(seeds), results)


def _named(name: str, seeds: int, quick: bool) -> Study:
    return study(next(problem for problem in problems(quick) if problem.name == name), range(seeds), quick)


def measure(quick: bool = False, seeds: int = 3, jobs: int = 1, only: str = "") -> list[Study]:
    """One study per network."""
    names = [problem.name for problem in problems(quick) if only in problem.name]
    return cells.side_by_side(partial(_named, seeds=seeds, quick=quick), names, jobs)


def run() -> Iterator[Callable[[], Measurement | Duration]]:
    """What a certified step costs, for the table of all benchmarks: to be called."""
    for problem in problems(quick=True):
        yield partial(_cost, problem)
    for layers in (2, 5):
        yield partial(_overhead, layers)


def _overhead(layers: int) -> Duration:
    """A step on a network so small that a gradient takes a tenth of a millisecond, less that."""
    import surefoot as sf

    torch.manual_seed(0)
    model = perceptron(4, layers, "tanh", width=16).double()
    x, y = torch.randn(256, 4).double(), torch.arange(256) % 10
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    taken = compare(
        "a certified step",
        partial(optimizer.step, x, y),
        "a gradient",
        lambda: torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), list(model.parameters())),
        target=math.inf,
        pairs=5,
        calls=25,
    )
    subject = f"{layers} layers of width 16, 256 samples: a certified step less a gradient"
    seconds = (taken.ratio - 1) * taken.seconds
    return Duration(subject, seconds, OVERHEAD_TARGET, f"the gradient takes {taken.seconds * 1e3:.2g} ms")


def _cost(problem: Problem) -> Measurement:
    import surefoot as sf

    model = problem.model(0)
    optimizer = sf.CertifiedDescent(model, problem.objective)
    return compare(
        f"{problem.name}: a certified step",
        partial(optimizer.step, problem.x, problem.y),
        "a gradient",
        lambda: torch.autograd.grad(problem.loss(model), list(model.parameters())),
        target=COST_TARGET,
        pairs=11,
    )


def verdicts(studies: Sequence[Study]) -> list[tuple[str, str, str, bool]]:
    """What is aimed at, what came out, and whether it is reached."""
    found: list[tuple[str, str, str, bool]] = []
    total = len(studies)
    for budget in BUDGETS:
        level, lowest = sum(s.level(budget) for s in studies), sum(s.lowest(budget) for s in studies)
        aim = math.ceil(LOWEST_TARGET * total)
        behind = f"not behind torch's LBFGS (loss × {BEHIND:g}), {budget} gradients"
        found.append((behind, f"{total} of {total}", f"{level} of {total}", level == total))
        found.append((f"lowest of all, {budget} gradients", f"{aim} of {total}", f"{lowest}", lowest >= aim))
    worst, up = max(study.cost for study in studies), sum(study.ascents for study in studies)
    cost = "gradients per certified step, the most"
    found.append((cost, f"≤ {COST_TARGET:g}", f"{worst:.2f}", worst <= COST_TARGET))
    found.append(("certified steps that went up", "0", f"{up}", up == 0))
    return found


def main() -> None:
    """Run and print."""
    parser = cells.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of MNIST, steps tuned with less work")
    parser.add_argument("--seeds", type=int, default=3, help="medians of so many")
    options = cells.begun(parser)
    absent = missing()
    if absent:
        packages = " ".join(PACKAGES[method] for method in absent)
        print(f"without {', '.join(absent)}: pip install --no-deps --target build/peers {packages}")
    studies = measure(options.quick, options.seeds, options.jobs, options.only)
    shown = methods()
    for budget in BUDGETS if studies else ():
        print(f"\nloss after {budget} gradients\n{'':<36}" + "".join(f"{name[:12]:>14}" for name in shown))
        for one in studies:
            print(f"{one.name:<36}" + "".join(f"{one.results[name].losses[budget]:>14.3g}" for name in shown))
    print()
    for one in studies:
        adam, constant = one.results[ADAM], one.results[CONSTANT]
        rates = f"Adam {adam.settings[BUDGETS[-1]]:.3g} of {adam.runs}, step {constant.settings[BUDGETS[-1]]:.3g}"
        print(
            f"{one.name:<36}{one.cost:>6.2f} gradients per step, {one.ascents} ascents; {rates} of {constant.runs}"
        )
    for what, aim, result, reached in verdicts(studies) if studies else ():
        print(f"{'met   ' if reached else 'MISSED'}  {what}: {result}, target {aim}")


if __name__ == "__main__":
    main()
