"""How to cite the paper and the software; the same facts as in ``CITATION.cff``."""

from __future__ import annotations

from surefoot import __version__

_PAPER = """@article{roulet2020elementary,
  title   = {An Elementary Approach to Convergence Guarantees of Optimization Algorithms for Deep Networks},
  author  = {Roulet, Vincent and Harchaoui, Zaid},
  journal = {arXiv preprint arXiv:2002.09051},
  year    = {2020},
  url     = {https://arxiv.org/abs/2002.09051}
}"""

_SOFTWARE = """@software{surefoot,
  title   = {surefoot},
  author  = {{The surefoot developers}},
  version = {%s},
  note    = {Smoothness certificates and exact optimization oracles for PyTorch models}
}"""


def bibtex() -> str:
    """Two entries in BibTeX: the paper that surefoot implements, and surefoot."""
    return f"{_PAPER}\n\n{_SOFTWARE % __version__}"


__all__ = ["bibtex"]
