"""Reshard, inspect, verify and convert checkpoints with numpy only: no trainer, no model, no GPU."""

__version__ = "0.1.0"
