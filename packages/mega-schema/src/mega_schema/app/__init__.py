"""What the command-line programs share: configuration, exit codes, hints, the frame of an HTML page."""
