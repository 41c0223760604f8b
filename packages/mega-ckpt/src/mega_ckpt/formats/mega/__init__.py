"""Checkpoints of Mega."""
