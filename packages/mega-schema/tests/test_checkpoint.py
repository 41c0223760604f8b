"""Reading: boxes across pieces, bfloat16, which checkpoint is the latest. Damage is in tests/conformance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.checkpoint_dir import LATEST, MANIFEST
from mega_schema.checkpoint.reader import MODEL, BoxToWrite, Checkpoint
from mega_schema.checkpoint.shard_file import piece_key
from mega_schema.checkpoint.side_files import replace_manifest
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import FormatError
from mega_schema.parallel_layout import WHOLE
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt


@pytest.fixture
def spec() -> ModelSpec:
    return gpt(layers=1, hidden=4, heads=2, vocab=6, max_seq_len=4)


def _save(run: Path, spec: ModelSpec, array: np.ndarray, dtype: str, *, iteration: int = 1) -> Checkpoint:
    """A checkpoint with one (6, 4) tensor, in four boxes of two ranks."""
    save = CheckpointWriter(run, iteration)
    save.begin()
    for rank, rows in enumerate((slice(0, 2), slice(2, 6))):
        cut = [Slab((rows.start, column), (rows.stop - rows.start, 2), (0, column)) for column in (0, 2)]
        save.write(
            MODEL,
            rank,
            [BoxToWrite("embed.weight", (6, 4), slab, dtype) for slab in cut],
            lambda b: array[b.slab.in_global],
        )
    return Checkpoint(save.commit(spec, layout=WHOLE, trainer={"iteration": iteration}))


def test_any_box_is_read_across_the_pieces(tmp_path: Path, spec: ModelSpec) -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    checkpoint = _save(tmp_path, spec, array, "F32")
    for top in range(6):
        for left in range(4):
            shape = (6 - top, 4 - left)
            box = Slab((top, left), shape, (0, 0))
            assert np.array_equal(checkpoint.model_slab("embed.weight", box), array[top:, left:])


def test_bfloat16_is_read_as_the_float32_that_equals_it(tmp_path: Path, spec: ModelSpec) -> None:
    numbers = np.linspace(-3, 3, 24, dtype=np.float32).reshape(6, 4)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    checkpoint, whole = _save(tmp_path, spec, bits, "BF16"), Slab((0, 0), (6, 4), (0, 0))
    assert np.array_equal(checkpoint.read_raw(MODEL, "embed.weight", whole), bits)
    read = checkpoint.read(MODEL, "embed.weight", whole)
    assert read.dtype == np.float32
    assert np.array_equal(read.view(np.uint32), bits.astype(np.uint32) << 16)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, spec: ModelSpec) -> None:
    checkpoint = _save(tmp_path, spec, np.zeros((6, 4), np.float32), "F32")
    for space, name in ((MODEL, "more"), ("optim.main", "embed.weight")):
        with pytest.raises(FormatError, match=f"has no such tensor: wanted {space} {name}"):
            checkpoint.read(space, name, Slab((0,), (1,), (0,)))


def test_a_box_past_the_pieces_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    checkpoint = _save(tmp_path, spec, np.zeros((6, 4), np.float32), "F32")
    with pytest.raises(FormatError, match="elements covered by pieces: found 4, wanted 8"):
        checkpoint.read(MODEL, "embed.weight", Slab((5, 0), (2, 4), (0, 0)))


def test_a_run_and_one_of_its_checkpoints_open_alike(tmp_path: Path, spec: ModelSpec) -> None:
    for iteration in (1, 2):
        _save(tmp_path, spec, np.zeros((6, 4), np.float32), "F32", iteration=iteration)
    assert Checkpoint.open(tmp_path).iteration == 2
    assert Checkpoint.open(tmp_path / "iter_0000001").iteration == 1
    assert Checkpoint.open(tmp_path).spec == spec


def test_an_empty_and_a_missing_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="contains no finished checkpoint: found no checkpoint, wanted"):
        latest_checkpoint(tmp_path)
    with pytest.raises(FormatError, match="no such folder"):
        latest_checkpoint(tmp_path / "nowhere")
    (tmp_path / ".iter_0000007.partial").mkdir()
    with pytest.raises(FormatError, match="found half-written .iter_0000007.partial"):
        latest_checkpoint(tmp_path)


def test_a_tracker_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / LATEST).write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match=f"{LATEST}: content"):
        latest_checkpoint(tmp_path)


def test_a_foreign_folder_named_by_a_tracker_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / LATEST).write_text("5", "utf-8")
    with pytest.raises(FormatError, match=f"iter_0000005: is not a Mega checkpoint: found no {MANIFEST}"):
        latest_checkpoint(tmp_path)


def test_readers_know_nothing_of_the_layout_that_wrote(tmp_path: Path, spec: ModelSpec) -> None:
    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    folder = _save(tmp_path, spec, array, "F32").folder
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["layout"] = {"tp": 64, "pp": 8, "dp": 1}
    replace_manifest(folder, json.dumps(manifest))
    whole = Slab((0, 0), (6, 4), (0, 0))
    assert np.array_equal(Checkpoint(folder).model_slab("embed.weight", whole), array)


def test_a_part_is_called_by_its_place_and_a_whole_by_its_name() -> None:
    assert piece_key("w", (4, 2), (0, 0), (4, 2)) == "w"
    assert piece_key("w", (4, 2), (2, 0), (2, 2)) == "w[2:4,0:2]"
