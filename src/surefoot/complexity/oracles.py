r"""What a step costs: gradient, Gauss-Newton by duality, Newton by dynamic programming."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.complexity.layers import ComputationCost


@dataclass(frozen=True)
class OracleCost:
    """The cost of one step.

    Attributes:
        name: the step and the method.
        calls: calls of the automatic-differentiation oracle; ``None`` where the method makes none.
        multiplications: in all.
        relative: compared with a gradient.
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

    Args:
        before: :math:`d_{t-1}`.
        after: :math:`d_t`.
        parameters: :math:`p_t`.

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
    * A Gauss-Newton step is the solution of a quadratic problem in :math:`d_\tau` unknowns by conjugate
      gradient, :math:`2 d_\tau + 1` calls of the automatic-differentiation oracle (Prop. dual_gn_step). The
      paper counts each as a gradient; all of them are at the same point, so one forward pass serves all.
    * A Newton step is the sum of :func:`newton_layer` and the forward pass.

    Args:
        layers: the costs of the computations.
        outputs: dimension :math:`d_\tau` of the output: samples times classes.
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
