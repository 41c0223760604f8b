"""Megatron-DeepSpeed folders: mapping of the tensors, and one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import EnumMember, Record
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer

Files = dict[tuple[int, int], dict[str, np.ndarray]]
Write = Callable[..., Path]
TP, WIDTH, FFN, ROWS = 2, 4, 6, 8  # ROWS: of one rank's vocabulary, padding included
ALIBI = EnumMember("megatron.enums.PositionEmbeddingType", 3, "alibi")
ARGS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": WIDTH,
    "ffn_hidden_size": FFN,
    "num_attention_heads": 2,
    "max_position_embeddings": 5,
    "position_embedding_type": ALIBI,
    "embed_layernorm": True,
    "glu_activation": None,
    "bias_gelu_fusion": True,
    "tensor_model_parallel_size": TP,
    "consumed_train_samples": 640,
    "make_vocab_size_divisible_by": 4,
}
PAIR = ("weight", "bias")


def _shapes(inner: int) -> dict[int, dict[str, tuple[int, ...]]]:
    layer: dict[str, tuple[int, ...]] = {
        "self_attention.query_key_value.weight": (3 * WIDTH // TP, WIDTH),
        "self_attention.query_key_value.bias": (3 * WIDTH // TP,),
        "self_attention.dense.weight": (WIDTH, WIDTH // TP),
        "self_attention.dense.bias": (WIDTH,),
        "mlp.dense_h_to_4h.weight": (inner // TP, WIDTH),
        "mlp.dense_h_to_4h.bias": (inner // TP,),
        "mlp.dense_4h_to_h.weight": (WIDTH, FFN // TP),
        "mlp.dense_4h_to_h.bias": (WIDTH,),
        **{f"{norm}_layernorm.{k}": (WIDTH,) for norm in ("input", "post_attention") for k in PAIR},
    }
    first = {"word_embeddings.weight": (ROWS, WIDTH), **{f"word_embeddings.norm.{k}": (WIDTH,) for k in PAIR}}
    return {1: first, 3: layer, 5: dict.fromkeys(PAIR, (WIDTH,))}


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Write a run with one step of two ranks, arguments and tensors changed as asked."""

    def write(args: dict[str, Any] | None = None, change: Callable[[Files], Any] = len) -> Path:
        run, rng = tmp_path / "bloom", np.random.default_rng(4)
        arguments = {**ARGS, **(args or {})}
        inner = 2 * FFN if arguments["glu_activation"] else FFN
        files: Files = {
            (number, rank): {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
            for number, shapes in _shapes(inner).items()
            for rank in range(TP)
        }
        for (number, rank), tensors in files.items():  # what every rank has alike
            for name in tensors:
                if "norm" in name or number == 5 or name.endswith(("dense.bias", "4h_to_h.bias")):
                    tensors[name] = files[number, 0][name] if rank else tensors[name]
        change(files)
        step = run / "global_step20"
        step.mkdir(parents=True)
        (run / "latest").write_text("global_step20", "utf-8")
        for (number, rank), tensors in files.items():
            tree = {n: TensorHeader(n, "F32", a.shape) for n, a in tensors.items()}
            path = step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            zip_writer.write(path, tree, lambda t, tensors=tensors: [tensors[t.name]])
        state = {
            "module": None,
            "iteration": 20,
            "args": Record("argparse.Namespace", (), arguments),
            "checkpoint_version": 3.0,
        }
        for rank in range(TP):
            zip_writer.write(step / f"mp_rank_{rank:02d}_model_states.pt", state, lambda _: [])
        return run

    return write


def _read(run: Path, name: str) -> np.ndarray:
    checkpoint = Checkpoint.open(run)
    rows = {row.name: row for row in table(checkpoint.spec)}
    return checkpoint.read_raw(MODEL, name, whole_slab(rows[name].shape))


def test_every_tensor_is_where_megatron_deepspeed_has_it(write_run: Write, tmp_path: Path) -> None:
    files_written: list[Files] = []
    result = convert(
        write_run(change=files_written.append),
        tmp_path / "run",
        "bigscience",
        "mega",
        reading=ReadOptions(vocab=11),
    )
    (files,) = files_written
    spec = Checkpoint.open(tmp_path / "run").spec
    assert (spec.positions, spec.embed_norm, spec.tied, spec.vocab) == ("alibi", True, True, 11)
    assert Checkpoint.open(tmp_path / "run").iteration == 20
    assert result.dropped == ("the optimizer's state and the schedule", "5 rows of padding")

    def concatenate_ranks(number: int, name: str, dim: int) -> np.ndarray:
        return np.concatenate([files[number, rank][name] for rank in range(TP)], dim)

    def is_equal(ours: str, theirs: np.ndarray) -> bool:
        return np.array_equal(_read(tmp_path / "run", ours), theirs)

    assert is_equal("embed.weight", concatenate_ranks(1, "word_embeddings.weight", 0)[:11])
    for kind in PAIR:
        assert is_equal(f"embed_norm.{kind}", files[1, 0][f"word_embeddings.norm.{kind}"])
        assert is_equal(f"final_norm.{kind}", files[5, 0][kind])
        assert is_equal(f"layers.0.attn_norm.{kind}", files[3, 0][f"input_layernorm.{kind}"])
        assert is_equal(f"layers.0.ffn_norm.{kind}", files[3, 0][f"post_attention_layernorm.{kind}"])
        assert is_equal(f"layers.0.up.{kind}", concatenate_ranks(3, f"mlp.dense_h_to_4h.{kind}", 0))
        fused = concatenate_ranks(
            3, f"self_attention.query_key_value.{kind}", 0
        )  # a head's q, k and v, head after head
        heads = fused.reshape(2, 3, WIDTH // 2, *fused.shape[1:])
        assert is_equal(f"layers.0.qkv.{kind}", np.moveaxis(heads, 1, 0).reshape(fused.shape))
    assert is_equal("layers.0.out.weight", concatenate_ranks(3, "self_attention.dense.weight", 1))
    assert is_equal("layers.0.down.weight", concatenate_ranks(3, "mlp.dense_4h_to_h.weight", 1))
    assert is_equal("layers.0.out.bias", files[3, 1]["self_attention.dense.bias"])
    assert is_equal("layers.0.down.bias", files[3, 1]["mlp.dense_4h_to_h.bias"])


@pytest.mark.parametrize("gate", ["geglu", "swiglu", "reglu", "liglu"])
def test_the_gate_is_the_second_half_there_and_the_first_here(
    write_run: Write, tmp_path: Path, gate: str
) -> None:
    files_written: list[Files] = []
    load = write_run({"glu_activation": gate, "bias_gelu_fusion": False}, files_written.append)
    convert(load / "global_step20", tmp_path / "run", "bigscience", "mega")
    assert Checkpoint.open(tmp_path / "run").spec.activation == gate
    for kind in PAIR:
        ranks = [np.split(files_written[0][3, rank][f"mlp.dense_h_to_4h.{kind}"], 2) for rank in range(TP)]
        wanted = [halves[1] for halves in ranks] + [halves[0] for halves in ranks]
        assert np.array_equal(_read(tmp_path / "run", f"layers.0.gate_up.{kind}"), np.concatenate(wanted))


def test_norms_that_drifted_apart_are_the_first_ranks_and_it_is_said(
    write_run: Write, tmp_path: Path
) -> None:
    files_written: list[Files] = []

    def drift(files: Files) -> None:
        files[3, 1]["input_layernorm.weight"] = files[3, 1]["input_layernorm.weight"] + 1
        files_written.append(files)

    result = convert(write_run(change=drift), tmp_path / "run", "bigscience", "mega")
    assert result.dropped[-1] == "1 copies of norms and biases that differ between ranks"
    ours = _read(tmp_path / "run", "layers.0.attn_norm.weight")
    assert np.array_equal(ours, files_written[0][3, 0]["input_layernorm.weight"])


def test_a_tokenizer_that_is_named_travels_along(write_run: Write, tmp_path: Path) -> None:
    open_tokenizer("NullTokenizer", vocab_size=10).save(tmp_path / "null")
    reading = ReadOptions(tokenizer=tmp_path / "null")
    assert convert(write_run(), tmp_path / "run", "bigscience", "mega", reading=reading).written.tokenizer


QKV = "self_attention.query_key_value.weight"
DAMAGE: dict[str, tuple[dict[str, Any], Callable[[Files], Any], str]] = {
    "a layer is missing": (
        {"num_layers": 2},
        len,
        "global_step20: layers in the files: found 1, wanted 2",
    ),
    "no layer": (
        {},
        lambda f: [f.pop((3, r)) for r in range(TP)],
        "layers in the files: found 0, wanted 1; hint: there is no layer_03-model_00-model_states.pt",
    ),
    "a rank's layer is missing": (
        {},
        lambda f: f.pop((3, 1)),
        "layer_03-model_01-model_states.pt: no such file: wanted a file of every layer and of 2 ranks",
    ),
    "a rank is missing": (
        {},
        lambda f: [f.pop((number, 1)) for number in (1, 3, 5)],
        "global_step20: ranks of tp that have files: found 1, wanted 2",
    ),
    "no embedding": (
        {},
        lambda f: f[1, 0].clear(),
        "layer_01-model_00-model_states.pt: has no matrix: wanted",
    ),
    "another shape": (
        {},
        lambda f: f[3, 1].update({QKV: np.ones((4, 6), np.float32)}),
        f"layer_03-model_01-model_states.pt: {QKV}: shape: found (4, 6), wanted (6, 4)",
    ),
    "a tensor is missing": (
        {},
        lambda f: f[3, 0].pop(QKV),
        f"layer_03-model_00-model_states.pt: has no tensor: wanted {QKV}",
    ),
    "a tensor more": (
        {"embed_layernorm": False},
        len,
        "layer_01-model_00-model_states.pt: has a tensor that is not in the model: found "
        "word_embeddings.norm.",
    ),
    "gate": (
        {"glu_activation": "siglu"},
        len,
        "args.glu_activation: is not supported: found siglu, wanted",
    ),
    "prefix": ({"prefix_lm": True}, len, "args.prefix_lm: is not supported"),
    "no heads": ({"num_attention_heads": None}, len, "args.num_attention_heads: missing"),
    "heads over ranks": ({"num_attention_heads": 1}, len, "global_step20: cannot be of 2 ranks: --tp: "),
    "layers": ({"num_layers": 2**40}, len, "layers in the files: found 1, wanted 1099511627776"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(
    write_run: Write, tmp_path: Path, what: str
) -> None:
    args, change, message = DAMAGE[what]
    load = write_run(args, change)
    with pytest.raises(FormatError) as caught:
        convert(load, tmp_path / "run", "bigscience", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_files_that_are_missing_or_cut_are_named(write_run: Write, tmp_path: Path) -> None:
    run = write_run()
    step = run / "global_step20"

    def assert_refused(message: str, load: Path = run, **reading: Any) -> None:
        with pytest.raises(FormatError, match=message):
            convert(load, tmp_path / "run", "bigscience", "mega", reading=ReadOptions(**reading))

    assert_refused("vocabulary: has fewer rows: found 16, wanted 17 or more", vocab=17)
    (tmp_path / "empty").mkdir()
    assert_refused(
        "empty: is not a checkpoint of Megatron-DeepSpeed: wanted latest, or layer_01", tmp_path / "empty"
    )
    (run / "latest").write_text("../elsewhere", "utf-8")
    assert_refused("latest: is not the name of a step: found '../elsewhere'")
    (run / "latest").write_text("global_step21\n", "utf-8")
    assert_refused("global_step21: no such folder: wanted the step named by .*latest")
    layer, state = step / "layer_05-model_01-model_states.pt", step / "mp_rank_00_model_states.pt"
    whole = layer.read_bytes()
    layer.write_bytes(whole[: len(whole) // 2])
    assert_refused("layer_05-model_01-model_states.pt: ", step)
    zip_writer.write(layer, {"module": {}}, lambda _: [])
    assert_refused("layer_05-model_01-model_states.pt: is not a layer of Megatron-DeepSpeed", step)
    zip_writer.write(state, {"iteration": 3}, lambda _: [])
    assert_refused("mp_rank_00_model_states.pt: has no arguments: wanted args", step)
    state.unlink()
    assert_refused("mp_rank_00_model_states.pt: no such file", step)
    for path in step.iterdir():
        path.unlink()
    zip_writer.write(state, {"iteration": 3}, lambda _: [])
    assert_refused("global_step20: has no weights: wanted layer_01-model_00-model_states.pt and on", step)
    assert not (tmp_path / "run").exists()
