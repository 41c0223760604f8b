"""Optimizers over float32 main weights, and the loss scaler."""
