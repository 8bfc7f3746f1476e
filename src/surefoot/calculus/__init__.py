"""The smoothness calculus.

* ``enclosure``: what is known about a tensor over a domain.
* ``prepare``: the graph rewritten into operations with sharp constants.
* ``forward``: bound, spread and Lipschitz constants of every tensor, by one forward pass over the rules.
* ``assemble``: the smoothness, as a matrix over pairs of variables.
* ``breakdown``: where the constants come from, operation by operation.
* ``certify``: all of it, from a model and a domain to a certificate.
* ``paper``: the paper's statements as printed, and its Algorithm 4 on a chain.
"""
