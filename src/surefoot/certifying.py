"""``surefoot.certify``: proved constants, or Algorithm 4 as printed; ``surefoot.evaluate``: values with errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from surefoot.batches import Batches
from surefoot.calculus.leaves import ordinary_device
from surefoot.certificate import Certificate
from surefoot.certificate.pieces import InPieces
from surefoot.certificate.proving import certify_proved
from surefoot.domains import Ball, Box, Domain, DomainError, ProductBall, Segment
from surefoot.errors import UnsupportedOperation
from surefoot.lower import curvature_at_weights
from surefoot.objectives import ObjectiveError, Regularizer, as_objective
from surefoot.paper.reader import certify_as_printed
from surefoot.processes import Processes
from surefoot.program.checks import is_loader, plainly, unwrapped
from surefoot.valuation.streamed import StreamedValuer
from surefoot.valuation.valuer import EvaluationError, Valuer
from surefoot.value import Evaluation
from surefoot.value import Valuer as ValuerOfProgram


@plainly
def certify(
    model: nn.Module,
    x: Any,
    objective: nn.Module | None = None,
    *,
    y: Any = None,
    domain: Domain | Box | Segment | None = None,
    wrt: Literal["params", "input"] = "params",
    input_norm: float | None = None,
    regularizer: Regularizer | None = None,
    constants: Literal["certified", "paper"] = "certified",
    effort: Literal["quick", "normal", "high"] = "normal",
    group: Any = None,
) -> Certificate:
    r"""Bound, Lipschitz constant and smoothness of a model's output over a domain, proved.

    Args:
        model: any module that can be captured; on the ``meta`` device nothing is allocated.
        x: a batch; the certificate speaks of the stacked outputs of this batch. Or any re-iterable of batches
            ``(x, y)`` such as a ``DataLoader``: then it speaks of all of them together, in the memory of one. Its
            constants are those of the batches added up (:mod:`surefoot.certificate.pieces`), so that they hold for
            the joined batch; they may be larger or smaller than what is proved of that at once.
        objective: certify this function of the outputs instead: a loss bound to its targets, such as
            ``surefoot.CrossEntropy(y)``, a loss of torch.nn, or any module that maps the outputs to one number.
        y: the targets of the objective, if it has none yet.
        domain: where the variables may be. By default, for a real-valued function, the ball around the weights on
            which the longest gradient step can be proved (:mod:`surefoot.certificate.proving`); otherwise
            every parameter block within 1 of the origin, or with ``wrt="input"`` the input within 1 of the origin.
        wrt: what varies: the parameters, or the input for fixed parameters (Corollary smooth_state).
        input_norm: use this bound on the norm of the stacked batch instead of the data; required on ``meta``.
        effort: what a certificate of an objective may cost. ``"quick"``: products of norms, about ten gradients
            for each ball that is tried. ``"normal"``: sharper where samples do not interact and linear layers are
            not too many and too wide, and for small models of any kind, up to some thousand gradients.
            ``"high"``: the same for wider layers, and on balls around the weights, if at most 12,000 numbers vary,
            exact derivatives at the weights along each of them, about ten gradients for each
            (:mod:`surefoot.calculus.effort`); the step size is then proved on the segment against the gradient as
            well, a few hundred gradients. The certificate says the cost.
        regularizer: a smooth function of the parameters that is added to the objective, such as
            ``surefoot.Ridge(1e-4)``.
        constants: ``"certified"``, or ``"paper"`` for Algorithm 4 as printed, with the paper's constants.
        group: a process group of ``torch.distributed`` whose processes have a part of the data each, none at all
            allowed, and the same weights: all of them call this, and all get the certificate for all data.

    Returns:
        The certificate; its smoothness may be infinite, and then it says which operation is to blame.

    Raises:
        CaptureError: if the model cannot be read.
        UnsupportedOperation: if an operation has no rule.
        DomainError: if the domain does not fit.
        ObjectiveError: if the objective does not fit the outputs.

    >>> model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh()), torch.eye(2)
    >>> sf.certify(model, x, sf.CrossEntropy(torch.tensor([0, 1]))).step_size > 0
    True
    """
    model = unwrapped(model)
    if objective is not None:
        objective = as_objective(objective, y)
    elif y is not None and group is None:
        raise ObjectiveError("targets are those of an objective: pass objective=surefoot.CrossEntropy(y)")
    if not isinstance(domain, ProductBall | Ball | Box | Segment | None):
        raise DomainError(
            "the domain is a set, such as surefoot.Ball(0.1) around the weights or surefoot.ProductBall(1.0), not "
            f"{domain!r}"
        )
    if is_loader(x) or group is not None:
        if constants == "paper" or wrt != "params" or input_norm is not None:
            raise DomainError("constants='paper', wrt='input' and input_norm are about one batch: pass a tensor")
        processes = None if group is None else Processes(group)

        def read() -> InPieces:
            loader, loss = _part(x, objective, y)
            return InPieces(model, Batches(loader, ordered=True), loss, regularizer, effort, processes)

        return (read() if processes is None else processes.together(read)).certify(domain)
    if constants != "paper":
        options: dict[str, Any] = {"wrt": wrt, "input_norm": input_norm, "regularizer": regularizer}
        certificate = certify_proved(model, x, objective=objective, domain=domain, effort=effort, **options)
        return _with_curvature(certificate, model, x, objective)
    domain = ProductBall(1.0) if domain is None else domain
    if wrt not in ("params", "input"):
        raise DomainError(f"wrt is 'params' or 'input', got {wrt!r}")
    if isinstance(domain, Segment | Box):
        raise DomainError("the paper's algorithm is for balls: use ProductBall, Ball, or constants='certified'")
    if objective is not None or regularizer is not None:
        raise ObjectiveError(
            "the paper's constants of an objective follow from those of the network by Prop. smoothobj: "
            "certify the network, then use surefoot.paper.objective"
        )
    with ordinary_device():
        return certify_as_printed(model, x, domain=domain, wrt=wrt, input_norm=input_norm)


_PRODUCTS = {"quick": 3, "normal": 5, "high": 8}  # with the Hessian, about two gradients each


def _with_curvature(
    certificate: Certificate, model: nn.Module, x: Any, objective: nn.Module | None
) -> Certificate:
    """With an estimate of the curvature at the weights, where the certificate speaks of steps from there."""
    steps = certificate.block_gradients and certificate.radius is not None and certificate.inverse_smoothness
    if not steps or objective is None or certificate.wrt != "params" or certificate.regularizer:
        return replace(certificate, curvature=None)
    if certificate.curvature is not None:
        return certificate
    with ordinary_device():
        curvature = curvature_at_weights(model, x, objective, _PRODUCTS[certificate.effort])
    return certificate if curvature is None else replace(certificate, curvature=curvature)


@plainly
def evaluate(
    model: nn.Module, x: Any, objective: nn.Module, y: Any = None, group: Any = None, *, atol: float = 0.0
) -> Evaluation:
    r"""The value of an objective in exact arithmetic, at the weights as they are stored: value ± error.

    All operations are run in double precision, whatever the type of the model (but see ``atol``), and the
    round-off of every one of them is bounded and carried to the result by reverse mode
    (:mod:`surefoot.valuation.propagation`), so that depth does not multiply it. The function is the real one that
    the model stands for: single-precision weights are exact numbers, activations are exact functions.

    Args:
        model: the network; it is not changed, and its buffers do not move.
        x: a batch: a tensor, a tuple of tensors or a dict of keyword arguments; or any re-iterable of batches
            ``(x, y)`` such as a ``DataLoader``, for the mean over all samples.
        objective: a loss bound to its targets, ``surefoot.CrossEntropy(y)``, or a loss of torch.nn; without
            targets where the batches bring them.
        y: the targets of the objective, if it has none yet.
        group: a process group of ``torch.distributed`` whose processes have a part of the data each, none at all
            allowed, and the same weights: all of them call this, and all get the value for all samples together.
            A few hundred bytes cross per process.
        atol: an error that is small enough. A model of single precision, or less, is then evaluated in single
            precision first, in about half the time, and in double if the error is larger. With a group always in
            double.

    Raises:
        CaptureError: if the model cannot be read.
        ObjectiveError: if the objective does not fit.
        ProcessError: if another process of the group failed or does not answer.
        UnsupportedOperation: naming an operation whose error is not known.
        EvaluationError: if the value is not finite, or no error can be proved.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> value = sf.evaluate(model, torch.randn(16, 4), sf.CrossEntropy(torch.arange(16) % 3))
    >>> value.error < 1e-13
    True
    """
    valuer: StreamedValuer | Valuer
    processes = None if group is None else Processes(group)
    model = unwrapped(model)
    weights = dict(model.named_parameters())
    single = atol > 0
    if processes is not None:
        parts: StreamedValuer = processes.together(lambda: _of_part(model, x, objective, y, processes))
        valuer, evaluation = parts, parts.evaluate(weights, derivatives=True, summed=False).evaluation
    elif is_loader(x):
        valuer = StreamedValuer(model, x, as_objective(objective, y))
        evaluation = valuer.evaluate(weights, derivatives=True, single=single, summed=False).evaluation
        if single and evaluation.error > atol:
            evaluation = valuer.evaluate(weights, derivatives=True, summed=False).evaluation
    else:
        valuer = Valuer.of(model, x, as_objective(objective, y), single=single)
        evaluation = valuer.evaluate(weights, atol)
        if not evaluation.error <= max(atol, _VAGUE * (1 + abs(evaluation.value))):
            evaluation = _sharper(model, x, as_objective(objective, y), evaluation)
    if not math.isfinite(evaluation.error):
        where = valuer.obstacle or "an operation"
        raise EvaluationError(
            f"no error of the value {evaluation.value:g} can be proved: {where} is too steep here, or jumps"
        )
    return evaluation


def _sharper(model: nn.Module, x: Any, objective: nn.Module, known: Evaluation) -> Evaluation:
    """The value by errors of the entries of a program, where its operations have such and they are smaller."""
    try:
        evaluation = ValuerOfProgram.of(model, x, objective).evaluate(dict(model.named_parameters()))
    except (UnsupportedOperation, EvaluationError):
        return known
    return evaluation if evaluation.error < known.error else known


_VAGUE = 1e-6  # an error, relative to the value, that is looked at more closely


def _of_part(model: nn.Module, x: Any, objective: nn.Module, y: Any, processes: Processes) -> StreamedValuer:
    """The certificate for all data, a part of which is here: a loader, or one batch with its targets."""
    loader, given = _part(x, as_objective(objective, y), y)
    return StreamedValuer(model, loader, given, processes)


def _part(x: Any, objective: Any, y: Any) -> tuple[Any, Any]:
    """Batches with their targets and the objective without: a loader, or one batch, which may be empty."""
    if is_loader(x):
        return x, objective
    targets = y if objective is None else getattr(objective, "targets", None)
    if targets is None:
        raise ObjectiveError("a part of the data has its targets: pass y, or a loader of batches (x, y)")
    return [(x, targets)] if len(targets) else [], objective if objective is None else objective.bound_to(None)
