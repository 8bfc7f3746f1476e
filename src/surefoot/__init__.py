"""Learning rates with a proof: smoothness certificates and exact optimization oracles for PyTorch models."""

__version__ = "0.1.0.dev0"
