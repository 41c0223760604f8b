"""Checkpoints on disk: manifest, shard files, atomic commit, asynchronous writer."""
