"""Proved progress for other training frameworks, which train as usual.

* ``keeping``: :class:`~surefoot.integrations.keeping.Keeper`, which goes back to the weights it kept last unless
  the objective of all data is proved to be lower.
* ``lightning``: a keeper as a callback of Lightning; ``accelerate``: a keeper for loops with Accelerate.

This package can be imported without either framework.
"""
