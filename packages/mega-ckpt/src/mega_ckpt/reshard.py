"""A checkpoint written again as another layout would have written it: integer ranges, no model, no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_ckpt.saving import check_free, saving
from mega_ckpt.verify import verify
from mega_schema.arch import table
from mega_schema.checkpoint import MODEL, Box, Checkpoint, boxes
from mega_schema.errors import ConfigError
from mega_schema.layout import Coordinates, Layout
from mega_schema.run_folder import RUN_CONFIG, TOKENIZER
from mega_schema.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes of a namespace."""

    rank: int
    boxes: tuple[Box, ...]


def shares(spec: ModelSpec, layout: Layout, dtypes: Mapping[str, str]) -> list[Share]:
    """What every rank of the layout writes: the boxes it answers for.

    Args:
        dtypes: safetensors' name of the dtype of every parameter that is written.

    Raises:
        LayoutError: the model cannot be cut this way.
    """
    rows = [row for row in table(spec) if row.tied_to is None and row.name in dtypes]
    found = []
    for pp in range(layout.pp):
        stage = layout.stage(pp, spec.layers)
        for tp in range(layout.tp):
            mine = [row for row in rows if row.on(stage)]
            cut = [boxes(row.name, row.shape, row.owned(tp, layout.tp), dtypes[row.name]) for row in mine]
            rank = layout.rank(Coordinates(tp, 0, pp))
            found.append(Share(rank, tuple(box for some in cut for box in some)))
    return found


def reshard(
    source: Checkpoint, run: Path, layout: Layout, *, optimizer: bool = True, overwrite: bool = False
) -> Path:
    """Write the checkpoint into `run` as `layout` would have; values, trainer state and tokenizer stay.

    One box is in memory at a time. The source is verified first: a copy of damaged bytes would carry
    checksums that call them sound.

    Args:
        layout: tp and pp of the pieces; the optimizer's state is not cut over dp.
        optimizer: carry the optimizer's namespaces too.
        overwrite: replace a checkpoint of this iteration.

    Returns:
        the new checkpoint's folder.

    Raises:
        LayoutError: the model cannot be cut this way.
        ConfigError: `run` is where the source is, or has this iteration already.
        FormatError: the source is damaged.
    """
    spaces = [space for space in source.tensors if optimizer or space == MODEL]
    # a layout that cannot be is refused before anything is read
    shares(source.spec, layout, {row.name: "F32" for row in table(source.spec)})
    if run.resolve() in (source.folder.resolve(), source.folder.resolve().parent):
        raise ConfigError("--save", "is where --load is", found=run, wanted="another folder")
    check_free(run, source.iteration, overwrite=overwrite)
    verify(source)
    tokenizer, run_config = source.folder / TOKENIZER, source.folder / RUN_CONFIG
    with saving(run, source.iteration) as save:
        for space in spaces:
            dtypes = {name: tensor.dtype for name, tensor in source.tensors[space].items()}

            def values(box: Box, space: str = space) -> np.ndarray:
                return source.read_raw(space, box.name, box.slab)

            for share in shares(source.spec, layout, dtypes):
                save.write(space, share.rank, share.boxes, values)
        return save.commit(
            source.spec,
            layout=layout,
            trainer=source.trainer,
            tokenizer=tokenizer if tokenizer.is_dir() else None,
            run_config=run_config.read_text("utf-8") if run_config.is_file() else None,
        )
