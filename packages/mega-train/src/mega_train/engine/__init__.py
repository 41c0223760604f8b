"""The training process: set-up, train loop and train step."""
