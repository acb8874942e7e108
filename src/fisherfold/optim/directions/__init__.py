"""Directions: what becomes of the momentum of a weight before it is projected onto its tangent space."""
