"""Classic BERT checkpoints of Megatron: keys, values, logits and layouts are those of its own code."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from mega_ckpt.cli import cli
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.torch_files.pickle_reader import open_file
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.encoder import Encoder
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint

RELATIVE = 1e-5
RANKS = ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")


def run_convert(source: str, target: str, load: Path, save: Path, *more: str) -> Result:
    words = ["convert", "--from", source, "--to", target, "--load", load, "--save", save, *more]
    return CliRunner().invoke(cli, [str(word) for word in words])


def convert(source: str, target: str, load: Path, save: Path, *more: str) -> Path:
    result = run_convert(source, target, load, save, *more)
    assert result.exit_code == 0, result.exception or result.output
    return save


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        tensors |= flatten(value, f"{name} > ") if isinstance(value, dict) else {name: value}
    return tensors


def _read_tensor(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.read(MODEL, name, whole_slab(checkpoint.tensors[MODEL][name].shape))


def _write_rank(golden: Path, run: Path, change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Write the weights of the golden logits as Megatron's code does."""
    model: dict[str, Any] = {}
    for name, values in np.load(golden / "numerics" / "bert_weights.npz").items():
        depth = {"language_model.embedding": 3, "language_model": 2, "lm_head": 1, "binary_head": 1}
        prefix = next(prefix for prefix in depth if name.startswith(prefix + "."))
        node, parts = model, name.split(".", depth[prefix])
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = torch.from_numpy(values)
    args = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        "padded_vocab_size": 128,
        "bias_gelu_fusion": False,
    }
    tree = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 1, "model": model}
    if change is not None:
        change(tree)
    rank = run / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save(tree, rank / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("release", "utf-8")
    return run


def test_a_file_of_megatrons_has_its_logits(golden: Path, tmp_path: Path) -> None:
    run = _write_rank(golden, tmp_path / "run")
    checkpoint = Checkpoint.open(convert("megatron", "mega", run, tmp_path / "ours"))
    model = load_model(checkpoint.spec, checkpoint.model_slab)
    assert isinstance(model, Encoder)
    io = {name: torch.from_numpy(values) for name, values in np.load(golden / "numerics/bert_io.npz").items()}
    attend = PackedAttention(2, 8, io["padding_mask"], causal=False)
    with torch.no_grad():
        x_TD = model.hidden_states(
            io["tokens"].flatten(),
            torch.arange(8).repeat(2),
            attend,
            token_type_T=io["tokentypes"].flatten(),
        )
        logits, binary = model.logits(x_TD), model.binary_logits(x_TD, torch.tensor([0, 8]))
    is_token_T = io["padding_mask"].bool().flatten()
    wanted = io["lm_logits"].flatten(0, 1)
    assert (logits - wanted)[is_token_T].abs().max() <= RELATIVE * wanted.abs().max()
    assert (binary - io["binary_logits"]).abs().max() <= RELATIVE * io["binary_logits"].abs().max()


def test_a_model_without_a_binary_head_comes_back(golden: Path, tmp_path: Path) -> None:
    def drop_head(tree: dict[str, Any]) -> None:
        del tree["model"]["binary_head"], tree["model"]["language_model"]["pooler"]
        tree["args"].openai_gelu = True

    run = _write_rank(golden, tmp_path / "run", drop_head)
    ours = convert("megatron", "mega", run, tmp_path / "ours")
    spec = Checkpoint.open(ours).spec
    assert (spec.pooler, spec.binary_head, spec.token_types) == (False, False, 2)
    assert (spec.activation, spec.head_transform) == ("gelu_tanh", "gelu_tanh")
    convert("mega", "megatron", ours, tmp_path / "back")
    second_run = convert("megatron", "mega", tmp_path / "back", tmp_path / "again")
    assert Checkpoint.open(second_run).spec == spec


def test_a_checkpoint_and_what_megatrons_tool_made_of_it_are_one(golden: Path, tmp_path: Path) -> None:
    first, second = (
        Checkpoint.open(
            convert(
                "megatron", "mega", golden / "legacy_ckpt" / name, tmp_path / name, "--true-vocab-size", "100"
            )
        )
        for name in ("bert-tp1pp1", "bert-tp2pp2")
    )
    assert first.spec == second.spec
    assert (first.spec.family, first.spec.vocab, first.spec.activation) == ("bert", 100, "gelu_erf")
    assert (first.iteration, first.trainer["consumed_samples"]) == (5, 80)
    for row in (row for row in table(first.spec) if row.tied_to is None):
        equal = np.array_equal(_read_tensor(first, row.name), _read_tensor(second, row.name))
        # the tool draws these two anew
        assert equal != (row.name in ("token_type.weight", "head.bias")), row.name


def test_the_files_of_every_rank_are_those_of_megatrons_tool(golden: Path, tmp_path: Path) -> None:
    folder = golden / "legacy_ckpt"
    ours = convert("megatron", "mega", folder / "bert-tp1pp1", tmp_path / "ours", "--true-vocab-size", "100")
    convert("mega", "megatron", ours, tmp_path / "t", "--tp", "2", "--pp", "2")
    for rank in RANKS:
        file = Path("iter_0000005") / rank / "model_optim_rng.pt"
        found, wanted = (
            flatten(open_file(run / file).entry("model")) for run in (tmp_path / "t", folder / "bert-tp2pp2")
        )
        assert list(found) == list(wanted)
        for name in wanted:
            assert found[name].shape == wanted[name].shape, name
            if "tokentype" in name or name == "lm_head > bias":
                continue
            # the tool's padding goes on from the padding that was there, ours from the last true row
            real = slice(0, 44 if "mp_rank_01" in rank and "word_embeddings" in name else None)
            assert np.array_equal(found[name].values()[real], wanted[name].values()[real]), name
    back = convert("megatron", "mega", tmp_path / "t", tmp_path / "back")
    first, second = Checkpoint.open(ours), Checkpoint.open(back)
    assert first.spec == second.spec
    for row in (row for row in table(first.spec) if row.tied_to is None):
        assert np.array_equal(_read_tensor(first, row.name), _read_tensor(second, row.name)), row.name


@pytest.mark.parametrize(("case", "layout"), [("tp1_pp1", ()), ("tp2_pp2", ("--tp", "2", "--pp", "2"))])
def test_torch_finds_every_key_of_megatrons_own_files(
    golden: Path, tmp_path: Path, save_whole: Any, case: str, layout: tuple[str, ...]
) -> None:
    from mega_schema.spec import bert

    spec = bert(layers=4, hidden=32, heads=4, vocab=128, max_seq_len=16, vocab_multiple=64)
    zeros = {row.name: np.zeros(row.shape, "f4") for row in table(spec) if row.tied_to is None}
    save_whole(tmp_path / "run", spec, {MODEL: zeros})
    convert("mega", "megatron", tmp_path / "run", tmp_path / "theirs", *layout)
    expected = json.loads((golden / "ckpt_keys" / f"legacy_bert_{case}.json").read_text("utf-8"))
    for rank, wanted in expected.items():
        (file,) = (tmp_path / "theirs").glob(f"*/{rank}/model_optim_rng.pt")
        found = flatten(torch.load(file, weights_only=False)["model"])
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert [list(tensor.shape), str(tensor.dtype)] == wanted[name], name


def test_reshard_gives_the_same_model(golden: Path, tmp_path: Path) -> None:
    ours = convert("megatron", "mega", golden / "legacy_ckpt/bert-tp1pp1", tmp_path / "ours")
    words = ["reshard", "--load", str(ours), "--save", str(tmp_path / "new"), "--tp", "2", "--pp", "2"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.exception or result.output
    first, second = Checkpoint.open(ours), Checkpoint.open(tmp_path / "new")
    assert len(second.files) == 4
    for row in (row for row in table(first.spec) if row.tied_to is None):
        assert np.array_equal(_read_tensor(first, row.name), _read_tensor(second, row.name)), row.name


def test_models_that_megatron_does_not_read_or_write_are_refused(golden: Path, tmp_path: Path) -> None:
    def become_core(tree: dict[str, Any]) -> None:
        tree["model"] = {"encoder.layers.0.input_layernorm.weight": torch.ones(16)}

    run = _write_rank(golden, tmp_path / "core", become_core)
    result = run_convert("megatron", "mega", run, tmp_path / "x")
    assert "is of a BERT or T5 model of the core class, which is not supported" in str(result.exception)
    ours = convert("megatron", "mega", golden / "legacy_ckpt/bert-tp1pp1", tmp_path / "ours")
    assert run_convert("mega", "meta", ours, tmp_path / "y").exception is not None
    refused = str(run_convert("mega", "megatron-core", ours, tmp_path / "y").exception)
    assert refused.endswith(
        "model.causal: is not supported in classic files of the core class: found False, wanted True; "
        "hint: --to megatron or --to torch_dist may have it"
    )
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()
