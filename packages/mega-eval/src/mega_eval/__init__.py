"""Scores a language model on LAMBADA, on WikiText-103 and on held-out text, next to counted baselines."""

__version__ = "0.1.0"
