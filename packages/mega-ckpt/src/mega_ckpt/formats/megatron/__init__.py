"""Megatron-LM's classic checkpoints: one file per rank."""
