"""Data parallelism: gradient buckets, ZeRO stages, and reductions over ranks."""
