"""Train GPT and Llama models with tensor, sequence, context, pipeline and data parallelism."""

__version__ = "0.1.0"
