"""What is known about each operation, one file per family.

* ``forms``: whether an operation is linear, a product, element-wise or none of these.
"""
