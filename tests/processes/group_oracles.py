"""What oracles, optimizers, certificates and verdicts say of data in parts, and of all data at once."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

import surefoot as sf
from surefoot.batches import Batches
from surefoot.certificate.pieces import InPieces
from surefoot.optim import GaussNewton, KeepIfLower, Newton
from surefoot.oracles.problem import Problem
from surefoot.processes import Processes

Part = tuple[Tensor, Tensor]
ORACLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gradient": (sf.oracles.gradient, {"kappa": 2.0}),
    "primal": (sf.oracles.gauss_newton, {"method": "primal", "regularizer": sf.Ridge(0.1)}),
    "dual": (sf.oracles.gauss_newton, {"method": "dual"}),
    "conjugate": (sf.oracles.newton, {"method": "cg", "kappa": 0.5}),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gauss_newton": (GaussNewton, {"solver": "dual", "adapt": False}),
    "newton": (Newton, {"solver": "cg", "weight_decay": 0.01, "adapt": False}),
}
DOMAINS: dict[str, dict[str, Any]] = {
    "longest": {"objective": sf.CrossEntropy()},
    "ridge": {"objective": sf.CrossEntropy(), "regularizer": sf.Ridge(0.1), "domain": sf.Ball(0.02)},
    "outputs": {"domain": sf.Ball(0.1)},
    "weights": {"objective": sf.CrossEntropy(), "domain": sf.Ball(0.0)},
}
STEPS = 3


def directions(network: nn.Module, part: Part, **group: Any) -> dict[str, Any]:
    """Of all oracles, with the decrease of the model, κ and the calls."""
    x, y = part
    chain, loss = sf.Chain(network, x if len(y) else []), sf.CrossEntropy(y)
    found = {}
    for name, (oracle, options) in ORACLES.items():
        step = oracle(chain, loss, **options, **group)
        direction = {path: value.detach() for path, value in step.direction.items()}
        found[name] = direction, step.model_decrease, step.kappa, step.calls
    return found


def trained(network: nn.Module, part: Part, **group: Any) -> dict[str, Any]:
    """Weights, losses, and the bytes sent after some steps."""
    x, y = part
    found = {}
    for name, (optimizer, options) in OPTIMIZERS.items():
        model = copy.deepcopy(network)
        training = optimizer(model, sf.CrossEntropy(), **options, **group)
        losses = [training.step(x, y) for _ in range(STEPS)] + [training.value(x, y)]
        weights = {path: value.detach() for path, value in model.named_parameters()}
        sent = 0 if training.processes is None else training.processes.sent
        found[name] = weights, losses, sent, repr(training.history)
    return found


def proved(network: nn.Module, *data: Any, **group: Any) -> tuple[Any, ...]:
    """Weights, losses and proved decreases of Gauss-Newton steps."""
    model = copy.deepcopy(network)
    training = GaussNewton(
        model, sf.CrossEntropy(), solver="dual", adapt=False, proof="evaluation", weight_decay=0.01, **group
    )
    given = data[0] if isinstance(data[0], tuple) else data
    losses = [training.step(*given) for _ in range(2)]
    losses.append(training.value(*given))
    weights = {path: value.detach() for path, value in model.named_parameters()}
    return weights, losses, [record.proved_decrease for record in training.history]


def calls(model: nn.Module, loader: Any, **group: Any) -> dict[str, Any]:
    """Everything that takes a loader."""
    loss = sf.CrossEntropy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "evaluate": lambda: sf.evaluate(model, loader, loss, **group),
        "certify": lambda: sf.certify(model, loader, objective=loss, domain=sf.Ball(0.02), **group),
        "convergence": lambda: sf.convergence(model, loader, loss, method="newton", **group),
        "gradient": lambda: sf.oracles.gradient(sf.Chain(model, loader), loss, **group),
        **{
            f"gauss_newton, {method}": partial(_gauss_newton, model, loader, method=method, **group)
            for method in ("auto", "dual")
        },
        "newton": lambda: sf.oracles.newton(sf.Chain(model, loader), loss, kappa=1.0, method="cg", **group),
        "CertifiedDescent": lambda: sf.CertifiedDescent(model, loss, **group).step(loader),
        "GaussNewton": lambda: GaussNewton(model, loss, **group).step(loader),
        "KeepIfLower": lambda: KeepIfLower(model, optimizer, loss, loader, **group)(),
    }


def _gauss_newton(model: nn.Module, loader: Any, **options: Any) -> Any:
    return sf.oracles.gauss_newton(sf.Chain(model, loader), sf.CrossEntropy(), **options)


def certificates(network: nn.Module, parts: list[Part], names: list[str], **group: Any) -> dict[str, Any]:
    """On batches of eight samples of each part."""
    batches = [batch for x, y in parts if len(y) for batch in zip(x.split(8), y.split(8), strict=True)]
    found = {name: sf.certify(network, batches, **DOMAINS[name], **group).to_dict() for name in names}
    return {name: {key: value for key, value in one.items() if key != "digest"} for name, one in found.items()}


def verdict(part: Part, model: nn.Module | None = None, **group: Any) -> tuple[Any, ...]:
    """Whether Gauss-Newton steps of a small network are proved to fit the data."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)).double() if model is None else model
    with torch.no_grad():
        targets = model(part[0]) + 1e-3
    found = sf.convergence(model, part[0], sf.Square(targets), **group)
    return found.proved, found.theorem, [one.value for one in found.hypotheses]


