"""Answers text generation requests over HTTP, in the words of Megatron's server. Its model comes from a
checkpoint directory; nothing here reaches out to any other machine.
"""

__version__ = "0.1.0"
