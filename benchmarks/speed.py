"""How long surefoot takes, next to plain PyTorch on one thread: the tables of ``docs/benchmarks.md``."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import linear_regression, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from examples import poisson
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from benchmarks.networks import Letters, Recurrent, convolutional, images, perceptron, problems
from benchmarks.runner import Case, aim, benchmark
from benchmarks.timing import Ratio, compare, peak, seconds
from surefoot import zoo
from surefoot.clustering import ConvexClustering, nearest_neighbours
from surefoot.implicit import ArgMin

WIDTH, DEPTHS = 8, (4, 8, 16, 32, 64)  # of the networks of Newton's method


@benchmark("speed", "benchmarks", "what | compared with | ratio | quartiles | target")
def speed() -> Iterator[Case]:
    """Ratios of processor times, and of memory."""
    shapes = (256, 784), (2, 3, 224, 224)
    for name, build, shape in (
        ("MLP 784-1024-512-10, batch 256", partial(zoo.mlp, (784, 1024, 512, 10)), shapes[0]),
        ("VGG-16 224×224, batch 2", zoo.vgg16, shapes[1]),
    ):
        yield _case(f"{name}: oracle, value and pull-back", "forward and torch.autograd.grad", 1.15,
                    partial(_autodiff, build, shape))  # fmt: skip
    yield _case("MLP 784-256-128-10 tanh, batch 128: certificate on a ball around the weights",
                "a gradient of the model", 10.0, _certificate)  # fmt: skip
    for name, samples, size, order in (
        ("64 samples, β of 10", 64, 10, 2),
        ("64 samples, β of 10, first derivatives only", 64, 10, 1),
        ("32 samples, β of 64", 32, 64, 2),
    ):
        measure = partial(_implicit, samples, size, order)
        yield _case(f"ArgMin, {name}: backward pass", "forward solve", 2.0, measure)
    for depth in DEPTHS[:-1]:
        yield _case(f"Newton step, {depth} layers of width {WIDTH}, batch 16: dynamic programming",
                    "dense Hessian and solve", 1.0, partial(_newton, depth))  # fmt: skip
    yield _case(f"Newton step, {DEPTHS[0]} to {DEPTHS[-1]} layers: exponent of the depth in the time",
                "1, a cost linear in the depth", 1.15, _growth)  # fmt: skip
    for name in ORACLES:
        for kappa in (0.1, 1e-3):
            measure = partial(_step, name, kappa)
            yield _case(f"{name}: Gauss-Newton step, κ = {kappa:g}", "gradient", 12.0, measure)
    for name, build, target in GAUSS_NEWTON:
        yield _case(f"{name}: step of GaussNewton", "gradient", target, partial(_gauss_newton, build))
        memory = f"{name}: memory of a step of GaussNewton, at most"
        yield _case(memory, "memory of a gradient", 3.0, partial(_memory, build))
    for problem in problems():
        yield _case(f"{problem.name}: a certified step", "a gradient", 1.6, partial(_descent, problem))


def _case(what: str, other: str, target: float, measure: Callable[[], Ratio]) -> Case:
    return what, lambda: [what, other, *measure().cells(target)]


def _autodiff(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Ratio:
    """One value and one pull-back of the captured graph; the capture is made once, outside the clock."""
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    chain, parameters, slope = sf.Chain(model, x), list(model.parameters()), torch.randn_like(model(x).detach())

    def oracle() -> object:
        found = chain.autodiff()
        return found.value, found.pullback(slope)

    return compare(oracle, lambda: torch.autograd.grad(model(x), parameters, slope), 21)


def _certificate() -> Ratio:
    torch.manual_seed(0)
    model, x = zoo.mlp((784, 256, 128, 10), activation="tanh"), torch.randn(128, 784)
    parameters, slope = list(model.parameters()), torch.randn(128, 10)
    gradient = partial(lambda: torch.autograd.grad(model(x), parameters, slope))
    return compare(lambda: sf.certify(model, x, domain=sf.Ball(0.01)), gradient, 21, 2)


class Energy(nn.Module):
    """Σ softplus(Aβ + x) + ‖β‖²/2, which is not quadratic."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor, beta: Tensor) -> Tensor:
        return F.softplus(self.a @ beta + x).sum() + 0.5 * beta.square().sum()


