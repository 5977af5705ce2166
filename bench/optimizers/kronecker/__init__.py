"""K-FAC's curvature, as Kronecker products of two small matrices per layer: measure, exchange and apply it."""
