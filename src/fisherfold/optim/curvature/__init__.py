"""Kronecker factors of Fisher blocks: collected by hooks from ordinary training, and damped inverses of them."""
