"""Operations without bounds: chains are cut and costs counted where the form is known; certificates are refused,
with the reason and what to write instead.
"""

from surefoot.operations.record import Form, declare

declare(
    "aten.real", "aten.imag", "aten.view_as_real", form=Form.LAYOUT, rounds=False,
)  # fmt: skip
declare(
    "aten.fft_fft", "aten.fft_ifft", "aten.fft_rfft", "aten.fft_irfft", "aten.fft_fft2", "aten.fft_ifft2",
    form=Form.LINEAR,
)  # fmt: skip
declare("aten.full", "aten.zeros", "aten.ones", "aten.eye", "aten.scalar_tensor", form=Form.LAYOUT, rounds=False)
declare("aten.inner", form=Form.PRODUCT, factors=("self", "other"))
declare("aten.addcmul", form=Form.PRODUCT, factors=("tensor1", "tensor2"))

declare(
    "aten._linalg_eigh", "aten.linalg_eig", "aten._linalg_eigvals", "aten._linalg_svd", reason=(
        "eigenvalues and singular values bend without bound where two of them meet, and their vectors turn: write "
        "what is needed as a function of the matrix (trace, logdet, matrix_power, Frobenius norm)."
    ),
)  # fmt: skip
declare("aten.linalg_qr", "aten.geqrf", "aten.linalg_householder_product", reason=(
    "its factors turn without bound as columns become dependent: write what is needed of them with "
    "torch.linalg.solve and A.mT @ A, which have bounds."
))  # fmt: skip
declare(
    "aten.linalg_cholesky", "aten.linalg_cholesky_ex", "aten.cholesky", "aten.cholesky_solve",
    "aten.cholesky_inverse", "aten.linalg_matrix_exp", reason=(
        "factors and exponentials of matrices have no rule: write linalg.solve, linalg.inv or logdet of the "
        "matrix itself, or a few terms of the series."
    ),
)  # fmt: skip
declare("aten.linalg_pinv", "aten.linalg_lstsq", reason=(
    "it jumps where the rank changes: for full column rank write torch.linalg.solve(A.mT @ A, A.mT), for full row "
    "rank A.mT @ torch.linalg.inv(A @ A.mT), which have bounds."
))  # fmt: skip
declare("aten.linalg_lu", "aten.linalg_lu_factor", "aten.linalg_lu_factor_ex", reason=(
    "it exchanges rows where the largest of a column changes, and jumps: write linalg.solve or inv."
))  # fmt: skip
declare("aten.as_strided", reason=(
    "what it reads depends on where numbers lie in memory: write reshape, slices, unfold or diagonal."
))  # fmt: skip
declare(
    "aten.lgamma", "aten.mvlgamma", "aten.digamma", "aten.polygamma", "aten.igamma", "aten.igammac", "aten.erfinv",
    "aten.special_zeta", "aten.special_ndtri", "aten.special_log_ndtr", "aten.sinc", "aten.i0", "aten.special_i0e",
    "aten.special_i1", "aten.special_i1e", "aten.special_airy_ai", "aten.special_spherical_bessel_j0",
    *(f"aten.special_bessel_{name}" for name in ("j0", "j1", "y0", "y1")),
    *(f"aten.special_modified_bessel_{name}" for name in ("i0", "i1", "k0", "k1")),
    *(f"aten.special_scaled_modified_bessel_{name}" for name in ("k0", "k1")),
    reason=(
        "of this special function neither derivatives nor the round-off of its kernel have proved bounds. It may "
        "be applied to what does not vary; else write it in elementary functions where that is possible."
    ),
)  # fmt: skip
