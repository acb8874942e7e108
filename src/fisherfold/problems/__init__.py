"""Where data lives: losses over manifolds as finite sums."""

from fisherfold.problems.base import Problem, Snapshot

__all__ = ["Problem", "Snapshot"]
