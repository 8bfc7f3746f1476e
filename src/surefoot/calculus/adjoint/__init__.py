r"""The adjoint pass: a sharp bound on the second derivative of a scalar function.

For a scalar output F the second derivative is one term per operation, weighted by its *costate*
:math:`\lambda_z = \partial F/\partial z` (Prop. lin_quad and eq. newton_decomp of the paper, on any graph):

.. math:: D^2F[v, v] = \sum_z \sum_{ij} \Big(\sum_k \lambda_{z,k}\,\partial_{ij}f_{z,k}\Big)[Dx_i[v],\,Dx_j[v]] .

* ``backward``: the costates at the centre.
* ``gradient``: the gradient at the weights, and derivatives along a move, with bounds on their errors.
* ``costates``: an enclosure of every costate over the domain.
* ``bounds``: the matrix H over pairs of variables, and the gradient.

Where samples do not interact and linear layers are not wide, products of norms are replaced by derivatives of all
samples at the centre, and bounds of how far those move over the domain:

* ``samples``: derivatives at the centre in what linear layers add to each sample.
* ``centre``: the second derivative at the centre, bounded through them.
* ``tangents``: the forward pass with derivatives sample by sample.
* ``cotangents``: costates and the second derivative over the domain.

Where the variables are few enough to follow every direction, nothing has to be assumed of layers and samples:

* ``whole``: the second derivative in all weights together (:mod:`surefoot.bounds.hessian`).

Where they are too many, and at the centre alone:

* ``composed``: Jacobians between the tensors that a network is cut at.
"""
