"""Property tests for what users add themselves: they assert mathematics, not mere survival."""

from fisherfold.testing.manifolds import check_manifold

__all__ = ["check_manifold"]
