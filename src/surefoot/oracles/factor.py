r"""The curvature of a loss as a product: :math:`\nabla^2h(\psi(u)) = RR^\top`.

A loss is a sum over the rows of the output, so R has one block :math:`R_i` (outputs × columns) per row i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.objectives import CrossEntropy, Objective, Square
from surefoot.objectives.separable import SeparableLoss
from surefoot.oracles.problem import OracleError, Problem, curved_along

_LARGEST = 1e4  # entries of w̄: a target of probability 1e-8 among them


@dataclass(frozen=True)
class Factor:
    """R, block by block.

    Attributes:
        blocks: samples × outputs × columns; or one number c, if every block is c times the identity.
        shape: of the output.
        slope: a vector w̄ with Rw̄ = ∇h, samples × columns; ``None`` where there is none that is not huge.
    """

    blocks: Tensor | float
    shape: torch.Size
    slope: Tensor | None = None

    @property
    def samples(self) -> int:
        """How many rows the output has."""
        return self.shape[0]

    @property
    def outputs(self) -> int:
        """How many numbers a row of the output has."""
        return self.shape.numel() // max(self.shape[0], 1)

    @property
    def columns(self) -> int:
        """How many columns a block has: at least the rank of the curvature of one row."""
        return self.blocks.shape[2] if isinstance(self.blocks, Tensor) else self.outputs

    def forth(self, z: Tensor) -> Tensor:
        """Rz, of the shape of the output, for z of samples × columns."""
        if not isinstance(self.blocks, Tensor):
            return (self.blocks * z).reshape(self.shape)
        return torch.bmm(self.blocks, z.unsqueeze(2)).reshape(self.shape)

    def back(self, output: Tensor) -> Tensor:
        """Rᵀ of something of the shape of the output: samples × columns."""
        rows = output.reshape(self.samples, self.outputs)
        if not isinstance(self.blocks, Tensor):
            return self.blocks * rows
        return torch.bmm(rows.unsqueeze(1), self.blocks).squeeze(1)

    def slopes(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Column j of every block, of the shape of the output, for all j."""
        blocks = self.blocks
        if not isinstance(blocks, Tensor):
            eye = torch.eye(self.outputs, dtype=dtype, device=device) * blocks
            blocks = eye.expand(self.samples, self.outputs, self.outputs)
        return [blocks[:, :, j].to(dtype).reshape(self.shape) for j in range(self.columns)]


def factor_of(problem: Problem, dtype: torch.dtype) -> Factor:
    r"""R at the output of the problem, in the given precision.

    * Square: :math:`\nabla^2h = cI`, with a number c that depends on how it is averaged.
    * CrossEntropy: row i is :math:`m_i` times the logistic loss of a distribution. With the probabilities p of the
      row and :math:`s = \sqrt p`, a unit vector: :math:`\mathrm{diag}(p) - pp^\top = \mathrm{diag}(s)(I -
      ss^\top)\mathrm{diag}(s)`, and :math:`I - ss^\top = UU^\top` for an orthonormal basis U of the complement of
      s: all but the first column of the reflection :math:`I - uu^\top/(1 + s_1)`, :math:`u = s + e_1`, which takes
      s to :math:`-e_1` (its first column is :math:`-s`). So :math:`R_i = \sqrt{m_i}\,\mathrm{diag}(s)U`, one
      column less than classes; and :math:`R_i\bar w_i = g_i` for :math:`\bar w_i = U^\top(g_i/s)/\sqrt{m_i}`,
      because the entries of :math:`g_i` add up to 0, so that :math:`g_i/s` is orthogonal to s.
    * a sum over the entries: the Hessian is diagonal, and so is R.
    * any other loss: the second derivative of each row, by its eigenvalues; what is negative beyond round-off is
      refused. That it is a sum over the rows is checked on one vector that has no entry zero.

    Raises:
        OracleError: if the loss is not convex, or not a sum over the rows.
    """
    output, objective = problem.output, problem.objective
    require_convex(objective)
    slope = problem.slope.to(dtype).reshape(output.shape[0], -1)
    if type(objective) is Square:
        root = (
            float(curved_along(objective, output.double(), torch.ones_like(output).double()).flatten()[0]) ** 0.5
        )
        return Factor(root, output.shape, slope / root)
    if type(objective) is CrossEntropy and output.dim() == 2 and output.shape[1] > 1:
        mass = _masses(objective, output).to(dtype).unsqueeze(1)
        root = torch.softmax(output.to(dtype), dim=1).sqrt()
        u = root.clone()
        u[:, 0] += 1
        eye = torch.eye(output.shape[1], dtype=dtype, device=output.device)
        basis = (eye - u.unsqueeze(2) * (u / u[:, :1]).unsqueeze(1))[:, :, 1:]
        blocks = ((root * mass.sqrt()).unsqueeze(2) * basis).contiguous()
        ratio = torch.where(mass > 0, slope / (root * mass.sqrt()), 0.0)
        modest = bool(ratio.abs().max() < _LARGEST)  # not if it is NaN either, where a probability is zero
        start = torch.bmm(ratio.unsqueeze(1), basis).squeeze(1) if modest else None
        return Factor(blocks, output.shape, start)
    if isinstance(objective, SeparableLoss):
        form = objective.form(objective.chosen().to(output.device), output.shape, **objective.options)
        roots = form.curvatures(output.double()).clamp(min=0.0).sqrt().to(dtype).reshape(slope.shape)
        ratio = torch.where(slope == 0, 0.0, slope / roots)
        return Factor(torch.diag_embed(roots), output.shape, ratio if bool(ratio.abs().max() < _LARGEST) else None)
    return _by_eigenvalues(problem, dtype)


def _masses(objective: Objective, output: Tensor) -> Tensor:
    r"""The :math:`m_i` of a cross-entropy with k classes, whatever its options.

    They do not depend on the output; at 0 all probabilities are 1/k, the curvature of row i is
    :math:`m_i(I/k - \mathbf 1\mathbf 1^\top/k^2)` and takes :math:`e_1 - e_2` to :math:`m_i/k` times itself.
    """
    direction = torch.zeros_like(output, dtype=torch.float64)
    direction[:, 0], direction[:, 1] = 1.0, -1.0
    return output.shape[1] * curved_along(objective, torch.zeros_like(direction), direction)[:, 0].clamp_min(0.0)


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
    output = problem.output
    n, k = output.shape[0], output.numel() // output.shape[0]
    units = torch.eye(k, dtype=output.dtype, device=output.device).unsqueeze(1).expand(k, n, k)
    columns = [problem.curve(unit.reshape(output.shape)).reshape(n, k) for unit in units]
    blocks = torch.stack(columns, dim=2).double()
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    slack = torch.finfo(output.dtype).eps ** 0.75 * float(values.abs().max())
    refuse_negative(problem.objective, float(values.min()), slack)
    factor = Factor((vectors * values.clamp_min(0).sqrt().unsqueeze(1)).to(dtype), output.shape)
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).cos()
    probe = probe.reshape(output.shape)
    expected = problem.curve(probe).to(dtype)
    if float((factor.forth(factor.back(probe.to(dtype))) - expected).abs().max()) > 10 * k * slack:
        raise OracleError(
            f"{type(problem.objective).__name__} is not a sum over the rows of the output: use method='dynamic'"
        )
    return factor


__all__ = ["Factor", "factor_of", "refuse_negative", "require_convex"]
