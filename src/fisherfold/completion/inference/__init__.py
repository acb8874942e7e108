"""Variational inference: sums over ratings, posteriors, prior means, likelihoods and passes."""
