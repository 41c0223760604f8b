"""What is on disk: names, shapes, cuts and bytes of everything the packages hand each other. No torch."""

__version__ = "0.1.0"
