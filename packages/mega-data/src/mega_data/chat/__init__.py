"""Encode conversations by a chat template to a dataset that `mega-train --sft` reads."""
