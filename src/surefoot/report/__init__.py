"""The report: certificates as one self-contained HTML page.

* ``page``: :func:`write_report` and :func:`render_report`; ``convergence``: :func:`write_convergence` and
  :func:`render_convergence`, the page of a verdict about convergence; ``run``: :func:`write_run` and
  :func:`render_run`, the page of a training run.
* ``variants``: :func:`what_if`, certificates for other radii and layers that a page shows side by side.
* ``summary``, ``growth``, ``blocks``, ``rules``: the contents of the sections: the numbers of one certificate or
  several; curves; the model as boxes and the matrix of blocks; claims and proofs of rules.

The page, its style and its script are in ``templates``.
"""

from surefoot.report.convergence import render_convergence, write_convergence
from surefoot.report.page import ReportError, render_report, write_report
from surefoot.report.run import render_run, write_run
from surefoot.report.variants import WhatIf, what_if

__all__ = [
    "ReportError", "WhatIf", "render_convergence", "render_report", "render_run", "what_if", "write_convergence",
    "write_report", "write_run",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
