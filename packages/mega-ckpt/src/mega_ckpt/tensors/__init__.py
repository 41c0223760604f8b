"""Read, cast and stream tensors: dtypes, row chunks, mapped files, safetensors."""
