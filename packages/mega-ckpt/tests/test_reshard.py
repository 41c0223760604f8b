"""`reshard` copies everything, and refuses before it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.checkpoint.writer import rank_shares
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.reshard import reshard
from mega_ckpt.tensors import row_stream
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import FORMAT, LATEST
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, BoxToWrite, Checkpoint
from mega_schema.checkpoint.side_files import replace_manifest, rewrite_checksums
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.parallel_layout import Coordinates, Layout
from mega_schema.params import is_layer_matrix
from mega_schema.spec import ModelSpec


def test_the_command_writes_what_the_ranks_of_the_layout_would(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run = run_folder(small_gpt)
    result = mega("reshard", "--load", run, "--save", tmp_path / "new", "--tp", 2, "--pp", 2)
    assert result.exit_code == 0, result.output
    size = sum(file.stat().st_size for file in (tmp_path / "new" / "iter_0000003").glob("*.safetensors"))
    assert result.output.count("\n") == 1
    assert f"{size:,} bytes in " in result.output
    assert result.output.endswith("tp=2 pp=2\n")
    old, new = Checkpoint.open(run), Checkpoint.open(tmp_path / "new")
    verify(new)
    assert set(new.tensors) == {MODEL, *OPTIMIZER}
    assert sorted(new.files) == [
        f"{s}-{rank:05d}.safetensors" for s in sorted(new.tensors) for rank in range(4)
    ]
    assert new.trainer == old.trainer
    for name in ("run.toml", "tokenizer/identity.json"):
        assert (new.folder / name).read_bytes() == (old.folder / name).read_bytes()


@pytest.mark.parametrize(
    ("tp", "pp"),
    [
        ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
        ("--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
    ],
)
def test_megatrons_names_of_the_degrees_do_too(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, tp: str, pp: str
) -> None:
    mega("reshard", "--load", run_folder(small_gpt), "--save", tmp_path / "new", tp, 4, pp, 2)
    assert Checkpoint.open(tmp_path / "new").written_by == {"tp": 4, "pp": 2, "cp": 1, "dp": 1}


def test_the_optimizer_can_be_left_behind(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    mega("reshard", "--load", run_folder(small_gpt), "--save", tmp_path / "new", "--no-optim")
    assert list(Checkpoint.open(tmp_path / "new").tensors) == [MODEL]


@pytest.mark.parametrize(("layout", "message"), [(Layout(tp=3), "4 heads"), (Layout(pp=3), "2 layers")])
def test_a_layout_that_does_not_divide_is_refused_before_anything_is_written(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, layout: Layout, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        reshard(Checkpoint.open(run_folder(small_gpt)), tmp_path / "new", layout)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("onto", ["run", "run/iter_0000003", "other/../run"])
def test_the_source_is_not_written_onto(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, onto: str
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="--save: is the same folder as --load"):
        reshard(source, tmp_path / onto, Layout(tp=2), force=True)
    verify(Checkpoint.open(tmp_path / "run"))


def test_a_checkpoint_of_the_iteration_is_replaced_only_when_asked(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    target = run_folder(small_gpt, "there", scale=2.0)
    before = Checkpoint.open(target)
    with pytest.raises(ConfigError, match="there is a checkpoint already.*--force"):
        reshard(source, target, Layout(tp=2))
    verify(before)
    reshard(source, target, Layout(tp=2), force=True)
    assert Checkpoint.open(target).written_by["tp"] == 2


def test_a_run_with_other_checkpoints_does_not_get_another_latest_one_by_mistake(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    target = run_folder(small_gpt, "there", iteration=source.iteration - 1, scale=2.0)
    earlier = Checkpoint.open(target).folder
    before = sorted(path.name for path in target.rglob("*"))
    with pytest.raises(ConfigError, match=r"--save: is a run with other checkpoints.*hint: --force adds"):
        reshard(source, target, Layout(tp=2))
    with pytest.raises(ConfigError, match=rf"--save: is a checkpoint: .*hint: --save {target}$"):
        reshard(source, earlier, Layout(tp=2), force=True)
    assert sorted(path.name for path in target.rglob("*")) == before
    assert (target / LATEST).read_text() == f"{source.iteration - 1}\n"
    reshard(source, target, Layout(tp=2), force=True)
    assert Checkpoint.open(target).iteration == source.iteration


def test_a_damaged_source_is_refused_and_nothing_is_written(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))
    file = source.folder / "optim.exp_avg-00000.safetensors"
    values = bytearray(file.read_bytes())
    values[-1] ^= 1
    file.write_bytes(values)
    with pytest.raises(FormatError, match="optim.exp_avg-00000.safetensors: .*crc32"):
        reshard(source, tmp_path / "new", Layout(tp=2))
    assert not (tmp_path / "new").exists()


def test_an_interruption_leaves_nothing_behind(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Checkpoint.open(run_folder(small_gpt))

    def interrupt(*_: object) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(row_stream.PieceReader, "read_into", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reshard(source, tmp_path / "new", Layout(tp=2))
    assert not (tmp_path / "new").exists()


def test_every_element_is_written_by_one_rank(small_llama: ModelSpec) -> None:
    layout, dtypes = Layout(tp=2, pp=2), {row.name: "F32" for row in table(small_llama)}
    shares = rank_shares(small_llama, layout, dtypes)
    assert [share.rank for share in shares] == [
        layout.rank(Coordinates(tp, 0, pp)) for pp in (0, 1) for tp in (0, 1)
    ]
    for row in table(small_llama):
        written = np.zeros(row.shape, int)
        for share in shares:
            for box in share.boxes:
                if box.name == row.name:
                    written[box.slab.in_global] += 1
        assert (written == 1).all(), row.name


def test_inspect_says_what_the_manifest_says(mega: Any, run_folder: Any, small_gpt: ModelSpec) -> None:
    run = run_folder(small_gpt)
    summary = json.loads(mega("inspect", run, "--json", "--tensors").output)
    assert (summary["iteration"], summary["written_by"]) == (3, {"tp": 1, "pp": 1, "cp": 1, "dp": 1})
    assert summary["parameters"] * 4 == summary["namespaces"][MODEL]["bytes"]
    assert summary["tokenizer"]["vocab_size"] == 11
    assert summary["tensors"][MODEL]["embed.weight"]["shape"] == [11, 8]
    text = mega("inspect", run, "--tensors").output
    assert "gpt: 2 layers, hidden 8, 4 heads" in text
    assert "model  embed.weight  F32  11 x 8\n    [0:11, 0:8]  model-00000.safetensors\n" in text
    assert "optim.exp_avg" in mega("inspect", run).output
    assert "embed.weight" not in mega("inspect", run).output


def test_verify_counts_what_it_read(mega: Any, run_folder: Any, small_gpt: ModelSpec) -> None:
    run = run_folder(small_gpt)
    size = sum(piece.bytes for *_, piece in Checkpoint.open(run).pieces())
    assert mega("verify", run).output.endswith(f"sound: 112 tensors, 112 pieces, {size:,} bytes\n")


def test_verify_finds_a_trainer_of_another_iteration(run_folder: Any, small_gpt: ModelSpec) -> None:
    folder = Checkpoint.open(run_folder(small_gpt)).folder
    (folder / "trainer.json").write_text('{"iteration": 9}', "utf-8")
    rewrite_checksums(folder, FORMAT)
    with pytest.raises(FormatError, match="trainer.json: iteration: found 9, wanted 3"):
        verify(Checkpoint(folder))


def test_verify_finds_a_tokenizer_that_is_not_the_models(run_folder: Any, small_gpt: ModelSpec) -> None:
    from mega_schema.tokenizer.tokenizer import open_tokenizer

    folder = Checkpoint.open(run_folder(small_gpt)).folder
    open_tokenizer("NullTokenizer", vocab_size=11).save(folder / "tokenizer")
    rewrite_checksums(folder, FORMAT)
    with pytest.raises(FormatError, match="tokenizer: ids: found 12, wanted at most the model's 11"):
        verify(Checkpoint(folder))


def test_state_of_matrices_and_of_the_rest_lie_apart(small_gpt: ModelSpec, tmp_path: Path) -> None:
    """Muon's state: momentum of matrices, Adam's moments of other parameters."""
    rows = [row for row in table(small_gpt) if row.tied_to is None]
    matrices = {row.name for row in rows if is_layer_matrix(row)}
    save = CheckpointWriter(tmp_path / "run", 3)
    save.begin()
    for space in (MODEL, "optim.momentum", "optim.exp_avg", "optim.exp_avg_sq"):
        named = {row.name for row in rows} if space == MODEL else matrices
        if space.startswith("optim.exp"):
            named = {row.name for row in rows} - matrices
        names = [
            BoxToWrite(row.name, row.shape, whole_slab(row.shape), "F32") for row in rows if row.name in named
        ]
        save.write(space, 0, names, lambda box: np.ones(box.whole, np.float32))
    save.commit(small_gpt, layout=Layout(), trainer={"iteration": 3, "consumed_samples": 24})
    cut = Checkpoint.open(reshard(Checkpoint.open(tmp_path / "run"), tmp_path / "cut", Layout(tp=2, pp=2)))
    verify(cut)
    assert set(cut.tensors["optim.momentum"]) == matrices
    manifest = json.loads((cut.folder / "manifest.json").read_text("utf-8"))
    name = min(matrices)
    for take, put, message in (
        ("optim.momentum", None, f"optim.exp_avg has no tensor: wanted {name}"),
        ("optim.momentum", "optim.exp_avg", f"optim.exp_avg_sq has no tensor: wanted {name}"),
        (None, "optim.exp_avg", f"has a tensor that is not in the model: found {name}"),
    ):
        changed = json.loads(json.dumps(manifest))
        entry = changed["tensors"]["optim.momentum"][name]
        if take:
            del changed["tensors"][take][name]
        if put:
            changed["tensors"][put][name] = entry
        replace_manifest(cut.folder, json.dumps(changed))
        with pytest.raises(FormatError, match=message):
            verify(Checkpoint.open(cut.folder))
