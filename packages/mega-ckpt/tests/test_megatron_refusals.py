"""One-line errors for damaged or unsupported classic checkpoints, without partial output."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.formats.interface import ReadOptions, WriteOptions
from mega_ckpt.formats.mega import format as mega_format
from mega_ckpt.formats.megatron import format as megatron_format
from mega_ckpt.formats.megatron import rank_files
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.torch_files import pickle_reader, zip_writer
from mega_ckpt.torch_files.pickle_reader import Record
from mega_schema.checkpoint.checkpoint_dir import LATEST
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, FormatError, LayoutError, MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.presets import preset
from mega_schema.spec import ModelSpec, bert, gpt

Folder = Callable[..., Path]
FILE = "model_optim_rng.pt"
FOLDER = "iter_0000003"


@pytest.fixture
def megatron_run(tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec) -> Path:
    """A run of Megatron's, tp=2 pp=2, padded by 5 rows."""
    spec = dataclasses.replace(small_gpt, vocab_multiple=8)
    target = WriteOptions(layout=Layout(tp=2, pp=2))
    convert(run_folder(spec), tmp_path / "theirs", "mega", "megatron", target=target)
    return tmp_path / "theirs"


def _change(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


def _refusal(tmp_path: Path, load: Path, **reading: Any) -> str:
    with pytest.raises(MegaError) as refused:
        convert(load, tmp_path / "back", "megatron", "mega", reading=ReadOptions(**reading))
    assert not (tmp_path / "back").exists()
    return str(refused.value).replace(f"{load}/", "").replace(str(load), "RUN")


def _rank(run: Path, name: str = "mp_rank_00_000") -> Path:
    return run / FOLDER / name / FILE


def _args(**values: object) -> Callable[[dict[str, Any]], object]:
    def change(tree: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(tree["args"], name, value)

    return change


def test_a_rank_that_is_missing_is_named(tmp_path: Path, megatron_run: Path) -> None:
    _rank(megatron_run, "mp_rank_01_000").unlink()
    message = f"{FOLDER}/mp_rank_01_000/{FILE}: no such file: wanted a file of every rank, tp=2 pp=2"
    assert _refusal(tmp_path, megatron_run) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(iteration=4), "iteration: differs: found 4, wanted 3; hint: "),
        (_args(hidden_size=16), "args.hidden_size: differs: found 16, wanted 8; hint: "),
        (_args(tensor_model_parallel_size=4), "args.tensor_model_parallel_size: differs: found 4, wanted 2"),
        (
            lambda tree: tree.update(checkpoint_version=2.0),
            "checkpoint_version: differs: found 2.0, wanted 3.0",
        ),
        (
            lambda tree: tree.update(checkpoint_version=4.0),
            "checkpoint_version: not a known version: found 4.0, wanted 0",
        ),
        (
            lambda tree: tree.pop("model"),
            "has no weights: found args, checkpoint_version, iteration, optimizer, wanted",
        ),
    ],
)
def test_a_rank_of_another_checkpoint_is_named(
    tmp_path: Path, megatron_run: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    _change(_rank(megatron_run, "mp_rank_01_001"), change)
    actual = _refusal(tmp_path, megatron_run)
    assert actual.startswith(f"{FOLDER}/mp_rank_01_001/{FILE}")
    assert message in actual


def test_more_ranks_than_the_arguments_say_are_refused(tmp_path: Path, megatron_run: Path) -> None:
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        _change(_rank(megatron_run, name), _args(pipeline_model_parallel_size=1))
    assert "mp_rank_00_001/model_optim_rng.pt: is of more ranks than args say: wanted tp=2 pp=1" in _refusal(
        tmp_path, megatron_run
    )


def test_a_truncated_file_is_refused(tmp_path: Path, megatron_run: Path) -> None:
    file = _rank(megatron_run, "mp_rank_00_001")
    file.write_bytes(file.read_bytes()[:-100])
    assert f"mp_rank_00_001/{FILE}: is not a complete zip" in _refusal(tmp_path, megatron_run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "soon",
            "latest_checkpointed_iteration.txt: is not an iteration: found soon, wanted a number, or release",
        ),
        ("4", f"iter_0000004: contains no checkpoint of this format: wanted mp_rank_00/{FILE}"),
        (
            None,
            "RUN: contains no checkpoint of this format: wanted latest_checkpointed_iteration.txt, "
            "or mp_rank_00",
        ),
    ],
)
def test_a_run_that_names_no_checkpoint_is_refused(
    tmp_path: Path, megatron_run: Path, text: str | None, message: str
) -> None:
    tracker = megatron_run / "latest_checkpointed_iteration.txt"
    tracker.unlink() if text is None else tracker.write_text(text, "utf-8")
    assert _refusal(tmp_path, megatron_run).startswith(message)
    assert convert(megatron_run / FOLDER, tmp_path / "back", "megatron", "mega").written.parameters


