"""Benchmarks: how long surefoot takes, as ratios to plain PyTorch in the same run.

* ``timing``: measuring two functions side by side; ``keeping``: what was measured, and of which code.
* ``training``: certified descent next to other methods at equal work, on the ``networks``, by the methods of
  ``baselines``; ``minibatches``: proved epochs next to fixed rates; ``cells``: their results in files.
* ``autodiff``: the automatic-differentiation oracle against ``torch.autograd.grad``.

``python -m benchmarks`` runs all of them and writes ``docs/benchmarks.md``. A benchmark is a module of this folder
with a function ``run`` that returns its rows, or functions that measure them.
"""
