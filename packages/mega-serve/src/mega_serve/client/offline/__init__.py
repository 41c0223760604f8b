"""Offline generation: batches of prompts from files, without a server."""
