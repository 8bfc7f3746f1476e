"""Proved upper bounds of operator norms, round-off included.

* ``hermitian``: what floating-point arithmetic may have lost; the largest eigenvalue of a Hermitian matrix, by a
  residual;
* ``matrix``: spectral and Frobenius norms of matrices, of batches of matrices and of matrices of magnitudes;
* ``symbol``: the norm of a convolution from its values at the frequencies of a torus;
* ``convolution``: the norm of PyTorch's convolutions, and the overlap of their patches;
* ``blocked``: symmetric matrices by panels of rows, and their Cholesky factors;
* ``verified``: linear algebra with a proof: products, extreme eigenvalues, least solutions, the norm of a large
  symmetric matrix by its leading eigenvectors and the rest.
"""

from surefoot.norms.convolution import convolution_norm, patch_overlap
from surefoot.norms.matrix import batched_spectral_norm, frobenius_norm, nonnegative_norm, spectral_norm

__all__ = [
    "batched_spectral_norm", "convolution_norm", "frobenius_norm", "nonnegative_norm", "patch_overlap",
    "spectral_norm",
]  # fmt: skip
