"""Megatron core's torch_dist folders, written by torch.distributed.checkpoint."""
