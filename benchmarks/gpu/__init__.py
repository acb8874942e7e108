"""Benchmarks that are meant for a GPU; without one they show only that they run."""
