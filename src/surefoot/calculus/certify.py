"""Moved: to ``surefoot.certificate.proving`` and ``surefoot.calculus.leaves``."""

from surefoot.calculus.leaves import Wrt, ordinary_device
from surefoot.certificate.proving import certify_proved as certify

__all__ = ["Wrt", "certify", "ordinary_device"]
