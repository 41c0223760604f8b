"""Meta's Llama folders."""
