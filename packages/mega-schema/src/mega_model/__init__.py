"""The model: layers, loss and generation. Knows ranks and tensors; no files, no command line.

`World.from_env` is the only reader of environment variables (RANK, WORLD_SIZE, LOCAL_RANK).

Shape suffixes, in every file here:
    T  tokens of this forward pass, all rows end to end; with sequence parallelism, this rank's shard of them
    B, S  rows, and tokens in a row (T = B·S)
    D  width of the residual stream     F  width inside the feed-forward
    N  query heads on this rank         K  key and value heads on this rank       H  components of a head
    V  this rank's shard of the vocabulary, padding included
"""
