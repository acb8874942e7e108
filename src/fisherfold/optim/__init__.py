"""Optimizers for networks, in the habits of torch.optim."""
