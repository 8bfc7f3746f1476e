"""What a person sees.

* ``text``: a certificate as a table.
"""
