"""Classic T5 checkpoints of Megatron: keys, logits and layouts are those of its own code."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from mega_ckpt.cli import cli
from mega_ckpt.formats.megatron.names import LEGACY, chunk_tensors
from mega_ckpt.name_maps.alias import whole_slab
from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
from mega_model.build import load_model
from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
from mega_model.init import initial_values
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, OPTIMIZER, Checkpoint
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec, t5

RELATIVE = 1e-5
KEYS = t5(
    encoder_layers=4,
    decoder_layers=4,
    hidden=32,
    heads=4,
    vocab=128,
    max_seq_len=16,
    ffn=64,
    vocab_multiple=64,
)
DEEP = t5(
    encoder_layers=4, decoder_layers=2, hidden=16, heads=4, vocab=101, max_seq_len=8, activation="gelu_erf"
)


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def _convert(source: str, target: str, load: Path, save: Path, *more: str) -> Path:
    result = _run("convert", "--from", source, "--to", target, "--load", load, "--save", save, *more)
    assert result.exit_code == 0, result.exception or result.output
    return save


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        tensors |= _flatten(value, f"{name} > ") if isinstance(value, dict) else {name: value}
    return tensors


def _write_golden(golden: Path, run: Path, **changes: Any) -> Path:
    """Write the weights of the golden logits as Megatron's code does."""
    model: dict[str, Any] = {}
    for name, values in np.load(golden / "numerics" / "t5_weights.npz").items():
        depth = {"language_model.embedding": 3, "language_model": 2, "lm_head": 1}
        prefix = next(prefix for prefix in depth if name.startswith(prefix + "."))
        node, parts = model, name.split(".", depth[prefix])
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = torch.from_numpy(values)
    args = {"num_layers": 2, "encoder_num_layers": 2, "decoder_num_layers": 2, "hidden_size": 16}
    args |= {"num_attention_heads": 4, "max_position_embeddings": 8, "padded_vocab_size": 128}
    args |= {"bias_gelu_fusion": False, "ffn_hidden_size": 32} | changes
    tree = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 1, "model": model}
    rank = run / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save(tree, rank / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("release", "utf-8")
    return run


def test_a_file_of_megatrons_has_its_logits(golden: Path, tmp_path: Path) -> None:
    run = _write_golden(golden, tmp_path / "run")
    checkpoint = Checkpoint.open(_convert("megatron", "mega", run, tmp_path / "ours", "--check-logits", "16"))
    spec = checkpoint.spec
    assert (spec.family, spec.layers, spec.encoder_layers, spec.activation) == ("t5", 4, 2, "gelu_erf")
    model = load_model(spec, checkpoint.model_slab)
    assert isinstance(model, EncoderDecoder)
    io = {name: torch.from_numpy(values) for name, values in np.load(golden / "numerics/t5_io.npz").items()}
    source = EncoderInput(
        io["enc_tokens"][0], torch.arange(8), PackedAttention(1, 8, causal=False), PaddedCrossAttention(1)
    )
    with torch.no_grad():
        x_TD = model.hidden_states(io["dec_tokens"][0], torch.arange(6), PackedAttention(1, 6), source=source)
        found, wanted = model.logits(x_TD), io["logits"][0]
    assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


@pytest.mark.parametrize(("case", "stages"), [("tp1_pp1", ()), ("tp1_pp2_split1", (4, 4))])
def test_every_rank_has_megatrons_keys_shapes_and_order(
    golden: Path, case: str, stages: tuple[int, ...]
) -> None:
    expected = json.loads((golden / "ckpt_keys" / f"legacy_t5_{case}.json").read_text("utf-8"))
    layout = Layout(pp=max(1, len(stages)), layers_per_stage=stages)
    assert len(expected) == layout.pp
    for pp, wanted in enumerate(expected.values()):
        found = chunk_tensors(KEYS, LEGACY, layout, tp=0, pp=pp)
        assert [(foreign.name, foreign.shape) for foreign in found] == [
            (name.replace(" > ", "."), tuple(shape)) for name, (shape, _) in wanted.items()
        ]


def _save(save_whole: Any, run: Path, spec: ModelSpec) -> None:
    values = initial_values(table(spec), 3)
    whole = {
        row.name: values(row.name, whole_slab(row.shape)).numpy() + np.float32(0.01)
        for row in table(spec)
        if row.tied_to is None
    }
    moments = {name: np.abs(tensor) for name, tensor in whole.items()}
    save_whole(run, spec, {MODEL: whole, **dict.fromkeys(OPTIMIZER[1:], moments)})


def _equal(first: Checkpoint, second: Checkpoint) -> None:
    assert first.spec == second.spec
    assert first.tensors.keys() == second.tensors.keys()
    for space, tensors in first.tensors.items():
        for name, tensor in tensors.items():
            slab = whole_slab(tensor.shape)
            found, wanted = (side.read(space, name, slab) for side in (second, first))
            assert np.array_equal(found, wanted), (space, name)


@pytest.mark.parametrize("layout", ["", "--tp 2", "--pp 2", "--tp 2 --pp 3"])
def test_weights_and_optimizer_come_back_from_every_layout(
    save_whole: Any, tmp_path: Path, layout: str
) -> None:
    _save(save_whole, tmp_path / "run", DEEP)
    words = layout.split()
    _convert("mega", "megatron", tmp_path / "run", tmp_path / "theirs", *words, "--check-logits", "8")
    more = ["--true-vocab-size", "101"]
    back = _convert("megatron", "mega", tmp_path / "theirs", tmp_path / "back", *more)
    _equal(Checkpoint.open(tmp_path / "run"), Checkpoint.open(back))


def test_torch_reads_the_stages_of_megatrons_pipeline(golden: Path, save_whole: Any, tmp_path: Path) -> None:
    _save(save_whole, tmp_path / "run", KEYS)
    _convert("mega", "megatron", tmp_path / "run", tmp_path / "theirs", "--pp", "2")
    expected = json.loads((golden / "ckpt_keys" / "legacy_t5_tp1_pp2_split1.json").read_text("utf-8"))
    for rank, wanted in expected.items():
        (file,) = (tmp_path / "theirs").glob(f"*/{rank}/model_optim_rng.pt")
        tree = torch.load(file, weights_only=False)
        found = _flatten(tree["model"])
        assert list(found) == list(wanted)
        for name, tensor in found.items():
            assert [list(tensor.shape), str(tensor.dtype)] == wanted[name], name
        args = tree["args"]
        assert (args.num_layers, args.encoder_num_layers, args.decoder_num_layers) == (4, 4, 4)
        assert args.pipeline_model_parallel_split_rank == 1


def test_what_megatron_has_not_is_one_line(golden: Path, save_whole: Any, tmp_path: Path) -> None:
    _save(save_whole, tmp_path / "run", DEEP)

    def refusal(*words: object) -> str:
        result = _run("convert", *words, "--save", tmp_path / "x")
        assert not (tmp_path / "x").exists()
        return str(result.exception)

    ours = ("--from", "mega", "--load", tmp_path / "run", "--to")
    assert refusal(*ours, "megatron", "--pp", "7") == (
        "--pp: Megatron splits the layers of each side of a T5 evenly: found 4 and 2 layers for 7 stages, "
        "wanted stages that divide the encoder's layers, and others that divide the decoder's; hint: --pp 2"
    )
    assert "--vp: Megatron does not interleave a T5" in refusal(*ours, "megatron", "--pp", "2", "--vp", "2")
    for target in ("megatron-core", "torch_dist", "hf"):
        assert "model.encoder_layers: is not supported by" in refusal(*ours, target), target
    run = _write_golden(golden, tmp_path / "other", num_layers=3, encoder_num_layers=3)
    message = refusal("--from", "megatron", "--load", run, "--to", "mega")
    assert message.endswith("layers of the encoder: are not those of args: found 2, wanted 3")
