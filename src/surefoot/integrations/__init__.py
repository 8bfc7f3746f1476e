"""Other training frameworks, which train as they do while what they reach is proved.

* ``keeping``: :class:`~surefoot.integrations.keeping.Keeper`, which goes back to the weights it kept last unless
  the objective of all data is proved to be lower.
* ``lightning``: the same as a callback of Lightning; ``accelerate``: the same for loops with Accelerate.

Neither package is needed to import this one.
"""
