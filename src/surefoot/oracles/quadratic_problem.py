r"""The linear-quadratic problem of a chain around a point (Prop. lin_quad).

Gradient, Gauss-Newton and Newton steps all minimise

.. math:: \sum_{t=1}^\tau \tfrac12y_t^\top P_ty_t + p_t^\top y_t + y_{t-1}^\top R_tv_t + \tfrac12v_t^\top Q_tv_t
          + q_t^\top v_t + \tfrac\kappa2\|v_t\|^2
          \quad\text{subject to}\quad y_t = A_ty_{t-1} + B_tv_t, \ y_0 = 0;

they differ in P, Q and R. This is the problem to look at; ``dynamic`` solves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.chain import Chain, Computation
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.factored import MODELS, Model
from surefoot.oracles.problem import OracleError, Problem, require_real
from surefoot.oracles.vectors import layout
from surefoot.program.checks import differentiable_attention, with_gradients

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operator:
    """A linear map between vectors.

    Attributes:
        shape: how many numbers it returns and reads.
        matvec: the product with a vector.
        rmatvec: the product of the transpose with a vector.
        dtype: type of the vectors.
        device: where they are.

    >>> turn = Operator((2, 2), lambda v: v.flip(0), lambda v: v.flip(0), torch.float64, torch.device("cpu"))
    >>> turn @ torch.tensor([1.0, 2.0]).double(), turn.T.dense()
    (tensor([2., 1.], dtype=torch.float64), tensor([[0., 1.], [1., 0.]], dtype=torch.float64))
    """

    shape: tuple[int, int]
    matvec: Apply
    rmatvec: Apply
    dtype: torch.dtype
    device: torch.device

    @property
    def T(self) -> Operator:
        """The transpose."""
        return Operator((self.shape[1], self.shape[0]), self.rmatvec, self.matvec, self.dtype, self.device)

    def __matmul__(self, vector: Tensor) -> Tensor:
        if tuple(vector.shape) != (self.shape[1],):
            rows, columns = self.shape
            raise OracleError(
                f"an operator of shape {rows}×{columns} reads a vector of {columns}, got {tuple(vector.shape)}"
            )
        return self.matvec(vector.to(self.dtype))

    def dense(self) -> Tensor:
        """The matrix, from one product per row or per column, whichever are fewer."""
        rows, columns = self.shape
        if rows < columns:
            return self.T.dense().T
        matrix = torch.zeros(rows, columns, dtype=self.dtype, device=self.device)
        for k in range(columns):
            unit = torch.zeros(columns, dtype=self.dtype, device=self.device)
            unit[k] = 1.0
            matrix[:, k] = self.matvec(unit)
        return matrix


@dataclass(frozen=True)
class LinearQuadraticLayer:
    r"""What computation t contributes.

    A state is the vector of its real tensors, one after the other in the order of ``state``; the parameters
    likewise, in the order of ``parameters``. Ids and masks in a state do not vary and are no part of it.

    Attributes:
        A: :math:`A_t`, the derivative of :math:`\phi_t` in the state.
        B: :math:`B_t`, the derivative in the parameters.
        P: :math:`P_t`, the curvature in the state after.
        p: :math:`p_t`, the slope in the state after.
        Q: :math:`Q_t`, the curvature in the parameters.
        q: :math:`q_t`, the slope of the regulariser.
        R: :math:`R_t`, the curvature between the state before and the parameters.
        costate: :math:`\lambda_t`, the slope of the loss in the state after.
        state: names of the tensors of the state after.
        parameters: paths of the parameters.
    """

    A: Operator
    B: Operator
    P: Operator
    p: Tensor
    Q: Operator
    q: Tensor
    R: Operator
    costate: Tensor
    state: tuple[str, ...]
    parameters: tuple[str, ...]


class LinearQuadratic:
    """The problem, computation by computation: ``problem[0]`` belongs to the first one, as in the chain.

    Attributes:
        layers: the computations.
        model: which model of the objective it is.
    """

    def __init__(self, layers: Sequence[LinearQuadraticLayer], model: str) -> None:
        self.layers, self.model = tuple(layers), model

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LinearQuadraticLayer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LinearQuadraticLayer:
        return self.layers[index]

    def cost(self, direction: Mapping[str, Tensor], kappa: float = 0.0) -> float:
        """The value of the problem at a direction, by parameter path: the change that the model predicts."""
        total = 0.0
        y: Tensor | None = None
        for layer in self.layers:
            v = torch.cat([direction[path].reshape(-1) for path in layer.parameters] or [layer.q])
            before = torch.zeros(layer.A.shape[1], dtype=v.dtype, device=v.device) if y is None else y
            y = layer.A @ before + layer.B @ v
            total += float(0.5 * y.dot(layer.P @ y) + layer.p.dot(y) + before.dot(layer.R @ v))
            total += float(0.5 * v.dot(layer.Q @ v) + layer.q.dot(v) + 0.5 * kappa * v.dot(v))
        return total


@with_gradients()
def linear_quadratic(
    chain: Chain,
    objective: Objective,
    regularizer: Ridge | None = None,
    params: Mapping[str, Tensor] | None = None,
    model: Model = "newton",
) -> LinearQuadratic:
    """The linear-quadratic problem of an objective of a chain (Prop. lin_quad).

    Args:
        chain: the network and its batch.
        objective: a loss bound to its targets.
        regularizer: added to the objective.
        params: the point, by path; the model's present parameters by default.
        model: "gradient", "gauss_newton" or "newton".

    Raises:
        OracleError: if something does not fit.

    >>> from surefoot.objectives import Square
    >>> chain = sf.Chain(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), torch.tensor([[2.0]]))
    >>> problem = sf.oracles.linear_quadratic(chain, Square(torch.tensor([[0.0]])))
    >>> problem[0].B.dense(), problem[1].R.shape
    (tensor([[2., 1.]]), (1, 2))
    """
    if model not in MODELS:
        raise OracleError(f"the model is one of {', '.join(MODELS)}, got {model!r}")
    require_real(chain)
    problem = Problem(chain, objective, params, regularizer)
    with differentiable_attention():
        pieces: list[_Piece] = []
        state: dict[str, Any] = dict(chain.states(problem.point)[0]) if len(chain) else {}
        for computation in chain.computations:
            pieces.append(_Piece(problem, computation, state))
            state = pieces[-1].after
        layers: list[LinearQuadraticLayer] = []
        costate = problem.slope.detach().flatten()
        curvature = _loss_curvature(problem, model)
        for k in range(len(pieces) - 1, -1, -1):
            piece = pieces[k]
            piece.bend(costate)
            slope = costate if k == len(pieces) - 1 else torch.zeros_like(costate)
            layers.append(piece.layer(curvature, slope, costate, model))
            curvature = piece.second("x", "x") if model == "newton" else piece.zero("x", "x")
            costate = piece.against(costate, "x")
    return LinearQuadratic(layers[::-1], model)


class _Piece:
    """One computation, differentiable in its state ("x") and its parameters ("u")."""

    def __init__(self, problem: Problem, computation: Computation, before: Mapping[str, Any]) -> None:
        self._problem, self._computation = problem, computation
        paths = dict.fromkeys(computation.parameters)
        layouts = {"x": layout(before, computation.before), "u": layout(problem.point, list(paths))}
        sources: dict[str, Mapping[str, Any]] = {"x": before, "u": problem.point}
        self._leaves = {
            key: [tensor.detach().requires_grad_() for tensor in layouts[key].tensors(sources[key])]
            for key in "xu"
        }
        state = layouts["x"].filled(before, self._leaves["x"])
        after = computation(state, layouts["u"].filled(problem.point, self._leaves["u"]))
        self._layout = layout(after, computation.after)
        tensors = self._layout.tensors(after)
        self._flat = torch.cat([t.reshape(-1) for t in tensors]) if tensors else problem.output.new_zeros(0)
        self._sizes = {key: layouts[key].size for key in "xu"}
        self._slopes: dict[str, Tensor] = {}
        self.after = self._layout.filled(after, [tensor.detach() for tensor in tensors])

    def bend(self, costate: Tensor) -> None:
        """The derivatives of ⟨λ, φ(x, u)⟩, themselves to be differentiated."""
        for key in "xu":
            self._slopes[key] = self._gradient(self._flat, key, costate, create_graph=True)

    def layer(self, P: Operator, p: Tensor, costate: Tensor, model: str) -> LinearQuadraticLayer:
        newton = model == "newton"
        bent = self.second("u", "u") if newton else self.zero("u", "u")
        paths = tuple(dict.fromkeys(self._computation.parameters))
        problem = self._problem
        weights = [torch.full_like(problem.point[path], problem.weight(path)).flatten() for path in paths]
        ridge = torch.cat(weights) if weights else p.new_zeros(0)
        point = torch.cat([problem.point[path].flatten() for path in paths]) if paths else ridge
        curved = torch.zeros_like(ridge) if model == "gradient" else ridge
        Q = self._operator(("u", "u"), lambda v: bent @ v + curved * v, lambda v: bent @ v + curved * v)
        return LinearQuadraticLayer(
            A=self._derivative("x"),
            B=self._derivative("u"),
            P=P,
            p=p,
            Q=Q,
            q=ridge * point,
            R=self.second("x", "u") if newton else self.zero("x", "u"),
            costate=costate,
            state=tuple(dict.fromkeys(name for name, _ in self._layout.pieces)),
            parameters=paths,
        )

    def against(self, costate: Tensor, key: str) -> Tensor:
        """The transpose of the derivative, applied."""
        return self._gradient(self._flat, key, costate)

    def second(self, row: str, column: str) -> Operator:
        """The second derivative of ⟨λ, φ(x, u)⟩."""
        return self._operator(
            (row, column),
            lambda v: self._gradient(self._slopes[column], row, v),
            lambda v: self._gradient(self._slopes[row], column, v),
        )

    def zero(self, row: str, column: str) -> Operator:
        sizes = self._sizes[row], self._sizes[column]
        return self._operator((row, column), lambda v: v.new_zeros(sizes[0]), lambda v: v.new_zeros(sizes[1]))

    def _derivative(self, key: str) -> Operator:
        @with_gradients()
        def along(v: Tensor) -> Tensor:
            symbol = torch.zeros_like(self._flat).requires_grad_()
            pulled = self._gradient(self._flat, key, symbol, create_graph=True)
            if not pulled.requires_grad:
                return torch.zeros_like(symbol).detach()
            return torch.autograd.grad(pulled, symbol, v)[0]

        shape = self._flat.numel(), self._sizes[key]
        return Operator(shape, along, lambda c: self.against(c, key), self._flat.dtype, self._flat.device)

    def _operator(self, keys: tuple[str, str], matvec: Any, rmatvec: Any) -> Operator:
        shape = self._sizes[keys[0]], self._sizes[keys[1]]
        return Operator(shape, matvec, rmatvec, self._flat.dtype, self._flat.device)

    def _gradient(self, output: Tensor, key: str, slope: Tensor, create_graph: bool = False) -> Tensor:
        leaves = self._leaves[key]
        if not leaves or not output.requires_grad:
            return output.new_zeros(self._sizes[key])
        with with_gradients(), differentiable_attention():
            found = torch.autograd.grad(
                output,
                leaves,
                slope.to(output.dtype),
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
            parts = [
                torch.zeros_like(leaf) if part is None else part for part, leaf in zip(found, leaves, strict=True)
            ]
            return torch.cat([part.reshape(-1) for part in parts])


def _loss_curvature(problem: Problem, model: str) -> Operator:
    size = problem.output.numel()

    @with_gradients()
    def curved(v: Tensor) -> Tensor:
        if model == "gradient":
            return torch.zeros_like(v)
        return problem.curve(v.reshape(problem.output.shape)).flatten()

    return Operator((size, size), curved, curved, problem.output.dtype, problem.output.device)
