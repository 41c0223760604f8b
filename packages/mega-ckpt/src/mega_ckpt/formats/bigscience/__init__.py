"""BigScience's Megatron-DeepSpeed checkpoints, read only."""
