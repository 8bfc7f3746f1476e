"""Spectral and Frobenius norms: never below an exact lower bound, and hardly above it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from flint import fmpq, fmpq_mat
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.norms import batched_spectral_norm, frobenius_norm, matrix, spectral_norm


def rational(value: float) -> fmpq:
    return fmpq(*float(value).as_integer_ratio())


def exact_square(a: Tensor) -> fmpq:
    """The square of a lower bound of the norm, exact: the quotient at the computed singular vector.

    The vector is accurate to about 1e-16 relative to the gap, the quotient to the square of that.
    """
    double = a.to(torch.float64)
    top = float(double.abs().max()) or 1.0
    _, _, right = torch.linalg.svd(double / top)
    vector = fmpq_mat(double.shape[1], 1, [rational(x) for x in right[0].tolist()])
    dense = fmpq_mat(*double.shape, [rational(x) for x in double.flatten().tolist()])
    image = dense * vector
    length = sum((x * x for x in vector.entries()), fmpq(0))
    return sum((x * x for x in image.entries()), fmpq(0)) / length


def assert_just_above(bound: float, square: fmpq, excess: float) -> None:
    assert rational(bound) * rational(bound) >= square
    lowered = rational(max(bound - 1e-323, 0.0))  # subnormal numbers are multiples of 5e-324
    assert lowered * lowered <= square * rational((1 + excess) ** 2)


def hilbert(size: int) -> Tensor:
    index = torch.arange(size, dtype=torch.float64)
    return 1 / (index[:, None] + index[None, :] + 1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


MATRICES = {
    "hilbert": hilbert(20),
    "ones": torch.ones(37, 23),
    "one": torch.tensor([[-3.7]]),
    "row": random(1, 50),
    "column": random(50, 1),
    "rank one": torch.outer(random(30)[0:30], random(20, seed=1)),
    "tall": random(60, 7),
    "wide": random(7, 60),
    "identity": torch.eye(30),
    "huge": random(12, 15) * 1e150,
    "tiny": random(12, 15) * 1e-150,
    "largest": torch.full((3, 2), 2.0**1021, dtype=torch.float64),
    "subnormal": torch.full((3, 2), 5e-324, dtype=torch.float64),
    "mixed scales": torch.diag(torch.tensor([1e150, 1.0, 1e-150], dtype=torch.float64)) + 1e-140,
    "decades": 10.0 ** torch.linspace(-300, 300, 20, dtype=torch.float64).diag(),
    "cancelling": torch.tensor([[1e8, 1.0], [-1e8, 1.0], [1.0, 1e-8]], dtype=torch.float64),
    "half zero": torch.cat([torch.zeros(10, 10), torch.eye(10) + 1e-9]),
    "single": random(20, 30).float(),
    "brain": random(20, 30).bfloat16(),
    "half": random(20, 30).half(),
    "integers": (10 * random(9, 12)).to(torch.int32),
    "booleans": random(9, 12) > 0,
    "strided": random(20, 30)[::2, 1::3].T,
    "equal singular values": torch.linalg.qr(random(16, 16))[0],
}


@pytest.mark.parametrize("name", MATRICES)
def test_spectral_norm_lies_just_above_an_exact_lower_bound(name: str) -> None:
    a = MATRICES[name]
    assert_just_above(spectral_norm(a), exact_square(a), 1e-11)


@pytest.mark.parametrize("name", MATRICES)
def test_batched_norm_agrees_with_the_exact_lower_bound(name: str) -> None:
    a = MATRICES[name]
    batch = torch.stack([a, -a if a.is_floating_point() else a])
    norms = batched_spectral_norm(batch)
    assert norms.shape == (2,)
    assert_just_above(float(norms[0]), exact_square(a), 1e-11)
    assert_just_above(float(norms[1]), exact_square(a), 1e-11)


@pytest.mark.parametrize("name", MATRICES)
def test_frobenius_norm_lies_just_above_the_exact_one(name: str) -> None:
    a = MATRICES[name]
    square = sum((rational(x) ** 2 for x in a.to(torch.float64).flatten().tolist()), fmpq(0))
    assert_just_above(frobenius_norm(a), square, 1e-11)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(-400, 400),
    st.sampled_from([0.0, 1.0, 40.0]),
    st.integers(0, 2**31),
)
def test_random_matrices_of_any_scale(rows: int, columns: int, power: int, spread: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    entries = generator.standard_normal((rows, columns)) * np.exp2(
        spread * generator.standard_normal((rows, columns))
    )
    a = torch.from_numpy(np.ldexp(entries, power))
    assert_just_above(spectral_norm(a), exact_square(a), 1e-11)


@pytest.mark.parametrize(("rows", "columns"), [(784, 256), (256, 128), (300, 300), (161, 400)])
def test_spectral_norm_is_sharp_for_layers(rows: int, columns: int) -> None:
    a = random(rows, columns)
    exact = float(torch.linalg.svdvals(a)[0])
    assert exact * (1 - 1e-13) <= spectral_norm(a) <= exact * (1 + 1e-9)
    assert exact * (1 - 1e-13) <= spectral_norm(a.T) <= exact * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "ones", "hilbert", "orthogonal"])
def test_spectral_norm_is_sharp_up_to_size_2000(kind: str) -> None:
    make = {
        "random": lambda: random(2000, 2000),
        "ones": lambda: torch.ones(2000, 2000),
        "hilbert": lambda: hilbert(2000),
        "orthogonal": lambda: torch.linalg.qr(random(2000, 2000))[0],
    }
    a = make[kind]().double()
    exact = float(torch.linalg.svdvals(a)[0])
    assert exact * (1 - 1e-12) <= spectral_norm(a) <= exact * (1 + 1e-9)


def test_a_start_vector_without_the_top_direction_is_no_danger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is not trusted: half of it must not become a bound."""
    from surefoot.norms import hermitian

    a = random(200, 170)
    exact = float(torch.linalg.svdvals(a)[0])
    monkeypatch.setattr(hermitian, "_krylov", lambda gram: 0.5 * exact**2)
    assert exact * (1 - 1e-13) <= spectral_norm(a) <= exact * (1 + 1e-9)
    monkeypatch.setattr(
        hermitian, "_top_eigenvalue", lambda gram: 0.5 * exact**2 * torch.ones(gram.shape[:-2]).double()
    )
    assert exact * (1 - 1e-13) <= spectral_norm(a)


