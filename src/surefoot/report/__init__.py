"""The report: certificates as one self-contained HTML page.

* ``page``: :func:`write_report` and :func:`render_report`; ``convergence``: :func:`write_convergence` and
  :func:`render_convergence`, the page of a verdict about convergence.
* ``summary``, ``growth``, ``blocks``, ``rules``: what the sections of the page show: numbers, side by side too;
  curves and the table of layers; the matrix of blocks; claims and proofs of rules as HTML.

The page, its style and its script are in ``templates``.
"""

from surefoot.report.convergence import render_convergence, write_convergence
from surefoot.report.page import ReportError, render_report, write_report

__all__ = ["ReportError", "render_convergence", "render_report", "write_convergence", "write_report"]