def test_the_other_form_of_megatrons_checkpoints_is_hinted_at(tmp_path: Path, megatron_run: Path) -> None:
    with pytest.raises(
        FormatError, match=r"contains no checkpoint of this format: wanted \.metadata; hint: --from megatron$"
    ):
        convert(megatron_run, tmp_path / "back", "torch_dist", "mega")
    for rank in (megatron_run / FOLDER).iterdir():
        (rank / FILE).unlink()
    (megatron_run / FOLDER / ".metadata").touch()
    assert _refusal(tmp_path, megatron_run).endswith("hint: --from torch_dist")


def test_a_checkpoint_of_ours_is_told_from_one_of_megatrons(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec
) -> None:
    run = run_folder(small_gpt)
    assert "hint: --from mega" in _refusal(tmp_path, run)
    assert "hint: --from mega" in _refusal(tmp_path, run / FOLDER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "args.num_experts: is not supported: found 8, wanted unset"),
        (
            {"normalization": "GroupNorm"},
            "args.normalization: is not supported: found GroupNorm, wanted LayerNorm",
        ),
        (
            {"position_embedding_type": "yarn"},
            "args.position_embedding_type: is not supported: found yarn",
        ),
        ({"hidden_size": None}, "args.hidden_size: missing"),
        ({"hidden_size": "8"}, "args.hidden_size: is of another kind: found '8', wanted int"),
        ({"kv_channels": 3}, "self_attention.query_key_value.weight: shape: found (12, 8), wanted (18, 8)"),
        ({"num_layers": 4, "encoder_num_layers": 4}, "RUN: layers in the files: found 2, wanted 4"),
        (
            {"group_query_attention": True, "num_query_groups": 3},
            "args: do not describe a supported model: found (model.kv_heads",
        ),
        (
            {"group_query_attention": True, "num_query_groups": 1},
            "args: are not of these files: found (--tp: Megatron",
        ),
        ({"window_size": (3, 3)}, "args.window_size: is not of one side: found (3, 3), wanted (N, 0)"),
        ({"window_size": 3}, "args: do not describe a supported model"),
        ({"softmax_type": "off-by-one"}, "args.softmax_type: is not supported: found off-by-one"),
        ({"softmax_scale": 0.5}, "args.softmax_scale: is not supported: found 0.5, wanted unset"),
        (
            {"untie_embeddings_and_output_weights": True},
            "has no tensor: wanted language_model.output_layer.weight",
        ),
        (
            {"add_bias_linear": False},
            "has a tensor that is not in the model: found language_model.encoder.layers.0",
        ),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused_by_name(
    tmp_path: Path, megatron_run: Path, changes: dict[str, object], message: str
) -> None:
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        _change(_rank(megatron_run, name), _args(**changes))
    assert message in _refusal(tmp_path, megatron_run)


def test_a_file_without_arguments_needs_a_model(
    tmp_path: Path, megatron_run: Path, small_gpt: ModelSpec, run_folder: Folder
) -> None:
    for name in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        _change(_rank(megatron_run, name), lambda tree: tree.pop("args"))
    message = "args: missing: wanted the arguments of the training; hint: --model megatron-345m"
    assert f"mp_rank_00_000/model_optim_rng.pt: {message}" in _refusal(tmp_path, megatron_run)
    convert(megatron_run, tmp_path / "back", "megatron", "mega", reading=ReadOptions(model=small_gpt))
    ours, back = (Checkpoint.open(tmp_path / name) for name in ("run", "back"))
    whole = whole_slab((11, 8))
    assert np.array_equal(ours.model_slab("embed.weight", whole), back.model_slab("embed.weight", whole))


def test_a_tokenizer_that_is_given_goes_along(tmp_path: Path, megatron_run: Path) -> None:
    reading = ReadOptions(tokenizer=tmp_path / "tokenizer")
    result = convert(megatron_run, tmp_path / "back", "megatron", "mega", reading=reading)
    assert result.written.tokenizer
    assert Checkpoint.open(tmp_path / "back").spec.vocab == 11


def test_a_vocabulary_beyond_the_rows_is_refused(tmp_path: Path, megatron_run: Path) -> None:
    assert "vocabulary: has fewer rows: found 16, wanted 17 or more" in _refusal(
        tmp_path, megatron_run, vocab=17
    )


