"""Gauss-Newton steps and products of other packages, in the same run and against the same gradient.

Each package takes the step that it has: curvlinops and BackPACK have products with the Gauss-Newton matrix, to
which plain conjugate gradients are added here; torch-levenberg-marquardt solves its own damped system, with a
damping that makes its model the same where it can be; pytorch-minimize takes one iteration of its Newton method on
the loss plus the proximal term, with the accuracy of its own rule. What each reaches stands beside its time:

* *residual*: the gradient of the Gauss-Newton model (of the Newton model for pytorch-minimize) at the step,
  relative to that at zero, evaluated in double precision at the same parameters;
* *error*: the step against a dense solve of the same model on a network of 51 parameters in double precision,
  with κ increased for Newton's model until it has a minimum.

A package that cannot be imported is left out: ``make peers`` installs them into ``build/peers``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from benchmarks.runner import ROOT, Case, benchmark
from benchmarks.speed import ORACLES
from benchmarks.timing import compare

Step = Callable[[nn.Module, Tensor, Tensor, float, float], Tensor]
Product = Callable[[nn.Module, Tensor, Tensor], Callable[[Tensor], Tensor]]
RESIDUALS = (1e-1, 1e-3, 1e-6)


def package(name: str) -> Any:
    """A module of another package, from ``build/peers`` if it is there; ``None`` if it is not installed."""
    folder = str(ROOT / "build" / "peers")
    sys.path += [folder] if folder not in sys.path else []
    try:
        return import_module(name)
    except Exception as error:  # what an import of another package may raise is unknown
        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
        return None


@benchmark("peers", "benchmarks", "what | ratio to a gradient | quartiles | residual | error")
def peers() -> Iterator[Case]:
    """Steps and products on a perceptron and a small convolutional network."""
    there = {name for name, module in MODULES.items() if module is None or package(module)}
    for title in ORACLES:
        for kappa in (0.1, 1e-3):
            for name in (name for name in STEPS if name.partition(":")[0] in there):
                for tolerance in RESIDUALS if name in TO_A_RESIDUAL else RESIDUALS[-1:]:
                    ending = f", to {tolerance:g}" if name in TO_A_RESIDUAL else ""
                    what = f"{title}, κ = {kappa:g}: {name}{ending}"
                    yield what, partial(_step, what, name, title, kappa, tolerance)
        for name in (name for name in PRODUCTS if name.partition(":")[0] in there):
            yield f"{title}: {name}", partial(_product, f"{title}: {name}", name, title)


def _subject(title: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = ORACLES[title]()
    return model, x, torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1))


def _step(what: str, name: str, title: str, kappa: float, tolerance: float) -> list[str]:
    (model, x, y), step, newton = _subject(title), STEPS[name], "minimize" in name
    residual = _residual(model, x, y, kappa, step(model, x, y, kappa, tolerance), newton)
    pairs = 7 if name.startswith("surefoot") else 3
    found = compare(lambda: step(model, x, y, kappa, tolerance), lambda: _gradient(model, x, y), pairs, warm_up=1)
    error = _error(step, kappa, newton)
    cells = [f"**{found.ratio:.1f}**", f"{found.low:.1f} to {found.high:.1f}"]
    return [what, *cells, f"{residual:.0e}", f"{error:.0e}"]


def _product(what: str, name: str, title: str) -> list[str]:
    model, x, y = _subject(title)
    product, vector = PRODUCTS[name](model, x, y), torch.randn(sum(p.numel() for p in model.parameters()))
    found = compare(lambda: product(vector), lambda: _gradient(model, x, y), 9)
    small, inputs, labels = _small()
    along = torch.randn(sum(p.numel() for p in small.parameters()), dtype=torch.float64)
    expected = _dense(small, inputs, labels, newton=False)[1] @ along
    error = float((PRODUCTS[name](small, inputs, labels)(along) - expected).norm() / expected.norm())
    return [what, f"**{found.ratio:.1f}**", f"{found.low:.1f} to {found.high:.1f}", "", f"{error:.0e}"]


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([slope.reshape(-1) for slope in found])


def _surefoot(method: Any) -> Step:
    chains: dict[nn.Module, sf.Chain] = {}  # captured once

    def step(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
        chain = chains.setdefault(model, sf.Chain(model, x))
        found = sf.oracles.gauss_newton(chain, sf.CrossEntropy(y), kappa, method=method, tolerance=tolerance)
        return torch.cat([found.direction[path].reshape(-1) for path, _ in model.named_parameters()])

    return step


def _surefoot_product(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    found = sf.Chain(model, x).autodiff()
    p, like = found.value.softmax(1), dict(model.named_parameters())

    def product(v: Tensor) -> Tensor:
        parts = v.split([value.numel() for value in like.values()])
        direction = {path: part.view_as(like[path]) for path, part in zip(like, parts, strict=True)}
        curved = p * found.pushforward(direction)  # ∇²h z = (p z - p ⟨p, z⟩)/n for each sample
        image = found.pullback((curved - p * curved.sum(1, keepdim=True)) / len(x))
        return torch.cat([image[path].reshape(-1) for path in like])

    return product


def _curvlinops(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    operator = package("curvlinops").GGNLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)], check_deterministic=False
    )
    return lambda v: operator @ v


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    products = package("backpack.hessianfree.ggnvp")
    output = model(x)
    loss, parameters = F.cross_entropy(output, y), list(model.parameters())

    def product(v: Tensor) -> Tensor:
        parts = v.split([p.numel() for p in parameters])
        along = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        found = products.ggn_vector_product(loss, output, model, along)
        return torch.cat([part.reshape(-1) for part in found])

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
    lm, trained = package("torch_levenberg_marquardt"), copy.deepcopy(model)
    damping = lm.damping.StandardDampingStrategy(starting_value=0.5 * len(x) * kappa)
    lm.training.LevenbergMarquardtModule(
        trained, lm.loss.CrossEntropyLoss(), damping, attempts_per_step=1, solve_method="cholesky"
    ).training_step(x, y)
    return _flat(trained) - _flat(model)


def _minimize(model: nn.Module, x: Tensor, y: Tensor, kappa: float, tolerance: float) -> Tensor:
    """One iteration of Newton's method on the loss plus κ/2 times the squared distance."""
    output, start = _outputs(model, x)

    def value(u: Tensor) -> Tensor:
        return F.cross_entropy(output(u), y) + 0.5 * kappa * (u - start).square().sum()

    options = {"line_search": "none"}
    found = package("torchmin").minimize(value, start, method="newton-cg", max_iter=1, options=options)
    step: Tensor = found.x - start
    return step


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()])


