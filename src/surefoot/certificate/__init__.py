"""The certificate and how it is shown."""

from surefoot.certificate.record import Certificate, Row

__all__ = ["Certificate", "Row"]
