r"""The curvature of the loss of a problem as a product: :math:`\nabla^2h(\psi(u)) = RR^\top`."""

from __future__ import annotations

import torch

from surefoot.objectives import Objective
from surefoot.operations.losses import Factor
from surefoot.operations.record import records
from surefoot.oracles.problem import OracleError, Problem


def factor_of(problem: Problem, dtype: torch.dtype) -> Factor:
    r"""R at the output of the problem, in the given precision.

    It is that of the loss's record, if there is one. For any other loss it comes from the eigenvalues of the
    second derivative of each row; what is negative beyond round-off is refused. That the loss is a sum over the
    rows is checked on one vector that has no entry zero.

    Raises:
        OracleError: if the loss is not convex, or not a sum over the rows.
    """
    output, objective = problem.output, problem.objective
    require_convex(objective)
    record = records().get(objective.operation)
    stated = record is not None and record.loss is not None and type(objective).function is record.loss.function
    if record is not None and record.factor is not None and stated:
        targets = objective.chosen().to(output.device)
        rows, marks = objective.arranged(output, targets)
        slope = objective.arranged(problem.slope.to(dtype), targets)[0]
        factor: Factor | None = record.factor(rows, marks, slope.reshape(rows.shape[0], -1), **objective.options)
        if factor is not None and rows is not output:
            places = torch.arange(output.numel(), device=output.device).reshape(output.shape)
            factor = factor.gathered(objective.arranged(places, targets)[0], output.shape)
        if factor is not None:
            return factor
    return _by_eigenvalues(problem, dtype)


def require_convex(objective: Objective) -> None:
    """Refuse a loss that says it is not convex.

    Raises:
        OracleError: in that case.
    """
    if not getattr(objective, "convex", True):
        raise OracleError(
            f"{type(objective).__name__} is not convex, so its Gauss-Newton model may have no minimum: use a "
            "Newton or a gradient oracle"
        )


def refuse_negative(objective: Objective, lowest: float, slack: float) -> None:
    """Refuse a loss with this lowest curvature at the present output, if that is not round-off.

    Raises:
        OracleError: in that case.
    """
    if lowest < -slack:
        raise OracleError(
            f"{type(objective).__name__} is not convex at this output (a curvature of {lowest:.3g}): the "
            "Gauss-Newton model may have no minimum"
        )


def _by_eigenvalues(problem: Problem, dtype: torch.dtype) -> Factor:
    """Sign tests and differences are relative to the largest curvature that occurs, of one row or across rows."""
    output = problem.output
    n, k = output.shape[0], output.numel() // output.shape[0]
    units = torch.eye(k, dtype=output.dtype, device=output.device).unsqueeze(1).expand(k, n, k)
    columns = [problem.curve(unit.reshape(output.shape)).reshape(n, k) for unit in units]
    blocks = torch.stack(columns, dim=2).double()
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    factor = Factor((vectors * values.clamp_min(0).sqrt().unsqueeze(1)).to(dtype), output.shape)
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    probe = probe.reshape(output.shape)
    expected = problem.curve(probe).to(dtype)
    largest = max(float(values.abs().max()), float(expected.abs().max()))
    slack = torch.finfo(output.dtype).eps ** 0.75 * largest
    refuse_negative(problem.objective, float(values.min()), slack)
    if float((factor.forth(factor.back(probe.to(dtype))) - expected).abs().max()) > 10 * k * slack:
        raise OracleError(
            f"{type(problem.objective).__name__} is not a sum over the rows of the output: use method='dynamic'"
        )
    return factor


__all__ = ["Factor", "factor_of", "refuse_negative", "require_convex"]
