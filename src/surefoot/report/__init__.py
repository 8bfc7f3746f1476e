"""The report: certificates as one self-contained HTML page.

* ``page``: :func:`write_report` and :func:`render_report`.
* ``summary``, ``layers``, ``growth``, ``blocks``, ``side_by_side``, ``rules``: what the sections of the page show.
* ``docstrings``: claims and proofs of rules as HTML. ``templates``: the page, its style and its script.
"""

from surefoot.report.page import ReportError, render_report, write_report

__all__ = ["ReportError", "render_report", "write_report"]
