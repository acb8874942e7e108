"""Benchmarks of fisherfold beside its peers; ``python -m benchmarks list`` names them."""
