"""Polynomials along a segment, with a bound of what they leave out."""
