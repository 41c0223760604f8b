"""File formats and parameter tables: names, shapes, splits and bytes that packages exchange. No torch."""

__version__ = "0.1.0"
