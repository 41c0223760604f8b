"""Work on checkpoints without a trainer, a model or a GPU: reshard, inspect, verify, convert. numpy only."""

__version__ = "0.1.0"
