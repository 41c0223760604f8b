"""The training process: set-up, the loop over steps, and one step."""
