"""llama2.c's model files, read only."""