def _outputs(model: nn.Module, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The output as a function of one vector, and the vector."""
    parts = dict(model.named_parameters())

    def output(u: Tensor) -> Tensor:
        pieces = u.split([part.numel() for part in parts.values()])
        values = {path: piece.view_as(parts[path]) for path, piece in zip(parts, pieces, strict=True)}
        found: Tensor = torch.func.functional_call(model, values, (x,))
        return found

    return output, _flat(model)


def _residual(model: nn.Module, x: Tensor, y: Tensor, kappa: float, v: Tensor, newton: bool) -> float:
    output, u = _outputs(copy.deepcopy(model).double(), x.double())
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
    output, u = _outputs(model, x)

    def value(at: Tensor) -> Tensor:
        return F.cross_entropy(output(at), y)

    g = torch.func.grad(value)(u)
    if newton:
        return g, torch.func.hessian(value)(u)
    jacobian = torch.func.jacrev(lambda at: output(at).flatten())(u)
    curvature = torch.func.hessian(lambda z: F.cross_entropy(z.view(len(x), -1), y))(output(u).flatten())
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
TO_A_RESIDUAL = tuple(STEPS)[:4]  # the others choose their accuracy themselves
PRODUCTS: dict[str, Product] = {
    "surefoot: Gauss-Newton-vector product": _surefoot_product,
    "curvlinops: Gauss-Newton-vector product": _curvlinops,
    "BackPACK: Gauss-Newton-vector product": _backpack,
}
MODULES = {
    "surefoot": None,
    "curvlinops": "curvlinops",
    "BackPACK": "backpack",
    "torch-levenberg-marquardt": "torch_levenberg_marquardt",
    "pytorch-minimize": "torchmin",
}
