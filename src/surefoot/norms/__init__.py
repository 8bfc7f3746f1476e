"""Proved upper bounds of operator norms, round-off included.

* ``rounding``: what floating-point arithmetic may have lost, and exact scaling;
* ``hermitian``: the largest eigenvalue of a Hermitian matrix, proved by a residual;
* ``matrix``: spectral and Frobenius norms of matrices and batches of matrices;
* ``nonnegative``: the spectral norm of a matrix of magnitudes of any range;
* ``symbol``: the norm of a convolution from its values at the frequencies of a torus;
* ``convolution``: the norm of PyTorch's convolutions, and the overlap of their patches.
"""

from surefoot.norms.convolution import convolution_norm, patch_overlap
from surefoot.norms.matrix import batched_spectral_norm, frobenius_norm, spectral_norm
from surefoot.norms.nonnegative import nonnegative_norm

__all__ = [
    "batched_spectral_norm",
    "convolution_norm",
    "frobenius_norm",
    "nonnegative_norm",
    "patch_overlap",
    "spectral_norm",
]