def _implicit(samples: int, size: int, order: Any) -> Ratio:
    """The backward pass through recorded corrections: two for exact second derivatives, one for the first."""
    torch.manual_seed(0)
    layer = ArgMin(Energy(size), size, order=order).double()
    x = torch.randn(samples, size, dtype=torch.float64, requires_grad=True)
    result = layer(x)
    slope, variables = torch.randn_like(result), [x, *layer.parameters()]

    def forward() -> object:
        with torch.no_grad():
            return layer(x)

    return compare(lambda: torch.autograd.grad(result, variables, slope, retain_graph=True), forward, 11)


def _chained(depth: int) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """A Newton step by dynamic programming, and by the dense Hessian of all parameters."""
    torch.manual_seed(0)
    model = perceptron(*[WIDTH] * (depth + 1))[1:].double()
    x, y = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    chain, objective = sf.Chain(model, x), sf.Square(y)
    kappa = sf.oracles.newton(chain, objective, kappa=1.0).kappa  # large enough for a minimum
    named = {path: value.detach() for path, value in model.named_parameters()}
    shapes = [value.shape for value in named.values()]

    def value(u: Tensor) -> Tensor:
        parts = u.split([shape.numel() for shape in shapes])
        values = {path: part.view(shape) for path, part, shape in zip(named, parts, shapes, strict=True)}
        return objective(torch.func.functional_call(model, values, (x,)))

    def dense() -> Tensor:
        u = torch.cat([part.flatten() for part in named.values()])
        hessian = torch.func.hessian(value)(u)
        hessian.diagonal().add_(kappa)
        return torch.cholesky_solve(-torch.func.grad(value)(u)[:, None], torch.linalg.cholesky(hessian))

    return lambda: sf.oracles.newton(chain, objective, kappa=kappa, double=False), dense


def _newton(depth: int) -> Ratio:
    return compare(*_chained(depth), 5, warm_up=1)


def _growth() -> Ratio:
    steps, depths = [_chained(depth)[0] for depth in DEPTHS], [math.log(depth) for depth in DEPTHS]
    rounds = [[seconds(step) for step in steps] for _ in range(12)][2:]
    slopes = [linear_regression(depths, [math.log(s) for s in times]).slope for times in rounds]
    low, _, high = quantiles(slopes, n=4)
    return Ratio(median(slopes), low, high, median(times[0] for times in rounds))


def _large_perceptron() -> tuple[nn.Module, Tensor]:
    return perceptron(784, 256, 128, 10)[1:], torch.randn(128, 784)


def _large_convolution() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(784, 10)]
    return nn.Sequential(*layers), torch.randn(64, 1, 28, 28)


ORACLES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP 784-256-128-10, batch 128": _large_perceptron,
    "CNN 8-16 on 28×28, batch 64": _large_convolution,
}


def _step(name: str, kappa: float) -> Ratio:
    """Solved until the gradient of its model is 1e-6 of that at 0, in single precision."""
    torch.manual_seed(0)
    model, x = ORACLES[name]()
    y = torch.randint(0, 10, (len(x),))
    chain, objective, parameters = sf.Chain(model, x), sf.CrossEntropy(y), list(model.parameters())

    def step() -> None:
        found = sf.oracles.gauss_newton(chain, objective, kappa, method="dual_gram", tolerance=1e-6)
        assert found.residual is not None
        assert found.residual <= 1e-6, found.status

    return compare(step, lambda: torch.autograd.grad(F.cross_entropy(model(x), y), parameters), 9)


Given = tuple[nn.Module, Tensor, Tensor, Any]


def _digits(model: Callable[[], nn.Module], count: int) -> Given:
    x, y = images("digits", count)
    return model(), x.float(), y, sf.CrossEntropy()


def _random(model: Callable[[], nn.Module], x: Callable[[], Tensor], outputs: int, classes: int) -> Given:
    return model(), x(), torch.randint(0, classes, (outputs,)), sf.CrossEntropy()


def _ids(*shape: int, most: int) -> Callable[[], Tensor]:
    return partial(torch.randint, 0, most, shape)


