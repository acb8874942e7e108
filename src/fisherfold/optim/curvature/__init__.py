"""Kronecker factors of Fisher blocks.

Collected by hooks from ordinary training, and damped inverses of them.
"""
