"""Train GPT and Llama models in tensor, sequence, pipeline and data parallel."""

__version__ = "0.1.0"
