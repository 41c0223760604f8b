"""Read checkpoints of any format, and write, verify and merge those of Mega."""
