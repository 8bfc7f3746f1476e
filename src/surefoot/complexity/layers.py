r"""The cost of one computation :math:`\phi_t = a_t \circ b_t` of a chain, from the sparsities of its parts.

Together they give the cost of a step: gradient, Gauss-Newton by duality, Newton by dynamic programming.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import surefoot.operations.captured  # noqa: F401  registers the operations
from surefoot.chain import Computation
from surefoot.graph import Graph, Node, Role
from surefoot.operations.call import Use
from surefoot.operations.forms import Degree, degree_of
from surefoot.operations.record import Form, record_of
from surefoot.operations.sparsity import Sparsity


def sparsity(graph: Graph, node: Node) -> Sparsity:
    """The non-zero entries of an operation's tensors.

    An operation whose record has no count is counted by its form: moving numbers costs nothing, including a lookup
    in an embedding (the paper does not count the extraction of patches either); everything else costs one
    operation for each entry of the result and each argument that varies. This is exact for sums and for functions
    applied to each entry, and the default for other operations.
    """
    record = record_of(node)
    if record.cost is not None:
        return record.cost(Use(node, graph.spec))
    form = record.form_of(node)
    if form is Form.LAYOUT:
        return Sparsity()
    varying = [name for name in node.inputs if graph.roles[name] != Role.CONSTANT]
    if form is Form.LINEAR:
        return Sparsity(terms=tuple((name, node.numel) for name in varying))
    derivatives = node.numel * len(varying)
    return Sparsity(evaluation=node.numel, derivative=derivatives, jacobian=derivatives, application=derivatives)


@dataclass(frozen=True)
class ComputationCost:
    r"""The cost of :math:`\phi_t(x_{t-1}, u_t)` and its derivative.

    The unit of time is one multiplication; an addition that stands for an entry equal to one (a bias, a sum) and
    the value of a scalar function also count as one.

    Attributes:
        label: its operations.
        blocks: paths of the parameter blocks it reads.
        state_before: dimension :math:`d_{t-1}`.
        state_after: dimension :math:`d_t`.
        parameters: dimension :math:`p_t`.
        bilinear: :math:`s_{\beta_t}`.
        affine_parameters: :math:`s_{\beta^u_t}`: biases, and linear functions of the parameters.
        affine_state: :math:`s_{\beta^x_t}`: linear functions of the state, or of a product with it.
        nonaffine: :math:`s_{a_t}`, non-zero entries of the derivatives.
        evaluation: operations to compute :math:`a_t`.
        derivative: additional operations to compute its derivatives.
        application: operations to multiply by the derivatives of :math:`a_t`, using their structure.
        products: multiplications of its matrix products and convolutions.
        products_backward: the same in the backward pass, which skips everything that does not depend on
            parameters.
    """

    label: str
    blocks: tuple[str, ...]
    state_before: int
    state_after: int
    parameters: int
    bilinear: int = 0
    affine_parameters: int = 0
    affine_state: int = 0
    nonaffine: int = 0
    evaluation: int = 0
    derivative: int = 0
    application: int = 0
    products: int = 0
    products_backward: int = 0

    @property
    def forward(self) -> int:
        r""":math:`\mathcal{T}(\phi_t) = s_{\beta} + s_{\beta^u} + s_{\beta^x}` and the value of :math:`a_t`."""
        return self.bilinear + self.affine_parameters + self.affine_state + self.evaluation

    @property
    def forward_with_derivative(self) -> int:
        r""":math:`\mathcal{T}(\phi_t, \nabla\phi_t)`: the value, and the derivatives of :math:`a_t`.

        The derivative of :math:`b_t` costs nothing: its entries are those of :math:`x_{t-1}` and :math:`u_t`.
        """
        return self.forward + self.derivative

    @property
    def space(self) -> int:
        """:math:`(p_t + d_{t-1}) d_t`, the entries of the derivatives, if all of them are stored."""
        return (self.parameters + self.state_before) * self.state_after

    @property
    def backward_generic(self) -> int:
        """:math:`2 (d_{t-1} d_t + p_t d_t)`, products with full matrices."""
        return 2 * self.space

    @property
    def backward_refined(self) -> int:
        r""":math:`s_{a} + 2 s_{\beta} + s_{\beta^u} + s_{\beta^x}`, the appendix' proposition."""
        return self.nonaffine + 2 * self.bilinear + self.affine_parameters + self.affine_state

    @property
    def backward_structured(self) -> int:
        """``backward_refined`` with soft-max, normalisations and attention differentiated in factored form."""
        return self.application + 2 * self.bilinear + self.affine_parameters + self.affine_state


