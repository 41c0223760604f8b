"""The model: layers, loss and generation. It uses ranks and tensors, and neither files nor a command line.

`World.from_env` is the only reader of environment variables (RANK, WORLD_SIZE, LOCAL_RANK).

Shape suffixes, in every file here:
    T  tokens of this forward pass, all rows end to end; with sequence parallelism, this rank's shard of them
    B, S  rows, and tokens in a row (T = B·S)
    D  hidden size: width of the residual stream     F  inner width of the feed-forward
    N  query heads on this rank         K  key and value heads on this rank       H  head dimension
    V  this rank's shard of the vocabulary, padding included
"""
