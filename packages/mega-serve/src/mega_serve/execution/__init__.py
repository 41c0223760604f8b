"""The model runner: torch, kernels for a CPU, and the weights in the form they compute with."""
