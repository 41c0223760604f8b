"""Tokenizers, their files and their identity."""