def test_excess_of_a_shift_below_the_top_is_infinite_and_above_is_true() -> None:
    from surefoot.norms.hermitian import excess

    a = random(3, 40, 20)
    gram = a.mT @ a
    top = torch.linalg.eigvalsh(gram)[:, -1]
    assert excess(gram, 0.999 * top).isinf().all()
    above = excess(gram, 1.001 * top)
    assert ((above >= 0) & (above < 1e-10 * top)).all()


def test_excess_covers_the_residual_of_a_wrong_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor is not trusted either: whatever it is, the residual is added."""
    from surefoot.norms import hermitian

    a = random(40, 20)
    gram, top = a.T @ a, float(torch.linalg.svdvals(a)[0]) ** 2
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: (torch.eye(20).double(), torch.tensor(0)))
    shift = torch.tensor(0.5 * top, dtype=torch.float64)
    assert float(shift + hermitian.excess(gram, shift)) >= top


def test_the_error_of_products_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pretended relative error c of products, the bound covers ‖A‖² + c‖A‖_F²."""
    a = random(30, 20)
    expected = float(torch.linalg.svdvals(a)[0]) ** 2 + 0.01 * float(a.norm()) ** 2
    monkeypatch.setattr(matrix, "product_error", lambda inner, dtype: 0.01)
    assert expected * (1 - 1e-12) <= spectral_norm(a) ** 2 <= expected * 1.01
    assert expected * (1 - 1e-12) <= float(batched_spectral_norm(a)) ** 2 <= expected * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("size", [1, 10, 1000])
