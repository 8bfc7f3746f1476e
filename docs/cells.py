"""Write ``src/surefoot/scalar/cells.npz``: what ball arithmetic says of the activations of torch.nn, cell by cell.

``python docs/cells.py`` computes it anew, in some seconds; a test compares the file with what is computed.
"""

from __future__ import annotations

import numpy as np

from surefoot.scalar.table import CELLS, Grid, shipped


def main() -> None:
    """Compute and write."""
    grids = {name: Grid(function) for function, name in shipped().items()}
    steps = {f"{name}.step": np.array(grid.step) for name, grid in grids.items()}
    np.savez_compressed(CELLS, **{name: grid.rows for name, grid in grids.items()}, **steps)


if __name__ == "__main__":
    main()
