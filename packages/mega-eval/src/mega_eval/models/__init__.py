"""Models that are evaluated: a checkpoint, a Hugging Face folder, or a server."""
