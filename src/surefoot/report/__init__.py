"""The report: one HTML page of certificates, of a run of an optimizer, or of a verdict of convergence.

It is made from documents of plain values (``to_dict``) alone. ``document`` has those of runs, ``views`` turns a
document into what the page shows, ``page`` writes it; the page and its style are in ``templates``.
"""

from surefoot.report.document import run_document
from surefoot.report.page import ReportError, fragment, render_report, write_report

__all__ = ["ReportError", "fragment", "render_report", "run_document", "write_report"]