def test_a_copy_of_the_embedding_that_is_another_matrix_is_refused(
    tmp_path: Path, megatron_run: Path
) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["model"]["word_embeddings_for_head"]["weight"][1, 1] += 1

    _change(_rank(megatron_run, "mp_rank_01_001"), change)
    message = (
        "mp_rank_01_001/model_optim_rng.pt: word_embeddings_for_head.weight: is not the embedding, which"
    )
    assert message in _refusal(tmp_path, megatron_run)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    rank = tmp_path / "run" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save([1, 2], rank / FILE)
    assert "is not a Megatron checkpoint: wanted a dictionary" in _refusal(tmp_path, tmp_path / "run")
    torch.save({"args": Namespace(), "model": {"weight": torch.zeros(2)}}, rank / FILE)
    assert "has no tensor names of a Megatron GPT: found weight" in _refusal(tmp_path, tmp_path / "run")


SMALL = {"layers": 2, "hidden": 8, "heads": 4, "vocab": 11, "max_seq_len": 6}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (gpt(**SMALL, positions="alibi"), "model.positions: is not supported by Megatron: found alibi"),
        (gpt(**SMALL, activation="relu"), "model.activation: is not supported by Megatron: found relu"),
        (
            dataclasses.replace(
                preset("t5-small"), activation="gelu_tanh", bias=True, qkv_bias=True, head_bias=True
            ),
            "model.positions: is not supported by Megatron: found relative",
        ),
        (gpt(**SMALL, activation="geglu"), "model.activation: is not supported by Megatron: found geglu"),
        (
            gpt(**SMALL, scale_embedding=True),
            "model.scale_embedding: is not supported by Megatron: found True",
        ),
        (gpt(**SMALL, sliding_window=4), "found 4, wanted None; hint: --to megatron-core may have it"),
        (gpt(**SMALL, qk_norm=True), "model.qk_norm: is not supported by Megatron"),
        (gpt(**SMALL, positions="rope", rope_theta=5e5), "found 500000.0, wanted 10000.0"),
    ],
)
def test_a_model_that_megatron_has_not_is_refused(
    tmp_path: Path, run_folder: Folder, spec: ModelSpec, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        convert(run_folder(spec), tmp_path / "theirs", "mega", "megatron")
    assert message in str(refused.value)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("spec", "form", "hint"),
    [
        (gpt(**SMALL, positions="alibi"), "megatron", ""),
        (gpt(**SMALL, parallel_residual=True), "megatron", ""),
        (gpt(**SMALL, positions="rope", rope_scaling=8.0, rope_scaling_context=64), "megatron", ""),
        (gpt(**SMALL, qk_norm=True, embed_norm=True), "megatron", ""),
        (bert(**SMALL, norm_bias=False), "megatron", ""),
        (gpt(**SMALL, qk_norm=True), "megatron", "; hint: --to megatron-core may have it"),
        (gpt(**SMALL, bias=False, qkv_bias=False), "megatron-core", "; hint: --to megatron may have it"),
        (gpt(**SMALL, bias=False, qkv_bias=False, qk_norm=True), "megatron-core", ""),
    ],
)
def test_another_format_is_named_only_where_it_has_the_model(
    tmp_path: Path, run_folder: Folder, spec: ModelSpec, form: str, hint: str
) -> None:
    run = run_folder(spec)
    with pytest.raises(ConfigError, match="is not supported by Megatron") as refused:
        convert(run, tmp_path / "theirs", "mega", form)
    assert str(refused.value).partition("; hint")[1:] == hint.partition("; hint")[1:]
    if hint:
        alternative = "megatron" if form == "megatron-core" else "megatron-core"
        assert convert(run, tmp_path / "theirs", "mega", alternative).written.parameters


@pytest.mark.parametrize("form", ["megatron-core", "torch_dist"])
def test_what_the_core_class_does_not_look_at_is_refused_there(
    tmp_path: Path, run_folder: Folder, form: str
) -> None:
    run = run_folder(gpt(**SMALL, post_norm_residual=True))
    with pytest.raises(ConfigError) as refused:
        convert(run, tmp_path / "theirs", "mega", form)
    wanted = "model.post_norm_residual: is not supported by Megatron: found True, wanted False"
    assert f"{wanted}; hint: --to megatron may have it" in str(refused.value)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=8), "--tp: Megatron splits between groups of heads: found 8, wanted a divisor of 4"),
        (
            Layout(pp=4),
            "--pp: Megatron splits layers evenly: found 2 layers for 4 stages, wanted a divisor of 2",
        ),
        (Layout(vp=2), "--vp: stages of one rank need a pipeline: found 2, wanted 1; hint: --pp 2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec, layout: Layout, message: str
) -> None:
    with pytest.raises((ConfigError, LayoutError)) as refused:
        convert(
            run_folder(small_gpt), tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=layout)
        )
    assert str(refused.value) == message
    assert not (tmp_path / "theirs").exists()


