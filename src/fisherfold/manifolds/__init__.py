"""Geometry and nothing else: points, tangent vectors, projections, retractions and transports."""
