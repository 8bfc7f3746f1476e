"""Epoch checks (:class:`surefoot.KeepIfLower`) in other training frameworks, which train as usual.

* ``lightning``: as a callback of Lightning; ``accelerate``: for loops with Accelerate.

This package can be imported without either framework.
"""
