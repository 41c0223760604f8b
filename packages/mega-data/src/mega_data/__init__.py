"""Build training datasets from raw text."""

__version__ = "0.1.0"
