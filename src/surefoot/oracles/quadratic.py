r"""The linear-quadratic problem of a chain around a point (Prop. lin_quad).

Gradient, Gauss-Newton and Newton steps all minimise

.. math:: \sum_{t=1}^\tau \tfrac12y_t^\top P_ty_t + p_t^\top y_t + y_{t-1}^\top R_tv_t + \tfrac12v_t^\top Q_tv_t
          + q_t^\top v_t + \tfrac\kappa2\|v_t\|^2
          \quad\text{subject to}\quad y_t = A_ty_{t-1} + B_tv_t, \ y_0 = 0;

they differ in P, Q and R. With the costate :math:`\lambda_t`, the slope of the loss in the state after computation
t, these are the second derivatives of :math:`\langle\lambda_t, \phi_t(x, u)\rangle` for Newton steps, and zero but
for the curvature of the loss and the regulariser else. :mod:`surefoot.oracles.dynamic` solves it.

Where samples stay apart in a computation, seen by their labels (:mod:`surefoot.oracles.samples`), derivatives in
its state are blocks, one for each sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surefoot.chain import Chain, Computation
from surefoot.graph import Graph, Role
from surefoot.graph.nodes import in_double, run_widened
from surefoot.objectives import Objective, Ridge
from surefoot.oracles.losses import refuse_negative, states_factor
from surefoot.oracles.problem import OracleError, Problem
from surefoot.oracles.samples import NONE, gradients, labels
from surefoot.program.checks import differentiable_attention, plainly, with_gradients

Name = Literal["gradient", "gauss_newton", "newton"]
NAMES = ("gradient", "gauss_newton", "newton")
LARGEST = 1 << 26  # numbers of a matrix
Apart = dict[Any, bool]
_apart: WeakKeyDictionary[Graph, Apart] = WeakKeyDictionary()  # whether samples stay apart, by computation


class _Vector:
    """How the real tensors among some values become one vector: the numbers of one sample after those of the other
    where all tensors have a row for each sample, else one tensor after the other.
    """

    def __init__(self, values: Mapping[str, Any], names: Sequence[str], samples: int) -> None:
        several = [(name, values[name] if isinstance(values[name], list | tuple) else None) for name in names]
        pieces = [(name, k) for name, items in several for k in ([None] if items is None else range(len(items)))]
        tensors = {piece: _item(values, piece) for piece in pieces}
        self.pieces = [piece for piece in pieces if tensors[piece].is_floating_point()]
        self.shapes = [tensors[piece].shape for piece in self.pieces]
        rows = bool(self.pieces) and all(shape[:1] == (samples,) for shape in self.shapes)
        self.samples = samples if rows else 1
        self.sizes = [shape.numel() // self.samples for shape in self.shapes]

    def read(self, values: Mapping[str, Any], like: Tensor) -> Tensor:
        """As a matrix, samples × numbers of one sample."""
        rows = [
            _item(values, piece).reshape(self.samples, n) for piece, n in zip(self.pieces, self.sizes, strict=True)
        ]
        return torch.cat(rows, dim=1) if rows else like.new_zeros(self.samples, 0)

    def written(self, values: Mapping[str, Any], matrix: Tensor) -> dict[str, Any]:
        """The values with these numbers in place of their own."""
        result = dict(values)
        for (name, k), shape, part in zip(self.pieces, self.shapes, self.split(matrix), strict=True):
            part = part.reshape(shape)
            result[name] = part if k is None else [*result[name][:k], part, *result[name][k + 1 :]]
        return result

    def split(self, matrix: Tensor) -> Sequence[Tensor]:
        return matrix.reshape(self.samples, sum(self.sizes)).split(self.sizes, dim=1) if self.sizes else ()


def _item(values: Mapping[str, Any], piece: tuple[str, int | None]) -> Tensor:
    name, k = piece
    found: Tensor = values[name] if k is None else values[name][k]
    return found


@dataclass(frozen=True)
class Layer:
    r"""What computation t contributes.

    A state is the vector of its real tensors that vary, the numbers of one sample after those of the other; the
    parameters are one after the other. Ids and masks are no part of a state.

    Attributes:
        number: t.
        slopes: the diagonal blocks of :math:`A_t`, the derivative of :math:`\phi_t` in the state before.
        bend: those of :math:`P_{t-1}`, the curvature in the state before.
        B: :math:`B_t`, the derivative in the parameters.
        P: :math:`P_t`, the curvature in the state after; p: :math:`p_t`, the slope there.
        Q: :math:`Q_t`, the curvature in the parameters; q: :math:`q_t`, the slope of the regulariser.
        R: :math:`R_t`, the curvature between the state before and the parameters.
        costate: :math:`\lambda_t`, the slope of the loss in the state after.
        state: names of the tensors of the state after.
        parameters: paths of the parameters, with their shapes.
    """

    number: int
    slopes: Tensor
    bend: Tensor
    B: Tensor
    P: Tensor
    p: Tensor
    Q: Tensor
    q: Tensor
    R: Tensor
    costate: Tensor
    state: tuple[str, ...]
    parameters: Mapping[str, torch.Size]

    @property
    def A(self) -> Tensor:
        r""":math:`A_t` as one matrix."""
        return block_diagonal(self.slopes)

    def push(self, y: Tensor, v: Tensor) -> Tensor:
        """Ay + Bv."""
        return (self.slopes @ y.view(len(self.slopes), -1, 1)).flatten() + self.B @ v

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀc."""
        return (self.slopes.mT @ c.view(len(self.slopes), -1, 1)).flatten()

    def join(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Its part of a direction as a vector."""
        return torch.cat([direction[path].reshape(-1).to(self.q) for path in self.parameters] or [self.q])

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A vector as tensors by path."""
        parts = v.split([shape.numel() for shape in self.parameters.values()])
        return {path: part.view(shape) for part, (path, shape) in zip(parts, self.parameters.items(), strict=True)}


@dataclass(frozen=True)
class LinearQuadratic:
    """The problem, computation by computation: ``problem[0]`` belongs to the first one in which something varies.

    Attributes:
        layers: the computations.
        model: which model of the objective it is.
        gradient: of the objective, by computation.
        start: the change of what the first one reads: zero.
        C: the curvature of the loss in the last state.
        c: its slope there.
    """

    layers: tuple[Layer, ...]
    model: str
    gradient: list[Tensor]
    start: Tensor
    C: Tensor
    c: Tensor

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    def cost(self, direction: Mapping[str, Tensor], kappa: float = 0.0) -> float:
        """The value of the problem at a direction, by parameter path: the change that the model predicts."""
        total, before = 0.0, self.start
        for layer in self.layers:
            v = layer.join(direction)
            y = layer.push(before, v)
            total += float(0.5 * y.dot(layer.P @ y) + layer.p.dot(y) + before.dot(layer.R @ v))
            total += float(0.5 * v.dot(layer.Q @ v) + layer.q.dot(v) + 0.5 * kappa * v.dot(v))
            before = y
        return total


@plainly
def linear_quadratic(
    chain: Chain,
    objective: Objective,
    regularizer: Ridge | None = None,
    params: Mapping[str, Tensor] | None = None,
    model: Name = "newton",
) -> LinearQuadratic:
    """The linear-quadratic problem of an objective of a chain (Prop. lin_quad), in double precision.

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
    >>> problem[0].B.tolist(), problem[1].R.shape
    ([[2.0, 1.0]], torch.Size([1, 2]))
    """
    return expanded(Problem(chain, objective, params, regularizer), model)


def fits(chain: Chain) -> tuple[int, str]:
    """The size of the largest matrix that is needed, and of what; 0 where all fit."""
    for computation in chain:
        state = sum(chain.graph.numel(name) for name in _varying(computation, computation.after))
        for size, what in ((state, ", ".join(computation.after)), (computation.parameter_size, str(computation))):
            if size * size > LARGEST:
                return size, what
    return 0, ""


def _varying(computation: Computation, names: Sequence[str]) -> list[str]:
    return [name for name in names if Role.PARAMETERS in computation.graph.roles[name]]


@with_gradients()
def expanded(problem: Problem, model: Name) -> LinearQuadratic:
    """The linear-quadratic problem of a problem."""
    chain, graph = problem.chain, problem.chain.graph
    if model not in NAMES:
        raise OracleError(f"the model is one of {', '.join(NAMES)}, got {model!r}")
    if graph.is_complex:
        raise OracleError(
            "the model computes with complex numbers, which are no vectors of real ones: use method='primal' for "
            "Gauss-Newton and method='cg' for Newton steps"
        )
    size, what = fits(chain)
    if size:
        raise OracleError(
            f"dynamic programming needs a matrix of {size} × {size} for {what}: take a smaller batch or narrower "
            "layers, or a method without matrices (gauss_newton(..., method='primal'), newton(..., method='cg'))"
        )
    samples = problem.output.shape[0] if problem.output.dim() else 1
    values: dict[str, Any] = graph.bind(problem.point, [x.detach() for x in chain.inputs])
    values = {name: in_double(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    pieces: list[_Piece] = []
    with differentiable_attention():
        for number, computation in enumerate(chain, start=1):
            piece = _Piece(problem, computation, number, values, samples)
            values = {**values, **piece.after}
            if not piece.out.numel() or not piece.x.numel() + piece.u.numel():
                pieces.clear()  # nothing varies yet, or nothing is passed on
            else:
                pieces.append(piece)
        c, P = _loss(problem, values, model, samples)
        layers: list[Layer] = []
        gradient: list[Tensor] = []
        costate, C = c, block_diagonal(P)
        for k, piece in reversed(list(enumerate(pieces))):
            last = k == len(pieces) - 1
            layer = piece.layer(P, c if last else torch.zeros_like(costate), costate, model)
            gradient.append(layer.B.T @ costate + layer.q)
            P, costate = layer.bend, layer.pull(costate)
            layers.append(layer)
    if not layers:
        C, c = c.new_zeros(0, 0), c[:0]
    start = costate.new_zeros(costate.numel() if layers else 0)
    return LinearQuadratic(tuple(layers[::-1]), model, gradient[::-1], start, C, c)


class _Piece:
    """One computation, differentiable in its state x and its parameters u."""

    def __init__(
        self, problem: Problem, computation: Computation, number: int, values: Mapping[str, Any], samples: int
    ) -> None:
        graph, like = computation.graph, problem.output.double()
        names = [name for path in computation.blocks for name in graph.blocks[path].parameters]
        paths = {graph.leaves[name].path: values[name].shape for name in names}
        before = _Vector(values, _varying(computation, computation.before), samples)
        weights = _Vector(values, names, -1)
        self.x = before.read(values, like).detach().requires_grad_()
        self.u = weights.read(values, like).flatten().detach().requires_grad_()
        run = weights.written(before.written(values, self.x), self.u)
        for node in computation.nodes:
            run[node.name] = run_widened(node, run)
        after = _Vector(run, _varying(computation, computation.after), samples)
        self.out = after.read(run, like)
        self.after = {name: _detached(run[name]) for name in computation.after}
        self._problem, self._number = problem, number
        self._apart = _apart.setdefault(graph, {})
        self._state, self._paths = tuple(name for name, _ in after.pieces), paths

    def layer(self, P: Tensor, p: Tensor, costate: Tensor, model: Name) -> Layer:
        """With the curvature and the slope in the state after."""
        x, u, problem = self.x, self.u, self._problem
        m, size = x.numel(), u.numel()
        weights = [(problem.weight(path), shape.numel()) for path, shape in self._paths.items()]
        ridge = torch.cat([x.new_full((count,), weight) for weight, count in weights] or [x.new_zeros(0)])
        Q, R, bend = x.new_zeros(size, size), x.new_zeros(m, size), x.new_zeros(len(x), x.shape[1], x.shape[1])
        if model == "newton" and self.out.requires_grad:
            gx, gu = torch.autograd.grad(
                self.out, [x, u], costate.view(self.out.shape), create_graph=True, allow_unused=True,
                materialize_grads=True,
            )  # fmt: skip
            if size:
                crossed, Q = gradients(gu, [x, u], torch.eye(size, dtype=x.dtype, device=x.device))
                R, Q = crossed.reshape(size, m).T, 0.5 * (Q + Q.T)
            bend = _blocks(gx, x, self._apart, (self._number, "bend"))
            bend = 0.5 * (bend + bend.mT)
        if model != "gradient":
            Q = Q + torch.diag(ridge)
        B = jacobian(self.out.reshape(1, -1), u)[0]
        return Layer(
            self._number, _blocks(self.out, x, self._apart, (self._number, "slope")), bend, B,
            block_diagonal(P), p, Q, ridge * u.detach(), R, costate,
            self._state, self._paths,
        )  # fmt: skip


def _blocks(output: Tensor, x: Tensor, apart: Apart, key: Any) -> Tensor:
    """The diagonal blocks of a derivative, one for each sample where these are apart, else one in all."""
    if len(output) == len(x) > 1 and x.numel() and output.requires_grad:
        if key not in apart:
            (sample,) = labels(output, [x])
            own = (sample == torch.arange(len(x), device=x.device)[:, None]) | (sample == NONE)
            if bool((sample != NONE).all()):  # else it may differ at other points
                apart[key] = bool(own.all())
            elif bool(own.all()):
                return jacobian(output, x)
        if apart.get(key):
            return jacobian(output, x)
    return jacobian(output.reshape(1, -1), x)


def jacobian(output: Tensor, x: Tensor) -> Tensor:
    """The derivative of rows in a tensor: rows × numbers of one × numbers of x, or of one row of x."""
    rows, columns = output.shape
    units = torch.eye(columns, dtype=output.dtype, device=output.device)
    (slopes,) = gradients(output, [x], units[:, None, :].expand(columns, rows, columns))
    return slopes.reshape(columns, rows, x.numel() // rows).transpose(0, 1)


def block_diagonal(blocks: Tensor) -> Tensor:
    """The matrix with these blocks."""
    count, rows, columns = blocks.shape
    matrix = blocks.new_zeros(count, rows, count, columns)
    matrix.diagonal(dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
    return matrix.reshape(count * rows, count * columns)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else [_detached(item) for item in value]


def _loss(problem: Problem, values: Mapping[str, Any], model: Name, samples: int) -> tuple[Tensor, Tensor]:
    """Slope and curvature of the loss in the output, the latter as diagonal blocks."""
    name = problem.chain.graph.outputs[0]
    output = in_double(values.get(name, problem.output)).detach().requires_grad_()
    rows = output.reshape(samples, -1) if output.numel() else output.reshape(1, -1)
    value = problem.objective(rows.view(output.shape))
    if not bool(value.isfinite()):
        raise OracleError(f"the objective is {value.item()} at this point")
    (first,) = torch.autograd.grad(value, rows, create_graph=True)
    slope = first.detach().flatten()
    if model == "gradient":
        return slope, slope.new_zeros(len(rows), rows.shape[1], rows.shape[1])
    curvature = _blocks(first, rows, {}, "")
    if model == "gauss_newton" and not states_factor(problem.objective):
        extreme = torch.linalg.eigvalsh((curvature + curvature.mT) / 2)
        refuse_negative(problem, float(extreme.min()), float(extreme.abs().max()))
    return slope, curvature
