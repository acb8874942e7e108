"""Coefficients integrated out instead of plugged in: Gaussian posteriors, learnt priors and noise."""
