"""Evaluate a language model on LAMBADA, WikiText-103 and held-out text, with n-gram baselines."""

__version__ = "0.1.0"
