"""The norm of matrices of magnitudes: sound against exact quotients, sharp whatever the range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from flint import fmpq, fmpq_mat
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.magnitude import Magnitude
from surefoot.norms import matrix, nonnegative_norm


def of(array: np.ndarray, shift: float = 0.0) -> Magnitude:
    """The magnitudes array * 2**shift, exact up to the rounding of the logarithm."""
    with np.errstate(divide="ignore"):
        return Magnitude(np.log2(array) + shift)


def excess(array: np.ndarray, shift: float = 0.0) -> float:
    """The bound relative to the norm by LAPACK, minus one."""
    bound = nonnegative_norm(of(array, shift))
    return float(np.exp2(bound.log2 - shift)) / float(np.linalg.norm(array, 2)) - 1


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


@pytest.mark.parametrize("size", [2, 3, 10, 60, 300])
@pytest.mark.parametrize("shift", [0.0, 3000.0, -3000.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_random_matrices_are_bounded_sharply(size: int, shift: float, symmetric: bool) -> None:
    array = random(size, size)
    array = array + array.T if symmetric else array
    assert -1e-11 <= excess(array, shift) <= 1e-8


SPECIAL = {
    "log-normal": np.exp(10 * np.random.default_rng(1).standard_normal((40, 40))),
    "path": np.eye(50, k=1) + np.eye(50, k=-1),
    "nilpotent": np.eye(50, k=1),
    "triangular": np.triu(random(50, 50)),
    "diagonal": np.diag(random(30)),
    "sparse": (random(80, 80) < 0.02) * random(80, 80, seed=1),
    "nearly equal blocks": np.kron(np.diag([1.0, 1 - 1e-9]), random(10, 10)) + 1e-12,
    "weak chain": np.diag(1 - 1e-6 * np.arange(100)) + 1e-7 * (np.eye(100, k=1) + np.eye(100, k=-1)),
    "decaying vector": 4.0 * np.diag(np.arange(400) == 0) + np.eye(400, k=1) + np.eye(400, k=-1),
    "permutation": np.eye(20)[np.random.default_rng(0).permutation(20)],
    "outer product": np.outer(np.exp(9 * random(20)), np.exp(-9 * random(20, seed=1))),
    "bipartite": np.block([[np.zeros((5, 5)), random(5, 9)], [random(9, 5, seed=1), np.zeros((9, 9))]]),
    "rectangular": random(7, 31),
    "one row": random(1, 9),
    "one column": random(9, 1),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("shift", [0.0, 2500.0])
def test_special_matrices_are_bounded_sharply(name: str, shift: float) -> None:
    assert -1e-11 <= excess(SPECIAL[name], shift) <= 1e-8


def test_blocks_of_very_different_scale() -> None:
    """The largest of two uncoupled blocks, 10**600 apart, and hardly more with a weak coupling."""
    first, second = random(20, 20), random(30, 30, seed=1)
    exact = math.log2(np.linalg.norm(first, 2)) + 1000
    with np.errstate(divide="ignore"):
        for coupling in (-np.inf, -4000.0, -900.0):
            log2 = np.full((50, 50), coupling)
            log2[:20, :20], log2[20:, 20:] = np.log2(first) + 1000, np.log2(second) - 1000
            bound = float(nonnegative_norm(Magnitude(log2)).log2)
            assert exact - 1e-10 <= bound <= exact + 1e-8
            bound = float(nonnegative_norm(Magnitude(log2[::-1, ::-1].T)).log2)
            assert exact - 1e-10 <= bound <= exact + 1e-8


def test_diagonal_similarity_of_any_range() -> None:
    """[[a, b], [b, c]] with a c far below b**2 has norm b, however small a and c are."""
    log2 = np.array([[-3000.0, 0.0], [0.0, -2000.0]])
    assert abs(float(nonnegative_norm(Magnitude(log2)).log2)) < 1e-9
    log2 = np.array([[-3000.0, 3000.0], [-np.inf, -2000.0]])
    assert abs(float(nonnegative_norm(Magnitude(log2)).log2) - 3000) < 1e-9


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 30, 300]), st.integers(0, 2**31))
def test_never_below_the_exact_quotient_of_any_vector(rows: int, columns: int, spread: int, seed: int) -> None:
    """Entries are powers of two, exact in both representations; the quotient is exact too."""
    generator = np.random.default_rng(seed)
    powers = generator.integers(-spread, spread + 1, (rows, columns))
    zero = generator.random((rows, columns)) < 0.3
    square = fmpq_mat(
        rows, columns, [fmpq(0) if z else fmpq(2) ** int(p) for z, p in zip(zero.flat, powers.flat, strict=True)]
    )
    bound = nonnegative_norm(Magnitude(np.where(zero, -np.inf, powers.astype(float))))
    vector = fmpq_mat(columns, 1, [fmpq(1)] * columns)
    for _ in range(6):
        image = square * vector
        length = sum((x * x for x in vector.entries()), fmpq(0))
        quotient = sum((x * x for x in image.entries()), fmpq(0)) / length
        assert (quotient == 0) == (float(bound.log2) == -math.inf)
        if quotient == 0:
            return
        # log2 of a rational to double precision, rounded down
        shift = quotient.p.bit_length() - quotient.q.bit_length()
        low = (math.log2(float(quotient * fmpq(2) ** -shift)) + shift) / 2 - 1e-13 * (1 + abs(shift))
        assert float(bound.log2) >= low
        vector = square.transpose() * image


def test_zeros_infinities_and_shapes() -> None:
    assert nonnegative_norm(Magnitude.zero((3, 3))).is_zero
    assert nonnegative_norm(Magnitude.zero((0, 0))).is_zero
    infinite = np.zeros((3, 3))
    infinite[1, 2] = np.inf
    assert not nonnegative_norm(Magnitude(infinite)).is_finite
    assert float(nonnegative_norm(Magnitude.of(np.array([[3.0]])))) == pytest.approx(3, rel=1e-12)
    with pytest.raises(ValueError, match="matrix"):
        nonnegative_norm(Magnitude.of(3.0))


def test_a_useless_vector_is_still_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soundness does not depend on where the positive vector comes from."""

    generator = np.random.default_rng(0)
    for symmetric in (True, False):
        array = random(12, 12)
        array = array + array.T if symmetric else array
        for _ in range(20):
            vector = np.exp(5 * generator.standard_normal(12))
            monkeypatch.setattr(matrix, "_positive_vector", lambda log2, symmetric, v=vector: v)
            assert excess(array) >= -1e-12


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_large_matrices_are_bounded_sharply(symmetric: bool) -> None:
    array = np.exp(3 * np.random.default_rng(0).standard_normal((1500, 1500)))
    array = array + array.T if symmetric else array
    assert -1e-11 <= excess(array, 3000.0) <= 1e-8
