r"""The curvature of the loss of a problem as a product: :math:`\nabla^2h(\psi(u)) = RR^\top`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from surefoot.objectives import Objective
from surefoot.operations.losses import Factor
from surefoot.operations.record import records
from surefoot.oracles.problem import OracleError, Problem, slope_at


class RowsMeet(OracleError):
    """The loss is not a sum over the rows of the output."""


def factor_of(problem: Problem, dtype: torch.dtype, slope: bool = True) -> Factor:
    r"""R at the output of the problem, in the given precision; with w̄, :math:`R\bar w = \nabla h`, if asked for.

    It is that of the loss's record, if there is one. For any other loss it comes from the eigenvalues of the
    second derivative of each row; what is negative beyond round-off is refused. That the loss is a sum over the
    rows is checked on one vector that has no entry zero.

    Raises:
        OracleError: if the loss is not convex, or not a sum over the rows.
    """
    output, objective = problem.output, problem.objective
    require_convex(objective)
    stated = states_factor(objective)
    if stated is not None:
        targets = objective.chosen().to(output.device)
        rows, marks = objective.arranged(output, targets)
        flat = None
        if slope:
            fine = problem.slope if output.dtype == dtype else slope_at(objective, output).to(dtype)
            flat = objective.arranged(fine, targets)[0].reshape(rows.shape[0], -1)
        factor: Factor | None = stated(rows.to(dtype), marks, flat, **objective.options)
        if factor is not None and rows is not output:
            places = torch.arange(output.numel(), device=output.device).reshape(output.shape)
            factor = factor.gathered(objective.arranged(places, targets)[0], output.shape)
        if factor is not None:
            return factor
    return _by_eigenvalues(problem, dtype)


def columns_of(problem: Problem) -> int | None:
    """How many columns each block of R has; ``None`` where the loss is no sum over the rows of the output."""
    require_convex(problem.objective)
    try:
        return factor_of(problem, problem.output.dtype, slope=False).columns
    except RowsMeet:
        return None


def states_factor(objective: Objective) -> Callable[..., Factor | None] | None:
    """The factor that the record of the loss states, if the loss is that of the record."""
    record = records().get(objective.operation)
    if record is None or record.loss is None or not type(objective).function.__module__.startswith("surefoot."):
        return None
    return record.factor


def require_convex(objective: Objective) -> None:
    """Refuse a loss whose class says that it is not convex; where none says anything, its curvature is looked at.

    Raises:
        OracleError: in that case.
    """
    if not objective.convex and "convex" in {
        name
        for kind in type(objective).__mro__[:-1]
        if issubclass(kind, Objective) and kind is not Objective
        for name in vars(kind)
    }:
        raise OracleError(
            f"{type(objective).__name__} is not convex, so its Gauss-Newton model may have no minimum: use a "
            "Newton or a gradient oracle"
        )


def refuse_negative(problem: Problem, lowest: float, largest: float) -> float:
    """Refuse a loss with this lowest curvature at the present output, if that is not round-off.

    Round-off is relative to the largest curvature, and to what its slope changes by over the size of the output:
    where the loss is nearly linear, both curvatures are round-off. The slack is returned.

    Raises:
        OracleError: in that case.
    """
    output = problem.output
    linear = float(problem.slope.abs().max()) / max(float(output.abs().max()), torch.finfo(output.dtype).tiny)
    slack = torch.finfo(output.dtype).eps ** 0.75 * max(largest, linear)
    if lowest < -slack:
        raise OracleError(
            f"{type(problem.objective).__name__} is not convex at this output (a curvature of {lowest:.3g}): the "
            "Gauss-Newton model may have no minimum"
        )
    return slack


def _by_eigenvalues(problem: Problem, dtype: torch.dtype) -> Factor:
    """Sign tests and differences are relative to the largest curvature that occurs, of one row or across rows."""
    output = problem.output
    n = output.shape[0] if output.dim() else 1
    k = output.numel() // n
    units = torch.eye(k, dtype=output.dtype, device=output.device).unsqueeze(1).expand(k, n, k)
    columns = [problem.curve(unit.reshape(output.shape)).reshape(n, k) for unit in units]
    blocks = torch.stack(columns, dim=2).double()
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    factor = Factor(1.0, output.shape, blocks=(vectors * values.clamp_min(0).sqrt().unsqueeze(1)).to(dtype))
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    probe = probe.reshape(output.shape)
    expected = problem.curve(probe).to(dtype)
    largest = max(float(values.abs().max()), float(expected.abs().max()))
    slack = refuse_negative(problem, float(values.min()), largest)
    if float((factor.curved(probe.to(dtype)) - expected).abs().max()) > 10 * k * slack:
        raise RowsMeet(
            f"{type(problem.objective).__name__} is not a sum over the rows of the output: use method='dynamic'"
        )
    return factor