def mini_batches(part: Part, size: int) -> list[Part]:
    """The loader of a process."""
    return list(zip(part[0].split(size), part[1].split(size), strict=True)) if len(part[1]) else []


def checks(network: nn.Module, batches: list[Part], **group: Any) -> tuple[Any, ...]:
    """Weights, values and decisions where weights are multiplied by one factor after the other."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)
    keep = KeepIfLower(network, optimizer, sf.CrossEntropy(), batches, **group)
    for factor in (1.1, -1.0, 0.9, 1.05, 3.0):
        with torch.no_grad():
            for value in network.parameters():
                value.mul_(factor)
        keep()
    weights = {path: value.detach() for path, value in network.named_parameters()}
    return weights, [record.value for record in keep.history], [record.accepted for record in keep.history]


def sent(network: nn.Module, part: Part, group: Any) -> list[int]:
    """Bytes that this process hands over: a pull-back, a push-forward, and a certificate
    at the weights.
    """
    x, y = part
    processes = Processes(group)
    problem = Problem(sf.Chain(network, x if len(y) else []), sf.CrossEntropy(y), None, None, processes)
    asked: list[Any] = [
        lambda: problem.autodiff.pullback(problem.slope),
        lambda: problem.autodiff.pushforward(problem.parameters),
    ]
    found = []
    for ask in asked:
        before = processes.sent
        processes.led(lambda ask=ask: ask() is None, problem.serve)  # type: ignore[misc]
        found.append(processes.sent - before)
    batches, before = Batches([(x, y)] if len(y) else [], ordered=True), processes.sent
    InPieces(network, batches, sf.CrossEntropy(), processes=processes).certify(sf.Ball(0.0))
    found.append(processes.sent - before)
    return found


def stored(optimizer: Any) -> bytes:
    """The state of an optimizer, that of process 0 on all, as torch.distributed.checkpoint keeps it."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue() if optimizer.processes is None else optimizer.processes.tell(file.getvalue())


def checkpointed(network: nn.Module, part: Part, folder: str, group: Any = None) -> None:
    """Some steps, then a checkpoint."""
    model = copy.deepcopy(network)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), group=group)
    for _ in range(STEPS):
        optimizer.step(*part)
    state = {"model": model.state_dict(), "optimizer": stored(optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which it is, where there is no group
        checkpoint.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)


def resumed(network: nn.Module, part: Part, folder: str, group: Any = None) -> tuple[list[float], int]:
    """Losses of the next steps, and how many there were in all."""
    model = copy.deepcopy(network)
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy(), group=group)
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": b""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        checkpoint.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(torch.load(io.BytesIO(state["optimizer"])))
    return [optimizer.step(*part) for _ in range(2)], len(optimizer.history)


def asked_of(size: int) -> list[str]:
    """Which domains are asked for: processor time is short."""
    return list(DOMAINS) if size == 2 else ["ridge"]


def answers(network: nn.Module, part: Part, group: Any, size: int) -> dict[str, Any]:
    """All of these, on one process of a group."""
    x, y = part
    return {
        "directions": directions(network, part, group=group),
        "trained": trained(network, part, group=group),
        "proved": proved(network, part, group=group),
        "certificates": certificates(network, [part], asked_of(size), group=group),
        "checks": checks(copy.deepcopy(network), mini_batches(part, 5), group=group),
        "sent": sent(network, part, group),
        "verdict": verdict((x[:2], y[:2]), group=group),
    }