def test_products_err_less_than_stated_but_not_never(dtype: torch.dtype, size: int) -> None:
    """Small terms are lost next to a large one: the classical worst case, up to the order of summation."""
    from surefoot.norms.hermitian import gamma, product_error, unit_roundoff

    roundoff = unit_roundoff(dtype)
    assert roundoff == {4: 2.0**-24, 8: 2.0**-53}[torch.finfo(dtype).bits // 8]
    assert size * roundoff <= gamma(size, dtype) <= 1.001 * size * roundoff
    assert product_error(size, dtype) >= size * roundoff * (2**1.5 if dtype.is_complex else 1)
    assert gamma(2**60) == math.inf
    if dtype == torch.float32:
        x = torch.full((size, 1), roundoff / 2)
        x[0] = 1
        exact = float(x.double().sum())
        error = abs(float(x.T @ torch.ones(size, 1)) - exact)
        assert error <= product_error(size, dtype) * exact


def test_batches_of_complex_matrices() -> None:
    a = torch.complex(random(2, 3, 8, 5), random(2, 3, 8, 5, seed=1))
    a[0, 0] *= 1e200
    a[0, 1] *= 1e-200
    a[1, 2] = 0
    exact = torch.linalg.matrix_norm(a / 1e0, 2)
    norms = batched_spectral_norm(a)
    assert norms.shape == (2, 3)
    assert norms[1, 2] == 0
    positive = exact > 0
    ratio = norms[positive] / exact[positive]
    assert ((ratio >= 1 - 1e-13) & (ratio <= 1 + 1e-11)).all()
    assert torch.equal(batched_spectral_norm(a.mH), batched_spectral_norm(a.conj().mT))
    assert math.isclose(spectral_norm(a[1, 0]), float(norms[1, 0]), rel_tol=1e-11)


def test_single_precision_gram_matrices_are_bounded_too() -> None:
    """The eigenvalue bound of a matrix in single precision holds for its exact entries."""
    from surefoot.norms.hermitian import eigenvalue_bounds

    for dtype in (torch.float32, torch.complex64):
        a = random(5, 30, 20).to(dtype)
        gram = a.mH @ a
        exact = torch.linalg.eigvalsh(gram.tril().to(torch.complex128))[:, -1]
        bounds = eigenvalue_bounds(gram)
        assert ((bounds >= exact * (1 - 1e-13)) & (bounds <= exact * (1 + 1e-3))).all()


def test_large_matrices_are_cut_into_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_LARGEST_EXACT", 64)
    monkeypatch.setattr(matrix, "_STRIP", 32)
    for a in (random(100, 80), random(70, 300), torch.ones(90, 90), 1e200 * random(65, 65)):
        exact = float(torch.linalg.svdvals(a.double() / a.abs().max())[0] * a.abs().max())
        strips = -(-min(a.shape) // 32)
        assert exact * (1 - 1e-13) <= spectral_norm(a) <= exact * math.sqrt(strips) * (1 + 1e-9)
    assert math.isclose(spectral_norm(torch.ones(90, 90)), 90, rel_tol=1e-12)


@pytest.mark.parametrize("budget", [1e2, 1e5, 1e7])
def test_affordable_norm_is_a_bound_at_any_price(budget: float) -> None:
    a = random(60, 90)
    exact = float(torch.linalg.svdvals(a)[0])
    bound = matrix.affordable_norm(a, budget)
    assert exact * (1 - 1e-13) <= bound <= float(a.norm()) * (1 + 1e-12)
    assert budget < 1e7 or bound <= exact * (1 + 1e-11)


def test_embeddings_longer_than_a_piece() -> None:
    a = random(20000, 3).float()
    exact = float(torch.linalg.svdvals(a.double())[0])
    assert exact * (1 - 1e-12) <= spectral_norm(a) <= exact * (1 + 1e-11)


def test_frobenius_norm_of_many_entries() -> None:
    a = random(4_500_001).float()
    exact = math.sqrt(math.fsum((a.double() ** 2).tolist()))
    assert exact * (1 - 1e-15) <= frobenius_norm(a) <= exact * (1 + 1e-11)


def test_frobenius_norm_of_extreme_entries() -> None:
    for value in (5e-324, 1e-200, 1e200, 1.7e308):
        a = torch.tensor([value, -value, 0.0], dtype=torch.float64)
        bound = Fraction(min(frobenius_norm(a), 1.79e308)) ** 2
        assert bound >= 2 * Fraction(value) ** 2 or frobenius_norm(a) == math.inf
        assert value > 1e-300 or frobenius_norm(a) <= 1.5e-323
    assert frobenius_norm(torch.full((9,), 1.7e308, dtype=torch.float64)) == math.inf
    assert frobenius_norm(torch.tensor([3 + 4j])) <= 5 * (1 + 1e-11)
    assert frobenius_norm(torch.tensor([3 + 4j])) >= 5


def test_zero_empty_infinite_and_undefined() -> None:
    for norm in (spectral_norm, frobenius_norm, lambda a: float(batched_spectral_norm(a))):
        assert norm(torch.zeros(3, 4)) == 0
        assert norm(torch.zeros(0, 4)) == 0
        assert norm(torch.tensor([[1.0, math.inf]])) == math.inf
        assert norm(torch.tensor([[1e308, 1e308]], dtype=torch.float64)) > 1.4e308
        with pytest.raises(ValueError, match="NaN"):
            norm(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(ValueError, match="matrix"):
        spectral_norm(torch.zeros(3))
    with pytest.raises(ValueError, match="shape"):
        batched_spectral_norm(torch.zeros(3))
    assert batched_spectral_norm(torch.zeros(0, 3, 4)).shape == (0,)


def test_neither_the_argument_nor_the_random_state_is_touched() -> None:
    a = random(300, 200).requires_grad_()
    copy, state, other = a.detach().clone(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    spectral_norm(a)
    frobenius_norm(a)
    batched_spectral_norm(a)
    assert torch.equal(a, copy)
    assert a.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], other)  # noqa: NPY002
