"""Which tokens a step is made of: splits, samples and their order, all a function of integers."""
