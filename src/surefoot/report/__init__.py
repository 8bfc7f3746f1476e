"""What a person sees.

* ``text``: a certificate as a table in plain text, and ``notebook`` as HTML for notebooks; both from ``tree``, the
  operations as a tree of modules, and ``numbers``, how magnitudes are printed.
* ``advice``: verdict, what limits a certificate and what would help, in words.
* ``document``: plain values and JSON, there and back.
* ``frame``, ``plot``: as a pandas data frame, as a figure.
* ``page``: certificates as one self-contained HTML page.
* ``citation``: how to cite.
"""
