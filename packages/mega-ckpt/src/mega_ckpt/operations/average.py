"""Average the weights of several checkpoints of one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mega_ckpt.checkpoint.verify import check_metadata
from mega_ckpt.checkpoint.writer import check_run_folder, rank_shares, saving_checkpoint, write_shares
from mega_ckpt.tensors import dtypes
from mega_ckpt.tensors.parallel_map import Progress, no_progress
from mega_ckpt.tensors.row_stream import RowChunk, rows_per_chunk, stream_rows
from mega_schema.checkpoint.checkpoint_dir import TOKENIZER
from mega_schema.checkpoint.reader import MAIN, MODEL, Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import WHOLE


def ema_weights(count: int, decay: float) -> list[float]:
    """Return the weight of each of `count` checkpoints in an exponential moving average, oldest first.

    Each checkpoint has the weight 1 - decay, and all earlier ones together have the weight `decay`.

    Raises:
        ConfigError: the decay is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise ConfigError("--ema", "is not a decay", found=decay, wanted="between 0 and 1", hint="--ema 0.9")
    return [decay ** (count - 1)] + [(1 - decay) * decay ** (count - 1 - i) for i in range(1, count)]


def average(
    sources: Sequence[Checkpoint],
    run: Path,
    weights: Sequence[float],
    *,
    force: bool = False,
    progress: Progress = no_progress,
) -> Path:
    """Write the weighted mean of the sources' weights as a checkpoint without optimizer state.

    The mean is summed in float64 from each source's most precise weights and rounded once, to the dtype of
    the first source. Iteration, trainer.json, configuration and tokenizer are those of the source with the
    highest iteration.

    Args:
        weights: one number for each source, 0 or more; they are divided by their sum.
        force: replace a checkpoint of this iteration.
        progress: called with the bytes written.

    Raises:
        ConfigError: the models differ, a weight is negative, or `run` is a source or has checkpoints.
        FormatError: a source is damaged.
    """
    first = sources[0]
    newest = max(sources, key=lambda source: source.iteration)
    if len(weights) != len(sources):
        raise ConfigError("--weights", "count", found=len(weights), wanted=len(sources))
    if min(weights) < 0 or not 0 < sum(weights) < np.inf:
        raise ConfigError(
            "--weights", "are not 0 or more with a sum above 0", found=",".join(f"{w:g}" for w in weights)
        )
    for source in sources:
        _check_model(first, source)
        if run.resolve() in (source.folder.resolve(), source.folder.resolve().parent):
            raise ConfigError("--save", "is the folder of a source", found=run, wanted="another folder")
    check_run_folder(run, newest.iteration, force=force)
    for source in sources:
        check_metadata(source)
    spaces = [MAIN if MAIN in source.tensors else MODEL for source in sources]
    kinds = {name: tensor.dtype for name, tensor in first.tensors[MODEL].items()}
    parts = [weight / sum(weights) for weight in weights]

    def read_rows(_: str, name: str) -> Iterator[RowChunk]:
        shape = first.tensors[MODEL][name].shape
        rows = rows_per_chunk(shape, "F64")
        streams = [stream_rows(s, space, name, rows) for s, space in zip(sources, spaces, strict=True)]
        stored = [s.tensors[space][name].dtype for s, space in zip(sources, spaces, strict=True)]
        for chunks in zip(*streams, strict=True):
            mean = np.zeros(chunks[0].values.shape)
            for chunk, dtype, part in zip(chunks, stored, parts, strict=True):
                with np.errstate(invalid="ignore"):  # infinities of two signs have no mean: a NaN
                    mean += part * dtypes.as_float64(chunk.values, dtype)
            yield RowChunk(chunks[0].first, _round_mean(mean, kinds[name], f"{run}: {name}"))

    tokenizer = newest.folder / TOKENIZER
    averaged = [
        {"folder": str(source.folder), "iteration": source.iteration, "weight": part}
        for source, part in zip(sources, parts, strict=True)
    ]
    with saving_checkpoint(run, newest.iteration) as save:
        write_shares(save, {MODEL: rank_shares(first.spec, WHOLE, kinds)}, read_rows, progress)
        return save.commit(
            first.spec,
            layout=WHOLE,
            trainer={**newest.trainer, "average_of": averaged},
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            run_config=newest.run_config,
            replace=force,
        )


def _check_model(first: Checkpoint, checkpoint: Checkpoint) -> None:
    wanted, found = first.spec.to_dict(), checkpoint.spec.to_dict()
    for key, value in wanted.items():
        if found[key] != value:
            raise ConfigError(
                f"{checkpoint.folder}: model.{key}",
                f"differs from that of {first.folder}",
                found=found[key],
                wanted=value,
            )


def _round_mean(mean: np.ndarray, dtype: str, where: str) -> np.ndarray:
    if dtype == "F64":
        return mean
    with np.errstate(over="ignore"):  # means of float32 numbers are within their range
        return dtypes.cast(mean.astype(np.float32), "F32", dtype, where)
