"""Moved to ``surefoot.calculus.segment.along``."""

from surefoot.calculus.segment.along import Along

__all__ = ["Along"]
