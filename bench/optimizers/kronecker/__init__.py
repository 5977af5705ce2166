"""Curvature as Kronecker products of two small matrices per layer: taken, exchanged, applied."""
