r"""The cost of one computation :math:`\phi_t = a_t \circ b_t` of a chain, from the sparsities of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.chain import Computation
from surefoot.complexity.sparsity import sparsity
from surefoot.graph import Node, Role
from surefoot.operations.forms import Degree, degree_of
from surefoot.operations.record import Form, record_of
from surefoot.operations.sparsity import Sparsity


@dataclass(frozen=True)
class ComputationCost:
    r"""What :math:`\phi_t(x_{t-1}, u_t)` and its derivative cost.

    The unit of time is one multiplication; an addition that stands for an entry equal to one (a bias, a sum) and
    the value of a scalar function count as one as well.

    Attributes:
        label: its operations.
        blocks: paths of the parameter blocks it reads.
        state_before: dimension :math:`d_{t-1}`.
        state_after: dimension :math:`d_t`.
        parameters: dimension :math:`p_t`.
        bilinear: :math:`s_{\beta_t}`.
        affine_parameters: :math:`s_{\beta^u_t}`: biases, and linear functions of the parameters.
        affine_state: :math:`s_{\beta^x_t}`: linear functions of the state, also of what is a product already.
        nonaffine: :math:`s_{a_t}`, non-zero entries of the derivatives.
        evaluation: operations to compute :math:`a_t`.
        derivative: operations to compute its derivatives besides.
        application: operations to multiply by the derivatives of :math:`a_t`, using their structure.
        products: multiplications of its matrix products and convolutions.
        products_backward: the same in the backward pass, which skips what does not depend on parameters.
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

        That of :math:`b_t` costs nothing: it is made of :math:`x_{t-1}` and :math:`u_t`.
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
        """The same with soft-max, normalisations and attention differentiated in factored form."""
        return self.application + 2 * self.bilinear + self.affine_parameters + self.affine_state


def computation_cost(computation: Computation) -> ComputationCost:
    r"""Add up the operations of a computation.

    In the biaffine part, a product of state and parameters adds to :math:`s_\beta`, what is linear in the
    parameters alone to :math:`s_{\beta^u}`, all other linear maps to :math:`s_{\beta^x}`; a sum of terms adds
    what its new terms need, :math:`x` in :math:`\beta(x, u) + x`. In the other parts, every operation adds the
    non-zero entries of its derivatives: for a product, one tensor for each factor that varies.
    """
    graph = computation.graph
    degrees = {name: Degree(state=1) for name in computation.before}
    degrees |= {leaf.name: Degree(parameters=1) for leaf in graph.parameters}
    biaffine = {node.name for node in computation.biaffine}
    totals: dict[str, int] = {}

    def add(**amounts: int) -> None:
        for key, amount in amounts.items():
            totals[key] = totals.get(key, 0) + amount

    for node in computation.nodes:
        counts = sparsity(graph, node)
        if node.name in biaffine:
            add(**_biaffine(node, counts, degrees))
        else:
            add(**_nonaffine(counts, degrees))
        degrees[node.name] = degree_of(node, degrees)
        for contraction in counts.contractions:
            needed = sum(
                any(Role.PARAMETERS in graph.roles[name] for name in factor) for factor in contraction.factors
            )
            add(products=contraction.multiplications)
            add(products_backward=needed * contraction.multiplications)
    return ComputationCost(
        label=str(computation),
        blocks=computation.blocks,
        state_before=sum(graph.numel(name) for name in computation.before),
        state_after=computation.state_size,
        parameters=computation.parameter_size,
        **totals,
    )


def _biaffine(node: Node, counts: Sparsity, degrees: dict[str, Degree]) -> dict[str, int]:
    """How an operation of the biaffine part adds to the three sparsities."""
    product = Degree()
    for name in counts.factors:
        product = product + degrees.get(name, Degree())
    amounts = {"bilinear": 0, "affine_parameters": 0, "affine_state": 0}
    record = record_of(node)
    sums = record.form_of(node) is Form.LINEAR and "other" in node.arguments
    varying = [name for name in counts.factors if not degrees.get(name, Degree()).is_constant]
    if len(varying) > 1:
        amounts["bilinear"] += counts.product
    else:
        amounts[_kind(product)] += counts.product
    for name, nonzeros in counts.terms:
        degree = degrees.get(name, Degree())
        merged = sums and _is_mixed(degree)
        if not degree.is_constant and not merged:
            amounts[_kind(degree)] += nonzeros
    return amounts


def _nonaffine(counts: Sparsity, degrees: dict[str, Degree]) -> dict[str, int]:
    """How an operation of the other parts adds to their sparsity and to the cost of computing them."""
    factors = {name for name in counts.factors if not degrees.get(name, Degree()).is_constant}
    terms = sum(nonzeros for name, nonzeros in counts.terms if not degrees.get(name, Degree()).is_constant)
    linear = len(factors) * counts.product + terms
    return {
        "nonaffine": linear + counts.jacobian,
        "evaluation": counts.product + terms + counts.evaluation,
        "derivative": counts.derivative,
        "application": linear + counts.application,
    }


def _is_mixed(degree: Degree) -> bool:
    return degree.state != 0 and degree.parameters != 0


def _kind(degree: Degree) -> str:
    return "affine_parameters" if degree.state == 0 else "affine_state"