GAUSS_NEWTON: tuple[tuple[str, Callable[[], Given], float], ...] = (
    ("digits, MLP, 1,347 samples", partial(_digits, partial(perceptron, 64, 64, 64, 10), 1347), 10.0),
    ("digits, CNN, 1,347 samples", partial(_digits, convolutional, 1347), 15.0),
    ("digits, CNN with batch-norm, 256 samples", partial(_digits, partial(convolutional, norm=True), 256), 15.0),
    ("MLP, 1,000 classes, batch 128",
     partial(_random, partial(perceptron, 64, 128, 1000), partial(torch.randn, 128, 64), 128, 1000), 20.0),
    ("GRU, batch 256", partial(_random, lambda: Recurrent(nn.GRU(16, 32, batch_first=True), 32),
                               partial(torch.randn, 256, 8, 16), 256, 10), 20.0),
    ("GPT, 8 × 128 tokens of 256",
     partial(_random, partial(Letters, 256, 128, 64, 2, 4), _ids(8, 128, most=256), 1024, 256), 20.0),
    ("GPT, 8 × 64 tokens of 1,000",
     partial(_random, partial(Letters, 1000, 64, 64, 2, 4), _ids(8, 64, most=1000), 512, 1000), 20.0),
    ("PINN, 1,020 residuals, double", lambda: (*poisson.problem(), sf.Square()), 25.0),
    ("ResNet-18, batch 64", partial(_random, zoo.resnet18, partial(torch.randn, 64, 3, 32, 32), 64, 10), 20.0),
)  # fmt: skip


def _gauss_newton(build: Callable[[], Given], steps: int = 8) -> Ratio:
    """The mean of some steps; each stands between two gradients and is divided by the shorter one."""
    torch.manual_seed(0)
    model, x, y, loss = build()
    parameters, optimizer = list(model.parameters()), sf.GaussNewton(model, loss)
    optimizer.step(x, y)  # which captures the model
    gradient = partial(seconds, lambda: torch.autograd.grad(loss(model(x), y), parameters))
    times = [(gradient(), seconds(lambda: optimizer.step(x, y)), gradient()) for _ in range(steps)]
    costs = sorted(step / min(before, after) for before, step, after in times)
    quarter = steps // 4
    unit = median(min(before, after) for before, _, after in times)
    return Ratio(sum(costs) / steps, costs[quarter], costs[-1 - quarter], unit)


def _memory(build: Callable[[], Given]) -> Ratio:
    """Bytes at the peak of that of a dozen steps which takes most, above what is there between steps."""
    torch.manual_seed(0)
    model, x, y, loss = build()
    parameters, optimizer = list(model.parameters()), sf.GaussNewton(model, loss)
    optimizer.step(x, y)
    gradient = peak(lambda: torch.autograd.grad(loss(model(x), y), parameters))
    ratios = sorted(peak(lambda: optimizer.step(x, y)) / gradient for _ in range(13))
    return Ratio(ratios[-1], ratios[3], ratios[-4], 0.0)


def _descent(problem: Any) -> Ratio:
    model = problem.model(0)
    optimizer, parameters = sf.CertifiedDescent(model, problem.objective), list(model.parameters())
    step = partial(optimizer.step, problem.x, problem.y)
    return compare(step, lambda: torch.autograd.grad(problem.loss(model), parameters), 11)


# Durations are of a fresh process per model, after import: capture and calculus together.
_A_PRIORI = """
import time, warnings
warnings.simplefilter("ignore")
import torch, torch.export._trace
import surefoot as sf
from surefoot.certifying import certify
with torch.device("meta"):
    model, x = {build}
start = time.perf_counter()
certificate = certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0)
assert certificate.lipschitz.is_finite
seconds = time.perf_counter() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak / 2**20, certificate.lipschitz)
"""
_FIRST = """
import time
import torch
from torch import nn
import surefoot as sf
model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(32, 8)
start = time.process_time()
sf.certify(model, x, {options})
print(time.process_time() - start)
"""
_LLAMA = (
    "(lambda t: t.LlamaForCausalLM(t.LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, "
    "num_key_value_heads=8, intermediate_size=28672, vocab_size=128256)).eval())(__import__('transformers')), "
    "torch.zeros(1, 16, dtype=torch.long)"
)
MODELS = (
    ("VGG-16, 224×224, batch 128", "sf.zoo.vgg16(), torch.empty(128, 3, 224, 224)", 1.0),
    ("VGG-16 smooth, 224×224, batch 128", "sf.zoo.build('vgg16-smooth'), torch.empty(128, 3, 224, 224)", 1.0),
    ("ResNet-152, 224×224, batch 128", "sf.zoo.resnet152(), torch.empty(128, 3, 224, 224)", 5.0),
    ("Llama with 70 billion parameters, 16 tokens", _LLAMA, 60.0),
)
OPTIONS = {
    "network on a ball": "domain=sf.Ball(0.1)",
    "cross-entropy, default ball": "objective=sf.CrossEntropy(torch.zeros(32, dtype=torch.long))",
}


