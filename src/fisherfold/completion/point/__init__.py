"""The paper's completion problem on the Grassmann manifold, and point estimates by its solvers."""
