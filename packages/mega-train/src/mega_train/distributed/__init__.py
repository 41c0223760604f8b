"""Data parallelism: buckets of gradients, ZeRO stages, and the sums over ranks."""
