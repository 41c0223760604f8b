"""The commands of `mega-serve`."""
