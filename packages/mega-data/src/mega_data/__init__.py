"""Raw text to a binarized corpus."""

__version__ = "0.1.0"
