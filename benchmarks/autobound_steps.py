"""How long a step along the gradient autobound proves safe: a script for an environment with JAX of its own.

``build/autobound/bin/python benchmarks/autobound_steps.py problem.npz`` reads weights, data and a direction,
bounds F(u + ηd) on [0, e] by a polynomial of degree 2 with an interval as its last coefficient
(``taylor_bounds``), and prints as JSON the largest e with 2·upper·e ≤ ‖d‖² (the rule of
``benchmarks/safe_step.py``) and the seconds of one bound, compiled. autobound 0.1.4 needs an old JAX, such as
0.4.18: later ones have no ``jax.core.Jaxpr``.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from autobound.jax import taylor_bounds
from bracketing import longest  # beside this script

jax.config.update("jax_enable_x64", True)


def main(path: str) -> None:
    """Search from the guess, to a thousandth from below."""
    held = np.load(path)
    layers = int(held["layers"])
    u = [(jnp.asarray(held[f"w{k}"]), jnp.asarray(held[f"b{k}"])) for k in range(layers)]
    d = [(jnp.asarray(held[f"dw{k}"]), jnp.asarray(held[f"db{k}"])) for k in range(layers)]
    x, y, square = jnp.asarray(held["x"]), jnp.asarray(held["y"]), float(held["square"])

    def value(eta: jax.Array) -> jax.Array:
        z = x
        for k, ((w, b), (dw, db)) in enumerate(zip(u, d, strict=True)):
            z = z @ (w + eta * dw).T + (b + eta * db)
            if k < layers - 1:
                z = jax.nn.softplus(z)
        return 0.5 * jnp.sum((z - y) ** 2) / len(x)

    bound = jax.jit(lambda e: taylor_bounds(value, max_degree=2)(0.0, (0.0, e)).coefficients[2][1])

    def safe(e: float) -> bool:
        return 2 * float(bound(e)) * e <= square

    low = longest(safe, float(held["guess"]))
    times = []
    for _ in range(5):
        start = time.process_time()
        float(bound(low))
        times.append(time.process_time() - start)
    print(json.dumps({"step": low, "seconds": sorted(times)[2]}))


if __name__ == "__main__":
    main(sys.argv[1])
