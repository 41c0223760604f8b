"""Code that the command-line programs share: configuration, exit codes, hints, HTML page layout."""
