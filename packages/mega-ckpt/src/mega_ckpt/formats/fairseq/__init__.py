"""fairseq's megatron_11b checkpoints, read only."""
