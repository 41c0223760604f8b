"""Training data: splits, samples and their order, all functions of integers."""
