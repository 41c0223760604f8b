"""Checkpoints of a run: what they hold, when they are written, and how a run resumes."""
