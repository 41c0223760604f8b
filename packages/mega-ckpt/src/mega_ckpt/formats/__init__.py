"""One folder per checkpoint format: to add a format, copy a folder and list it in `registry`."""
