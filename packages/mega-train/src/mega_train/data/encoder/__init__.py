"""Samples for BERT and T5: masked tokens of consecutive sentences, in Megatron's order of random draws."""
