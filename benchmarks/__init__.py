"""Benchmarks by name, whose tables stand on pages of the documentation: ``python -m benchmarks --list``.

* ``runner``: the registry, stored results, tables in pages; ``timing``: two functions side by side.
* ``networks``: models and data; every other module measures what its page is about.
* ``soak``: random rounds with faults put in; ``frozen`` and ``frozen_values``: numbers that no change may worsen.
"""
