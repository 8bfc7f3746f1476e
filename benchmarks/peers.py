"""Gauss-Newton steps and products of other packages, in the same run and against the same gradient.

Each package takes the step that it has: curvlinops and BackPACK have products with the Gauss-Newton matrix, to
which plain conjugate gradients are added here; torch-levenberg-marquardt solves its own damped system, with a
damping that makes its model the same where it can be; pytorch-minimize takes one iteration of its Newton method on
the loss plus the proximal term, with the accuracy of its own rule. surefoot's graph of a model is captured before.
What each of them reaches stands beside its time:

* *residual*: the gradient of the Gauss-Newton model (of the Newton model for pytorch-minimize) at the step,
  relative to that at zero, evaluated in double precision at the same parameters. Solvers that take a tolerance
  are measured at 1e-1, 1e-3 and 1e-6;
* *error*: the step against a dense solve of the same model on a network of 51 parameters in double precision,
  with κ increased for Newton's model until it has a minimum.

A package that cannot be imported is left out, with a line that says so: ``pip install surefoot[peers]``, or in
a folder of their own, ``build/peers``, as ``make peers`` does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from benchmarks.baselines import PEERS
from benchmarks.oracles import PRODUCT, STEP, TOLERANCE, networks
from benchmarks.timing import Measurement, compare
from surefoot.oracles.problem import Problem

Step = Callable[[nn.Module, Tensor, Tensor, float, float], Tensor]
Product = Callable[[nn.Module, Tensor, Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Peer(Measurement):
    """A measurement with what was reached.

    Attributes:
        residual: of the step that was timed; ``None`` for a product.
        error: of the same method on a small network, against the dense solution.
    """

    residual: float | None = None
    error: float | None = None


def run(tolerances: tuple[float, ...] | None = None, first: int | None = None) -> Iterator[Callable[[], Peer]]:
    """Steps and products on a perceptron and a small convolutional network: to be called.

    Perhaps for fewer residuals, or the first networks alone.
    """
    present = _present()
    for title, model, x, pairs in networks()[:first]:
        y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1))
        for kappa in (0.1, 1e-3):
            for name in STEPS:
                for tolerance in (tolerances or RESIDUALS) if name in TO_A_RESIDUAL else RESIDUALS[-1:]:
                    if name.partition(":")[0] in present:
                        yield partial(_step, name, title, model, x, y, kappa, tolerance, pairs)
        for name in PRODUCTS:
            if name.partition(":")[0] in present:
                yield partial(_product, name, title, model, x, y, pairs)


def table(found: list[Any]) -> str:
    """The rows of this module as a table, empty if there are none."""
    peers = [m for m in found if isinstance(m, Peer)]
    if not peers:
        return ""
    lines = ["| what | ratio to a gradient | quartiles | residual | error |", "|---|---|---|---|---|"]
    for m in peers:
        reached = ["" if number is None else f"{number:.0e}" for number in (m.residual, m.error)]
        lines.append(f"| {m.subject} | **{m.ratio:.1f}** | {m.low:.1f} to {m.high:.1f} | {' | '.join(reached)} |")
    return "\n".join(lines) + "\n"


def _present() -> set[str]:
    """The packages that can be imported; for the others a line that says why not."""
    found = {"surefoot"}
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    for name, module in _MODULES.items():
        try:
            import_module(module)
        except Exception as error:  # what an import of another package may raise is not known
            print(f"{name} is left out: {error}", flush=True)
        else:
            found.add(name)
    return found


def _step(
    name: str, title: str, model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float, pairs: int
) -> Peer:
    step, newton = STEPS[name], "minimize" in name
    reached = _residual(model, x, y, kappa, step(model, x, y, kappa, tolerance), newton)
    subject = f"{title}, κ = {kappa:g}: {name}" + (f", to {tolerance:g}" if name in TO_A_RESIDUAL else "")
    few = min(pairs, 7) if name.startswith("surefoot") else 3
    timed = compare(
        subject,
        lambda: step(model, x, y, kappa, tolerance),
        "gradient",
        lambda: _gradient(model, x, y),
        target=STEP,
        pairs=few,
        warm_up=1,
    )
    return Peer(**vars(timed), residual=reached, error=_error(step, kappa, newton))


def _product(name: str, title: str, model: nn.Module, x: Tensor, y: Tensor, pairs: int) -> Peer:
    product, vector = PRODUCTS[name](model, x, y), torch.randn(sum(p.numel() for p in model.parameters()))
    timed = compare(
        f"{title}: {name}",
        lambda: product(vector),
        "gradient",
        lambda: _gradient(model, x, y),
        target=PRODUCT,
        pairs=pairs,
    )
    small, inputs, labels = _small()
    along = torch.randn(sum(p.numel() for p in small.parameters()), dtype=torch.float64)
    expected = _dense(small, inputs, labels, newton=False)[1] @ along
    error = float((PRODUCTS[name](small, inputs, labels)(along) - expected).norm() / expected.norm())
    return Peer(**vars(timed), error=error)


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([slope.reshape(-1) for slope in found])


@cache
def _chain(model: nn.Module, x: Tensor) -> sf.Chain:
    return sf.Chain(model, x)


def _surefoot(method: Any) -> Step:
    def step(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
        chain = _chain(model, x)
        found = sf.oracles.gauss_newton(chain, sf.CrossEntropy(y), kappa, method=method, tolerance=tolerance)
        return torch.cat([found.direction[path].reshape(-1) for path, _ in model.named_parameters()])

    return step


def _surefoot_product(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    problem = Problem(_chain(model, x), sf.CrossEntropy(y))
    like = dict(model.named_parameters())

    def product(v: Tensor) -> Tensor:
        parts = v.split([value.numel() for value in like.values()])
        direction = {path: part.view_as(like[path]) for path, part in zip(like, parts, strict=True)}
        found = problem.autodiff.pullback(problem.curve(problem.autodiff.pushforward(direction)))
        return torch.cat([found[path].reshape(-1) for path in like])

    return product


def _curvlinops(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    from curvlinops import GGNLinearOperator  # type: ignore[import-not-found]

    parameters = list(model.parameters())
    operator = GGNLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False)
    return lambda v: operator @ v


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    from backpack.hessianfree.ggnvp import ggn_vector_product  # type: ignore[import-not-found]

    output = model(x)
    loss, parameters = F.cross_entropy(output, y), list(model.parameters())

    def product(v: Tensor) -> Tensor:
        parts = v.split([p.numel() for p in parameters])
        along = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        return torch.cat([part.reshape(-1) for part in ggn_vector_product(loss, output, model, along)])

    return product


def _by_conjugate_gradients(product_of: Product) -> Step:
    def step(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
        product, g = product_of(model, x, y), _gradient(model, x, y)
        v, r = torch.zeros_like(g), -g
        p, square = r, float(r.dot(r))
        first = square
        for _ in range(2000):
            if square <= tolerance**2 * first:
                break
            image = product(p) + kappa * p
            length = square / float(p.dot(image))
            v, r = v + length * p, r - length * image
            square, last = float(r.dot(r)), square
            p = r + square / last * p
        return v

    return step


def _levenberg_marquardt(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
    """Its residuals are the roots of the losses of the samples: with λ = nκ/2 the proximal term is the same."""
    import torch_levenberg_marquardt as lm  # type: ignore[import-not-found]

    trained = copy.deepcopy(model)
    damping = lm.damping.StandardDampingStrategy(starting_value=0.5 * len(x) * kappa)
    module = lm.training.LevenbergMarquardtModule(
        trained, lm.loss.CrossEntropyLoss(), damping, attempts_per_step=1, solve_method="cholesky"
    )
    module.training_step(x, y)
    return _flat(trained) - _flat(model)


def _minimize(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
    """One iteration of Newton's method on the loss plus κ/2 times the squared distance."""
    from torchmin import minimize  # type: ignore[import-not-found]

    start, parts = _flat(model), dict(model.named_parameters())

    def value(u: Tensor) -> Tensor:
        pieces = u.split([part.numel() for part in parts.values()])
        values = {path: piece.view_as(parts[path]) for path, piece in zip(parts, pieces, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)
        return loss + 0.5 * kappa * (u - start).square().sum()

    found = minimize(value, start, method="newton-cg", max_iter=1, options={"line_search": "none"})
    return found.x - start


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def _in_double(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The output as a function of one vector, and the vector, in double precision."""
    precise = copy.deepcopy(model).double()
    parts, inputs = dict(precise.named_parameters()), x.double()

    def output(u: Tensor) -> Tensor:
        pieces = u.split([part.numel() for part in parts.values()])
        values = {path: piece.view_as(parts[path]) for path, piece in zip(parts, pieces, strict=True)}
        return torch.func.functional_call(precise, values, (inputs,))

    return output, _flat(precise)


def _residual(model: nn.Module, x: Tensor, y: Tensor, kappa: float, v: Tensor, newton: bool) -> float:
    output, u = _in_double(model, x, y)
    along = v.detach().double()

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    g = torch.func.grad(lambda at: loss(output(at)))(u)
    if newton:
        image = torch.func.jvp(torch.func.grad(lambda at: loss(output(at))), (u,), (along,))[1]
    else:
        z, change = torch.func.jvp(output, (u,), (along,))
        curved = torch.func.jvp(torch.func.grad(loss), (z,), (change,))[1]
        image = torch.func.vjp(output, u)[1](curved)[0]
    return float((g + image + kappa * along).norm() / g.norm())


def _small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def _dense(model: nn.Module, x: Tensor, y: Tensor, newton: bool) -> tuple[Tensor, Tensor]:
    """The gradient and the Hessian or the Gauss-Newton matrix, written out."""
    output, u = _in_double(model, x, y)
    value = lambda at: F.cross_entropy(output(at), y)  # noqa: E731
    g = torch.func.grad(value)(u)
    if newton:
        return g, torch.func.hessian(value)(u)
    jacobian = torch.func.jacrev(lambda at: output(at).flatten())(u)
    flat = output(u).flatten()
    curvature = torch.func.hessian(lambda z: F.cross_entropy(z.view(len(x), -1), y))(flat)
    return g, jacobian.T @ curvature @ jacobian


def _error(step: Step, kappa: float, newton: bool) -> float:
    model, x, y = _small()
    g, matrix = _dense(model, x, y, newton)
    kappa += max(0.0, -float(torch.linalg.eigvalsh(matrix)[0]))
    expected = torch.linalg.solve(matrix + kappa * torch.eye(len(g), dtype=g.dtype), -g)
    found = step(model, x, y, kappa, 1e-12)
    return float((found.double() - expected).norm() / expected.norm())


STEPS: dict[str, Step] = {
    "surefoot: Gauss-Newton step": _surefoot("auto"),
    "surefoot: Gauss-Newton step, matrix-free": _surefoot("primal"),
    "curvlinops: Gauss-Newton step, conjugate gradients": _by_conjugate_gradients(_curvlinops),
    "BackPACK: Gauss-Newton step, conjugate gradients": _by_conjugate_gradients(_backpack),
    "torch-levenberg-marquardt: its step": _levenberg_marquardt,
    "pytorch-minimize: Newton step": _minimize,
}
RESIDUALS = (1e-1, 1e-3, TOLERANCE)
TO_A_RESIDUAL = tuple(STEPS)[:4]  # the others choose their accuracy themselves
PRODUCTS: dict[str, Product] = {
    "surefoot: Gauss-Newton-vector product": _surefoot_product,
    "curvlinops: Gauss-Newton-vector product": _curvlinops,
    "BackPACK: Gauss-Newton-vector product": _backpack,
}
_MODULES = {
    "curvlinops": "curvlinops",
    "BackPACK": "backpack",
    "torch-levenberg-marquardt": "torch_levenberg_marquardt",
    "pytorch-minimize": "torchmin",
}


if __name__ == "__main__":
    for measure in run():
        row = measure()
        print(table([row]).splitlines()[-1], flush=True)
