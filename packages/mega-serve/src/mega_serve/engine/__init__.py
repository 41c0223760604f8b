"""The engine: continuous batching over a paged KV cache. Its logic needs no torch."""
