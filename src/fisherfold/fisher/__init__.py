"""Output distributions and the Fisher information as an operator on the tangent space."""
