"""The smoothness calculus, on (model, batch, objective) read once.

* ``analysis``: what was read, and whether it is still true.
* ``leaves``: an objective behind a model; the leaves of the graph over a domain.
* ``prepare``: the graph rewritten into operations with sharp constants.
* ``folding``: what no variable enters, computed once, with its error.
* ``forward``: bound, spread and Lipschitz constants of every tensor, by one forward pass over the rules.
* ``assemble``: the smoothness, as a matrix over pairs of variables.
* ``increments``: how much larger a difference of inputs may come out.
* ``adjoint``: for one number, a sharper one by a pass backwards.
* ``effort``: what a certificate may cost.
* ``breakdown``: where the constants come from, and what would change them.
* ``segment``: a function along a direction.
"""
