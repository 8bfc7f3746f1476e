"""The report: certificates as one self-contained HTML page.

* ``write``: :func:`write_report` and :func:`render_report`.
* ``summary``, ``table``, ``curves``, ``blocks``, ``compare``, ``rules``: what the sections of the page show.
* ``tree``: operations as a tree of modules. ``numbers``: how magnitudes are written.
* ``prose``, ``maths``: docstrings and their formulas as HTML.
* ``templates``: the page, its style and its script.
"""

from surefoot.report.write import ReportError, render_report, write_report

__all__ = ["ReportError", "render_report", "write_report"]
