"""Clients of the server: HTTP client, load generator, offline batches. No torch and no web framework."""
