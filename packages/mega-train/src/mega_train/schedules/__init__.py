"""Schedules over a run: learning rate, weight decay, batch size, sequence length."""
