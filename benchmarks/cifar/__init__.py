"""Networks on CIFAR: the training script and the comparisons made with it."""
