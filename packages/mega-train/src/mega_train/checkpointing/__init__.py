"""Checkpoints of a run: content, asynchronous saves, and resuming."""