def computation_cost(computation: Computation) -> ComputationCost:
    r"""Add up the operations of a computation.

    In the biaffine part, a product of state and parameters adds to :math:`s_\beta`, a linear map of the parameters
    alone to :math:`s_{\beta^u}`, all other linear maps to :math:`s_{\beta^x}`; a sum adds only its new terms, such
    as :math:`x` in :math:`\beta(x, u) + x`. In the other parts, every operation adds the non-zero entries of its
    derivatives: for a product, one tensor for each factor that varies.
    """
    graph = computation.graph
    degrees = {name: Degree(state=1) for name in computation.before}
    degrees |= {leaf.name: Degree(parameters=1) for leaf in graph.parameters}
    biaffine = {node.name for node in computation.biaffine}
    totals: Counter[str] = Counter()
    for node in computation.nodes:
        counts = sparsity(graph, node)
        factors = [degrees.get(name, Degree()) for name in counts.factors]
        terms = [(degrees.get(name, Degree()), nonzeros) for name, nonzeros in counts.terms]
        varying = sum(not degree.is_constant for degree in factors)
        if node.name in biaffine:
            product = sum(factors, Degree())
            totals["bilinear" if varying > 1 else _kind(product)] += counts.product
            is_sum = record_of(node).form_of(node) is Form.LINEAR and "other" in node.arguments
            for degree, nonzeros in terms:
                merged = is_sum and degree.state != 0 and degree.parameters != 0
                totals[_kind(degree)] += 0 if degree.is_constant or merged else nonzeros
        else:
            added = sum(nonzeros for degree, nonzeros in terms if not degree.is_constant)
            linear = varying * counts.product + added
            totals["nonaffine"] += linear + counts.jacobian
            totals["evaluation"] += counts.product + added + counts.evaluation
            totals["derivative"] += counts.derivative
            totals["application"] += linear + counts.application
        degrees[node.name] = degree_of(node, degrees)
        for contraction in counts.contractions:
            needed = sum(
                any(Role.PARAMETERS in graph.roles[name] for name in factor) for factor in contraction.factors
            )
            totals["products"] += contraction.multiplications
            totals["products_backward"] += needed * contraction.multiplications
    return ComputationCost(
        label=str(computation),
        blocks=computation.blocks,
        state_before=sum(graph.numel(name) for name in computation.before),
        state_after=computation.state_size,
        parameters=computation.parameter_size,
        **totals,
    )


def _kind(degree: Degree) -> str:
    return "affine_parameters" if degree.state == 0 else "affine_state"


@dataclass(frozen=True)
class OracleCost:
    """The cost of one step.

    Attributes:
        name: the step and the method.
        calls: calls of the automatic-differentiation oracle; ``None`` if the method makes none.
        multiplications: the number of multiplications.
        relative: the cost compared with a gradient.
    """

    name: str
    calls: int | None
    multiplications: int
    relative: float


def newton_layer(before: int, after: int, parameters: int) -> int:
    r"""Multiplications of one layer in the Algorithm "Newton oracle by dynamic programming", with full matrices.

    With :math:`d = d_{t-1}`, :math:`e = d_t`, :math:`p = p_t`, so that :math:`A_t` is :math:`e \times d` and
    :math:`B_t` is :math:`e \times p`:

    * first backward pass: :math:`d^2 e + p^2 e + d p e` for the second derivatives :math:`P_{t-1}, Q_t, R_t`
      along :math:`\lambda_t`, and :math:`d e` for :math:`\lambda_{t-1}`;
    * second backward pass, products: :math:`C_t A_t` (:math:`d e^2`), :math:`C_t B_t` (:math:`p e^2`), then
      :math:`A_t^\top C_t A_t` (:math:`d^2 e`), :math:`A_t^\top C_t B_t` (:math:`d p e`),
      :math:`B_t^\top C_t B_t` (:math:`p^2 e`), :math:`A_t^\top c_t` and :math:`B_t^\top c_t`
      (:math:`d e + p e`);
    * its test :math:`\kappa I + Q_t + B_t^\top C_t B_t \succ 0` is a Cholesky factor,
      :math:`p(p+1)(p+2)/6` multiplications, divisions and roots: column :math:`j` has :math:`p - j + 1` entries,
      each a sum of :math:`j - 1` products and then divided, :math:`\sum_j (p - j + 1) j = p(p+1)(p+2)/6`;
    * its gains :math:`K_t, k_t`: two triangular solves for :math:`d + 1` columns, :math:`(d + 1) p (p + 1)`;
    * its update: :math:`(R_t + A_t^\top C_t B_t) K_t` and the same times :math:`k_t`, :math:`(d + 1) d p`;
    * rollout: :math:`K_t y_{t-1}`, :math:`A_t y_{t-1}`, :math:`B_t v_t`: :math:`p d + e d + e p`.

    The entries of the first and second derivatives are taken as given. If a test fails, the second backward pass
    is made again with :math:`\kappa` doubled: that is not in this count.

    >>> newton_layer(before=0, after=1, parameters=1)  # p²e, CB, BᵀCB, Bᵀc, root, two divisions, Bv
    8
    """
    d, e, p = before, after, parameters
    first = d * d * e + p * p * e + d * p * e + d * e
    products = d * e * e + p * e * e + d * d * e + d * p * e + p * p * e + d * e + p * e
    factor = p * (p + 1) * (p + 2) // 6
    gains = (d + 1) * p * (p + 1)
    update = (d + 1) * d * p
    rollout = p * d + e * d + e * p
    return first + products + factor + gains + update + rollout


def oracle_costs(layers: tuple[ComputationCost, ...], outputs: int) -> tuple[OracleCost, ...]:
    r"""The cost of each step on a chain.

    * A gradient is one forward-backward pass.
    * A Gauss-Newton step is the solution of a quadratic problem in :math:`d_\tau` unknowns (``outputs``: samples
      times classes) by conjugate gradient, :math:`2 d_\tau + 1` calls of the automatic-differentiation oracle
      (Prop. dual_gn_step). The paper counts each as a gradient; all of them are at the same point, so one forward
      pass serves all.
    * A Newton step is the sum of :func:`newton_layer` and the forward pass.
    """
    forward = sum(layer.forward_with_derivative for layer in layers)
    backward = sum(layer.backward_structured for layer in layers)
    gradient = forward + backward
    calls = 2 * outputs + 1
    newton = forward + sum(newton_layer(c.state_before, c.state_after, c.parameters) for c in layers)

    def cost(name: str, calls: int | None, total: int) -> OracleCost:
        return OracleCost(name, calls, total, total / gradient if gradient else 1.0)

    return (
        cost("gradient", 1, gradient),
        cost("Gauss-Newton, dual", calls, calls * gradient),
        cost("Gauss-Newton, dual, one forward pass", calls, forward + calls * backward),
        cost("Newton, dynamic programming", None, newton),
    )
