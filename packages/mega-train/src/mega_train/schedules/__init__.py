"""Values that change with the samples of a run: learning rate, batch size, sequence length."""
