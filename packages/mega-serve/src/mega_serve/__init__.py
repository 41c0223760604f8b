"""Answer text generation requests over HTTP with the interface of Megatron's server.

The model comes from a checkpoint directory. The server opens no connection to another machine.
"""

__version__ = "0.1.0"
