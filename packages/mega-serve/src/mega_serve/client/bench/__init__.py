"""A load generator with the flags, metrics and result keys of `vllm bench serve`."""
