"""Read and write files of `torch.save` without torch."""
