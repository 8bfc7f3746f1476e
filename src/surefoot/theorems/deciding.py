"""``surefoot.convergence``: which theorem applies from the present weights, on which ball."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from surefoot.batches import Batches, digest_of, refuse_other_models, refuse_statistics
from surefoot.calculus.leaves import ordinary_device
from surefoot.guarantees import GuaranteeError
from surefoot.objectives import Objective, Ridge, Square
from surefoot.processes import Processes
from surefoot.program.checks import is_loader, plainly, unwrapped
from surefoot.theorems.curvature import DENSE, Regularised
from surefoot.theorems.network import Network
from surefoot.theorems.record import METHODS, Convergence
from surefoot.theorems.search import descent, interpolation, strongly_convex

Method = Literal["gauss_newton", "gradient", "momentum", "newton"]


@plainly
def convergence(
    model: nn.Module,
    x: Any,
    objective: nn.Module,
    regularizer: Ridge | None = None,
    method: Method = "gauss_newton",
    *,
    group: Any = None,
) -> Convergence:
    """Whether a method is proved to converge from the present weights, to what and how fast.

    Args:
        model: the network; it is not changed.
        x: all the data of the objective as one batch; or any re-iterable of batches ``(x, y)``, which are joined.
        objective: a loss bound to its targets; without targets where the batches bring them.
        regularizer: a ridge that is added to the objective.
        method: ``"gauss_newton"`` (square loss: to an exact solution), ``"gradient"`` (to zero loss, or to a
            strict local minimum), ``"momentum"`` (to zero loss, the steps of ``torch.optim.SGD`` with momentum),
            ``"newton"`` (to a strict local minimum).
        group: a process group of ``torch.distributed``. Each process has a part of the data, possibly none, and
            all have the same weights and call this function. Process 0 gets the data and decides, and all get its
            verdict.

    Returns:
        The verdict with its theorem, the verified numbers, and what is missing where it is not proved.

    Raises:
        GuaranteeError: if no theorem covers this method and objective.
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.

    >>> model, x = nn.Linear(2, 1).double(), torch.eye(2).double()
    >>> verdict = sf.convergence(model, x, sf.Square(torch.zeros(2, 1)))
    >>> verdict.proved, verdict.iterations(1e-20)
    (True, 1)
    """
    if method not in METHODS:
        raise GuaranteeError(f"the method is one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if not isinstance(objective, Objective) or not objective.takes_targets:
        raise GuaranteeError(
            "convergence is proved for losses of surefoot that are bound to targets, such as surefoot.Square(y), "
            f"got {objective!r}"
        )
    if regularizer is not None and not isinstance(regularizer, Ridge):
        raise GuaranteeError(f"the theorems know a surefoot.Ridge or no regulariser, got {regularizer!r}")
    model = unwrapped(model)
    interpolates = isinstance(objective, Square) and regularizer is None
    if not interpolates and method not in ("gradient", "newton"):
        raise GuaranteeError(
            f"the theorem about {METHODS[method]} is about exact solutions: surefoot.Square without a "
            "regulariser. For other objectives use method='newton' or method='gradient'"
        )
    loss = objective

    def batches() -> list[tuple[Any, Tensor]]:
        if is_loader(x):
            return [(inputs, targets) for _, inputs, targets in Batches(x, ordered=True)]
        targets = loss.chosen()  # refuses a loss without targets
        return [(x, targets)] if len(targets) else []

    def decided(parts: list[tuple[Any, Tensor]]) -> Convergence:
        inputs, targets = parts[0] if len(parts) == 1 else Batches(parts).joined()
        network = Network(model, inputs, loss.bound_to(targets))
        if len(parts) > 1:
            refuse_statistics(network.analysis.reading.graph)
        return _decided(network, regularizer, method, interpolates)

    with ordinary_device():
        if group is None:
            return decided(batches())
        processes = Processes(group)
        tensors = [*model.parameters(), *model.buffers()]
        refuse_other_models(processes.gathered(lambda: digest_of(tensors)))
        everyone = [part for parts in processes.collected(batches) for part in parts]
        verdict: Convergence = processes.led(lambda: decided(everyone), lambda word: None, GuaranteeError)
        return verdict


def _decided(network: Network, regularizer: Ridge | None, method: Method, interpolates: bool) -> Convergence:
    """The verdict of the theorem that applies, or of the one that is nearest to applying."""
    if method == "gauss_newton":
        return interpolation(network)
    if method == "newton" or not interpolates:
        return strongly_convex(Regularised(network, regularizer), method)
    first = descent(network, method)
    if first.proved or method != "gradient" or network.parameters > DENSE:
        return first
    second = strongly_convex(Regularised(network, None), method)
    return second if second.proved or second.missing < first.missing else first
