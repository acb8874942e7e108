"""Maximum likelihood on manifolds with the Riemannian Fisher information."""

from fisherfold._version import __version__

__all__ = ["__version__"]