@benchmark("durations", "benchmarks", "what | seconds | target | ")
def durations() -> Iterator[Case]:
    """Certificates in fresh processes, small steps, clusterings."""
    for name, build, target in MODELS:
        yield f"{name}: a-priori certificate on meta", partial(_a_priori, name, build, target)
    for name, options in OPTIONS.items():
        yield f"MLP 8-16-3 tanh, {name}: first certificate of a process", partial(_first, name, options)
    for layers in (2, 5):
        yield f"{layers} layers of width 16, 256 samples: a certified step less a gradient", partial(_less, layers)
    for name, groups, width in (("blobs", 20, 1.0), ("overlap", 5, 4.0)):
        for penalty in (0.3, 1.0, 3.0, 10.0, 30.0):
            what = f"convex clustering of 10,000 points, {name}, λ = {penalty:g}"
            yield what, partial(_clustering, what, groups, width, penalty)


def _output(code: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", code]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout.split()


def _a_priori(name: str, build: str, target: float) -> list[str]:
    taken, gibibytes, lipschitz = _output(_A_PRIORI.format(build=build))[-3:]
    note = f"ℓ ≤ {lipschitz}, {float(gibibytes):.2f} GiB at the peak"
    what = f"{name}: a-priori certificate on meta"
    return [what, f"**{float(taken):.3g}**", aim(float(taken), most=target), note]


def _first(name: str, options: str) -> list[str]:
    """Processor time of the first certificate of a process with all that it loads, of some processes."""
    with TemporaryDirectory() as folder:  # modules are compiled in a run that does not count
        environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        times = [float(_output(_FIRST.format(options=options), **environment)[-1]) for _ in range(8)][1:]
    what = f"MLP 8-16-3 tanh, {name}: first certificate of a process"
    return [what, f"**{median(times):.3g}**", aim(median(times), most=1.5), ""]


def _less(layers: int) -> list[str]:
    """A step on a network so small that a gradient takes a tenth of a millisecond, less that."""
    torch.manual_seed(0)
    model = perceptron(4, *[16] * (layers - 1), 10).double()
    x, y = torch.randn(256, 4).double(), torch.arange(256) % 10
    step, parameters = partial(sf.CertifiedDescent(model, sf.CrossEntropy()).step, x, y), list(model.parameters())
    found = compare(step, lambda: torch.autograd.grad(F.cross_entropy(model(x), y), parameters), 5, 25)
    less = (found.ratio - 1) * found.seconds
    what = f"{layers} layers of width 16, 256 samples: a certified step less a gradient"
    return [what, f"**{less:.3g}**", aim(less, most=1e-3), f"the gradient takes {found.seconds * 1e3:.2g} ms"]


def _clustering(what: str, groups: int, width: float, penalty: float) -> list[str]:
    """Equal groups of normal points around centres that are uniform in a cube, joined to their ten nearest."""
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.rand(groups, 10, generator=generator, dtype=torch.float64) - 10
    noise = torch.randn(10_000, 10, generator=generator, dtype=torch.float64)
    points = centres[torch.arange(10_000) % groups] + width * noise
    objective = ConvexClustering(nearest_neighbours(points, 10), penalty=penalty)
    start = time.perf_counter()
    result = objective.solve(points)
    taken = time.perf_counter() - start
    return [what, f"**{taken:.3g}**", aim(taken, most=60), result.status]
