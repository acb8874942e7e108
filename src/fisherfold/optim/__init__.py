"""Optimizers for networks with normalisation: Kronecker-factored curvature joined to the geometry of their weights."""
