"""Signals, hang detection, exit conditions, and which rank reports an error."""