def test_a_checkpoint_that_is_there_is_replaced_when_asked(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec
) -> None:
    run = run_folder(small_gpt)
    convert(run, tmp_path / "theirs", "mega", "megatron", target=WriteOptions(layout=Layout(tp=2)))
    with pytest.raises(
        ConfigError, match="there is a checkpoint already: found .*; hint: add --force to replace it"
    ):
        convert(run, tmp_path / "theirs", "mega", "megatron")
    convert(run, tmp_path / "theirs", "mega", "megatron", target=WriteOptions(force=True))
    assert [path.name for path in (tmp_path / "theirs" / FOLDER).iterdir()] == ["mp_rank_00"]
    assert len(list((tmp_path / "theirs").iterdir())) == 2
    with pytest.raises(ConfigError, match="contains a Mega checkpoint"):
        convert(tmp_path / "theirs", run, "megatron", "megatron", target=WriteOptions(force=True))


@pytest.mark.parametrize("form", ["megatron", "torch_dist"])
def test_a_megatron_run_and_one_of_ours_do_not_get_another_latest_checkpoint_by_mistake(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec, form: str
) -> None:
    first, second = run_folder(small_gpt), run_folder(small_gpt, "second", iteration=5)
    convert(first, tmp_path / "theirs", "mega", form)
    with pytest.raises(ConfigError, match=r"--save: is a run with other checkpoints.*hint: --force adds"):
        convert(second, tmp_path / "theirs", "mega", form)
    assert (tmp_path / "theirs" / LATEST).read_text().strip() == "3"
    with pytest.raises(ConfigError, match="contains a Mega checkpoint"):
        convert(first, second, "mega", form, target=WriteOptions(force=True))
    assert (second / LATEST).read_text() == "5\n"


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = run_folder(small_gpt), zip_writer.write

    def full(path: Path, *rest: Any) -> None:
        real(path, *rest)
        if "mp_rank_01" in str(path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(zip_writer, "write", full)
    target = WriteOptions(layout=Layout(tp=2), force=True)
    with pytest.raises(MegaError, match="No space left on device"):
        convert(run, tmp_path / "theirs", "mega", "megatron", target=target)
    assert not (tmp_path / "theirs").exists()
    monkeypatch.undo()
    convert(run, tmp_path / "theirs", "mega", "megatron", target=target)
    before = (tmp_path / "theirs" / FOLDER / "mp_rank_00" / FILE).read_bytes()
    monkeypatch.setattr(zip_writer, "write", full)
    with pytest.raises(MegaError, match="No space left on device"):
        convert(run, tmp_path / "theirs", "mega", "megatron", target=target)
    assert (tmp_path / "theirs" / FOLDER / "mp_rank_00" / FILE).read_bytes() == before
    assert len(list((tmp_path / "theirs").iterdir())) == 2


def test_a_process_that_ends_between_two_renames_loses_nothing(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out, real = run_folder(small_gpt), tmp_path / "theirs", Path.rename
    convert(run, out, "mega", "megatron")
    before = (out / FOLDER / "mp_rank_00" / FILE).read_bytes()

    def ends(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", ends)
    with pytest.raises(KeyboardInterrupt):
        convert(run, out, "mega", "megatron", target=WriteOptions(force=True, dtype="bf16"))
    assert (out / FOLDER / "mp_rank_00" / FILE).read_bytes() == before
    assert len(list(out.iterdir())) == 2
    monkeypatch.undo()
    # of one that was killed there it is under the name that it waits with
    (out / FOLDER).rename(out / f".{FOLDER}.replaced")
    assert convert(out, tmp_path / "ours", "megatron", "mega").written.parameters
    with pytest.raises(ConfigError, match="there is a checkpoint already: found .*replaced; hint: "):
        convert(run, out, "mega", "megatron")
    convert(run, out, "mega", "megatron", target=WriteOptions(force=True, dtype="bf16"))
    assert (out / FOLDER / "mp_rank_00" / FILE).read_bytes() != before
    (out / f".{FOLDER}.replaced").mkdir()  # killed before it was removed
    convert(run, out, "mega", "megatron", target=WriteOptions(force=True))
    assert (out / FOLDER / "mp_rank_00" / FILE).read_bytes() == before
    assert len(list(out.iterdir())) == 2


def test_state_of_another_optimizer_than_adam_is_refused(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec
) -> None:
    source = mega_format.read(run_folder(small_gpt), ReadOptions())
    momentum = {"model": source.spaces["model"], "optim.momentum": source.spaces["model"]}
    source = dataclasses.replace(source, spaces=momentum)
    with pytest.raises(
        ConfigError, match=r"is not Adam's state: found optim\.momentum, wanted Adam; hint: --no-optim"
    ):
        megatron_format.check_target(source, tmp_path / "theirs", WriteOptions())
    megatron_format.check_target(source, tmp_path / "theirs", WriteOptions(optimizer=False))


def test_weights_beside_an_optimizer_that_data_parallel_ranks_cut_are_read(
    tmp_path: Path, megatron_run: Path
) -> None:
    for rank in (megatron_run / FOLDER).iterdir():
        _change(rank / FILE, lambda tree: tree.pop("optimizer"))
        (rank / FILE).rename(rank / "model_rng.pt")
    (megatron_run / FOLDER / "mp_rank_00_000_000").mkdir()
    (megatron_run / FOLDER / "mp_rank_00_000_000" / "optim.pt").touch()
    result = convert(megatron_run, tmp_path / "back", "megatron", "mega")
    assert "the optimizer's state, whose layout is unknown" in result.dropped


def test_a_damaged_optimizer_file_is_refused(tmp_path: Path, megatron_run: Path) -> None:
    (megatron_run / FOLDER / "mp_rank_00_000" / "distrib_optim.pt").write_bytes(b"PK")
    with pytest.raises(FormatError, match=r"distrib_optim\.pt"):
        convert(megatron_run, tmp_path / "back", "megatron", "mega")


JUNK = (None, -1, 0, 3, 2**70, 0.5, float("nan"), "x", [], {}, (1,), b"x", True, np.zeros(3))


def _spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree, as a container and a key."""
    inside = value.fields if isinstance(value, Record) else value
    keys = inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
    for key in list(keys):
        yield inside, key
        yield from _spots(inside[key])


@pytest.mark.parametrize("changes", [60, pytest.param(300, marks=pytest.mark.long)])
def test_anything_anywhere_in_a_file_is_a_model_or_one_line(
    megatron_run: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    whole = {file: pickle_reader.open_file(file) for file in megatron_run.rglob("*.pt")}
    rng, refused = random.Random(4), 0
    for _ in range(changes):
        trees = copy.deepcopy(whole)
        spots = [spot for opened in trees.values() for spot in _spots(opened.tree)]
        of_args = [spot for spot in spots if "hidden_size" in spot[0]]
        container, key = rng.choice(rng.choice([spots, of_args]))
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = rng.choice(JUNK)
        monkeypatch.setattr(rank_files.Unpickler, "open", lambda _, file, trees=trees: trees[file])
        try:
            source = megatron_format.read(megatron_run, ReadOptions())
            source.verify(source.spaces)
            json.dumps(source.trainer)
        except MegaError:
            refused += 1
    assert 0.1 < refused / changes < 0.9


def test_no_iteration_of_megatrons_is_replaced_by_one_of_ours(tmp_path: Path, megatron_run: Path) -> None:
    before = {file: file.read_bytes() for file in megatron_run.rglob("*") if file.is_file()}
    with pytest.raises(
        ConfigError, match=r"contains something other .*: no manifest.json: found .*iter_0000003"
    ):
        convert(tmp_path / "run", megatron_run, "mega", "mega", target=WriteOptions(force=True))
    assert before == {file: file.read_bytes() for file in megatron_run.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["num_attention_heads", "kv_channels"])
@pytest.mark.parametrize("form", ["megatron", "torch_dist"])
def test_arguments_of_a_width_that_no_file_holds_are_refused_before_a_list_of_it_is_made(
    tmp_path: Path, run_folder: Folder, small_gpt: ModelSpec, run_limited: Any, form: str, name: str
) -> None:
    convert(run_folder(small_gpt), tmp_path / "theirs", "mega", form)
    (file,) = tmp_path.glob(f"theirs/iter_*/{'common.pt' if form == 'torch_dist' else '*/' + FILE}")
    _change(file, _args(**{name: 10**18}))
    result = run_limited("inspect", tmp_path / "theirs", "--from", form)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "numbers in all tensors: found " in result.stderr
