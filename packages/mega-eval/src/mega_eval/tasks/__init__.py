"""The tasks: each turns text into windows, asks a scorer about them and sums up the answers."""
