"""Models that are evaluated: a checkpoint in one process or over ranks, or a server."""
