"""Errors of `convert`, which leave no output. tests/conformance compares the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from mega_ckpt.formats.interface import ReadOptions, WriteOptions, WriteResult
from mega_ckpt.formats.registry import format_of
from mega_ckpt.operations.convert import convert
from mega_ckpt.operations.diff import diff_checkpoints
from mega_ckpt.tensors import safetensors_io
from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.reader import DTYPES, MAIN, MODEL, Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.errors import ConfigError, FormatError
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec, gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer

Tensors = dict[str, np.ndarray]
C_ATTN = "transformer.h.1.attn.c_attn.weight"


def from_hugging_face(load: Path, run: Path, **target: Any) -> WriteResult:
    return convert(load, run, "hf", "mega", target=WriteOptions(**target)).written


def to_hugging_face(run: Path, folder: Path, **target: Any) -> WriteResult:
    return convert(run, folder, "mega", "hf", target=WriteOptions(**target)).written


def _drop_tensor(tensors: Tensors, name: str) -> Tensors:
    return {n: a for n, a in tensors.items() if n != name}


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (lambda t: _drop_tensor(t, C_ATTN), f"hf: has no tensor: wanted {C_ATTN}"),
    "extra": (
        lambda t: t | {"more": np.ones(2, np.float32)},
        "a tensor that is not in the model: found more",
    ),
    "shape": (
        lambda t: t | {C_ATTN: np.ascontiguousarray(t[C_ATTN].T)},
        f"model.safetensors: {C_ATTN}: shape: found (24, 8), wanted (8, 24)",
    ),
    "dtype": (lambda t: t | {C_ATTN: t[C_ATTN].astype(np.int32)}, f"{C_ATTN}: dtype: found I32, wanted F32"),
    "head": (
        lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1},
        "lm_head.weight: is not the embedding, which it is tied to",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_tensors_that_are_not_the_models_are_named(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, what: str
) -> None:
    change, message = DAMAGE[what]
    folder = hf_folder(small_gpt, tensors=change)
    with pytest.raises(FormatError) as caught:
        from_hugging_face(folder, tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_tied_head_that_is_on_disk_too_is_not_in_the_way(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    folder = hf_folder(small_gpt, tensors=lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]})
    from_hugging_face(folder, tmp_path / "run")
    assert Checkpoint.open(tmp_path / "run").spec.tied


@pytest.mark.parametrize(
    "change", [lambda a: a[:-1], lambda a: a[:1].reshape(8)[0], lambda a: a.astype("f2")]
)
def test_a_tied_head_of_another_shape_or_dtype_is_not_the_embedding(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, change: Any
) -> None:
    embedding = "transformer.wte.weight"
    folder = hf_folder(small_gpt, tensors=lambda t: t | {"lm_head.weight": np.asarray(change(t[embedding]))})
    with pytest.raises(FormatError, match="lm_head.weight: is not the embedding"):
        from_hugging_face(folder, tmp_path / "run")


def test_a_tied_head_of_whole_numbers_is_refused_as_the_embedding_is(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    whole = np.ones((11, 8), np.int32)
    folder = hf_folder(
        small_gpt, tensors=lambda t: t | {"lm_head.weight": whole, "transformer.wte.weight": whole}
    )
    with pytest.raises(FormatError, match=r"wte.weight: dtype: found I32"):
        from_hugging_face(folder, tmp_path / "run")


def test_parts_of_one_tensor_have_one_dtype(hf_folder: Any, small_llama: ModelSpec, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = hf_folder(small_llama, tensors=lambda t: t | {name: t[name].astype(np.float16)})
    with pytest.raises(FormatError, match=r"k_proj.*dtypes differ: found \['F16', 'F32'\]"):
        from_hugging_face(folder, tmp_path / "run")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"model_type": "mixtral"},
        "config.json: model_type: unknown architecture: found mixtral, wanted llama | mistral | ",
    ),
    "no architecture": ({"model_type": None}, "unknown architecture: found None, wanted llama | mistral"),
    "scaled positions": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
        "config.json: rope_scaling: positions scaled in this way are not supported: found dynamic",
    ),
    "scaled positions of old": (
        {"rope_scaling": {"type": "linear"}},
        "config.json: factor: missing",
    ),
    "scaled positions of transformers 5": (
        {"rope_parameters": {"rope_type": "yarn"}},
        "rope_parameters: positions scaled in this way are not supported",
    ),
    "positions of a part": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: is not supported: found 0.5",
    ),
    "attention bias": (
        {"attention_bias": True},
        "attention_bias: is not supported: found True, wanted False",
    ),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias: is not supported"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: is not supported: found gelu, wanted swish | silu"),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "quantization_config: is not supported: found",
    ),
    "null where a count is": ({"hidden_size": None}, "config.json: hidden_size: is null"),
    "a bias of queries, keys and values in a qwen 3": (
        {"model_type": "qwen3", "attention_bias": True},
        "attention_bias: is not supported: found True, wanted False",
    ),
    "a window in some layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        "max_window_layers: a window in some of the layers is not supported: found 1 of 2 layers",
    ),
    "a list of layers with a window and without": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "layer_types: a window in some of the layers is not supported: found 1 of 2 layers, wanted all",
    ),
    "layers with a window that is switched off": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention", "sliding_attention"]},
        "layer_types: a window in some of the layers is not supported: found 2 of 2 layers",
    ),
    "count that is a text": ({"num_hidden_layers": "2"}, "model.layers: not a count: found 2"),
    "heads that do not divide": ({"num_attention_heads": 3, "head_dim": None}, "heads do not divide"),
    "width that is a text": ({"hidden_size": "x", "head_dim": None}, "config.json"),
    "positions in a list": ({"rope_parameters": [1]}, "is not the config of a model"),
    "base that is a text": ({"rope_parameters": {"rope_theta": "high"}}, "is not the config of a model"),
    "layers without end": ({"num_hidden_layers": 2**70}, "fewer tensors than the model has layers: found 21"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "config.json"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_of_something_else_is_refused(
    hf_folder: Any, small_llama: ModelSpec, tmp_path: Path, what: str
) -> None:
    change, message = CONFIGS[what]
    with pytest.raises(FormatError) as caught:
        from_hugging_face(hf_folder(small_llama, config=change), tmp_path / "run")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_missing_key_is_named(hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    folder = hf_folder(small_gpt)
    config = json.loads((folder / "config.json").read_bytes())
    del config["n_embd"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(FormatError, match="config.json: n_embd: missing"):
        from_hugging_face(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"positions": "sinusoidal"},
            "model.positions: is not supported by any class",
        ),
        (
            {"positions": "none"},
            "model.positions: is not supported .* found none, wanted rope | learned | alibi",
        ),
        ({"scale_embedding": True}, "model.scale_embedding: is not supported .* found True, wanted False"),
        ({"norm_1p": True}, "model.norm_1p: is not supported"),
        ({"activation": "geglu"}, "model.activation: is not supported .*: found geglu, wanted silu | gelu"),
        (
            {"norm": "rmsnorm"},
            "model.norm: is not supported by GPT2LMHeadModel.*: found rmsnorm, wanted layernorm",
        ),
        ({"bias": False}, "model.bias: is not supported by GPT2LMHeadModel: found False, wanted True"),
        ({"embed_norm": True}, "model.embed_norm: is not supported by GPT2LMHeadModel: found True"),
        ({"qk_norm": True}, "model.qk_norm: is not supported by GPT2LMHeadModel"),
        (
            {"sliding_window": 3},
            "model.sliding_window: is not supported by GPT2LMHeadModel: found 3, wanted None",
        ),
        (
            {"positions": "alibi"},
            "model.embed_norm: is not supported by BloomForCausalLM: found False, wanted",
        ),
    ],
)
def test_a_model_that_no_class_of_hugging_faces_can_be_is_refused(
    run_folder: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = run_folder(gpt(layers=1, hidden=8, heads=2, vocab=11, max_seq_len=4, **change))
    with pytest.raises(ConfigError, match=message):
        to_hugging_face(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_fraction": 0.5, "head_dim": 4}, "model.rotary_fraction: .*: found 0.5, wanted 1.0"),
        ({"rope_interleaved": True}, "model.rope_interleaved: is not supported .*: found True, wanted False"),
        (
            {"qkv_bias": True, "qk_norm": True},
            "model.qk_norm: is not supported by Qwen2ForCausalLM: found True",
        ),
        (
            {"rope_scaling": 8.0, "rope_interpolation": 2.0},
            "model.rope_interpolation: .*: found 2.0, wanted 1, with positions that are scaled",
        ),
    ],
)
def test_a_llama_that_no_class_of_hugging_faces_can_be_is_refused(
    run_folder: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = run_folder(llama(layers=1, hidden=8, heads=2, ffn=6, vocab=11, max_seq_len=4, **change))
    with pytest.raises(ConfigError, match=message):
        to_hugging_face(run, tmp_path / "out")


def test_a_folder_without_weights_says_what_would_be_some(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    folder = hf_folder(small_gpt)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model.bin: is not a file of torch.save"):
        from_hugging_face(folder, tmp_path / "run")
    (folder / "pytorch_model.bin").rename(folder / "training_args.bin")
    with pytest.raises(FormatError, match=r"has no weights: wanted model.safetensors, pytorch_model.bin, or"):
        from_hugging_face(folder, tmp_path / "run")


def test_our_own_folder_is_told_from_theirs(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"has no config.json.*hint: --from mega --to hf"):
        from_hugging_face(run_folder(small_gpt), tmp_path / "new")
    with pytest.raises(FormatError, match="no such folder"):
        to_hugging_face(tmp_path / "nowhere", tmp_path / "new")


def test_a_half_written_checkpoint_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "run" / ".iter_0000003.partial").mkdir(parents=True)
    with pytest.raises(FormatError, match="half-written .iter_0000003.partial"):
        to_hugging_face(tmp_path / "run", tmp_path / "new")


INDEX = {
    "not an object": ([], "content: found list"),
    "no map": ({}, "weight_map: is not an object of tensor: file"),
    "a path": ({"weight_map": {"x": "../x.safetensors"}}, "file outside the folder: found ../x.safetensors"),
    "a missing file": ({"weight_map": {"x": "x.safetensors"}}, "x.safetensors: missing file"),
    "a missing tensor": (
        {"weight_map": {"x": "model.safetensors"}},
        "model.safetensors: has no tensor: wanted x",
    ),
}


@pytest.mark.parametrize("what", INDEX)
def test_an_index_that_does_not_fit_is_refused(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, what: str
) -> None:
    folder = hf_folder(small_gpt)
    content, message = INDEX[what]
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(FormatError) as caught:
        from_hugging_face(folder, tmp_path / "run")
    assert message in str(caught.value)


FILES: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x02\0\0\0\0\0\0",
    "header beyond the file": b"\xff" * 16,
    "not JSON": (2).to_bytes(8, "little") + b"{x",
    "a list": (2).to_bytes(8, "little") + b"[]",
    "a hole": (63).to_bytes(8, "little")
    + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}         '
    + b"\0" * 8,
    "more bytes": (2).to_bytes(8, "little") + b"{}" + b"\0",
    "fewer bytes": (63).to_bytes(8, "little")
    + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}         ',
    "a shape below 0": (63).to_bytes(8, "little")
    + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}       ',
    "unknown dtype": (63).to_bytes(8, "little")
    + b'{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}         '
    + b"\0" * 4,
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, what: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(FILES[what])
    with pytest.raises(FormatError, match="x.safetensors"):
        safetensors_io.read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("want", ["hf", "megatron", "torch_dist"])
def test_an_iteration_that_is_none_is_refused(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, want: str
) -> None:
    trainer = Checkpoint.open(run_folder(small_gpt)).folder / "trainer.json"
    trainer.write_text(json.dumps({"iteration": "three"}), "utf-8")
    rewrite_checksums(trainer.parent, FORMAT)
    with pytest.raises(FormatError, match="trainer.json: iteration: found three, wanted 3"):
        convert(tmp_path / "run", tmp_path / "out", "mega", want)
    assert not (tmp_path / "out").exists()


def test_an_empty_tensor_begins_where_the_next_one_does(tmp_path: Path) -> None:
    empty, nonempty = ({"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]} for count in (0, 1))
    text = json.dumps({"some": nonempty, "empty": empty}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    entries = safetensors_io.read_header(tmp_path / "x.safetensors").entries
    assert [entry.bytes for entry in entries.values()] == [4, 0]


@pytest.mark.parametrize(
    ("dtype", "stored"), [("fp32", "F32"), ("bf16", "BF16"), ("fp16", "F16"), ("keep", "F32")]
)
def test_weights_have_the_dtype_that_was_asked_for(
    mega: Any, hf_folder: Any, small_llama: ModelSpec, tmp_path: Path, dtype: str, stored: str
) -> None:
    folder = hf_folder(small_llama)
    words = ("--from", "hf", "--to", "mega", "--load", folder, "--save", tmp_path / "run", "--dtype", dtype)
    result = mega("convert", *words)
    assert result.exit_code == 0, result.output
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert {t.dtype for t in checkpoint.tensors[MODEL].values()} == {stored}
    assert f"{checkpoint.tensors[MODEL]['embed.weight'].pieces[0].bytes}" == str(88 * DTYPES[stored].itemsize)
    back = mega(
        "convert", "--from", "mega", "--to", "hf", "--load", tmp_path / "run", "--save", tmp_path / "b"
    )
    assert back.exit_code == 0, back.output
    theirs = json.loads((tmp_path / "b" / "config.json").read_bytes())["dtype"]
    assert theirs == {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[stored]


def test_a_number_too_large_for_the_dtype_is_named(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    folder = hf_folder(small_gpt, tensors=lambda t: t | {C_ATTN: t[C_ATTN] * 1e6})
    with pytest.raises(
        FormatError, match="layers.1.qkv.weight: too large for F16: found .*; hint: --dtype bf16"
    ):
        from_hugging_face(folder, tmp_path / "run", dtype="fp16")
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_replaced_only_when_asked(
    hf_folder: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    folder, run = hf_folder(small_gpt), run_folder(small_gpt)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists already.*--force"):
        to_hugging_face(run, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    to_hugging_face(run, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() != before
    with pytest.raises(ConfigError, match="something other than a model"):
        to_hugging_face(run, run_folder(small_gpt, "another"), force=True)
    new = tmp_path / "new"
    from_hugging_face(folder, new)
    with pytest.raises(ConfigError, match="there is a checkpoint already"):
        from_hugging_face(folder, new)
    from_hugging_face(folder, new, dtype="bf16", force=True)
    assert Checkpoint.open(new).tensors[MODEL]["embed.weight"].dtype == "BF16"
    assert not [p.name for p in (*tmp_path.iterdir(), *new.iterdir()) if p.name.startswith(".")]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_and_can_be_left_behind(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, mega: Any
) -> None:
    folder = hf_folder(small_gpt)
    vocab = {letter: i for i, letter in enumerate("abcdefghijkl")} | {"<|endoftext|>": 12}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    with pytest.raises(
        FormatError,
        match="has ids outside the model's vocabulary: found 13, wanted at most the model's 11; hint: "
        "mega-ckpt convert --no-tokenizer drops it",
    ):
        from_hugging_face(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    words = ("convert", "--from", "hf", "--to", "mega", "--load", folder, "--save", tmp_path / "run")
    result = mega(*words, "--no-tokenizer")
    assert (result.exit_code, result.exception) == (0, None)
    assert "without a tokenizer" in result.output
    assert not (Checkpoint.open(tmp_path / "run").folder / "tokenizer").exists()


def test_no_tokenizer_leaves_that_of_a_run_behind_and_excludes_the_flag_that_gives_one(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, mega: Any
) -> None:
    run = run_folder(small_gpt)
    words = ("convert", "--from", "mega", "--load", run, "--no-tokenizer")
    refused = str(mega(*words, "--to", "hf", "--save", tmp_path / "x", "--tokenizer", run).exception)
    assert refused == f"--no-tokenizer: excludes --tokenizer: found {run}; hint: leave one of them out"
    assert not (tmp_path / "x").exists()
    result = mega(*words, "--to", "hf", "--save", tmp_path / "x")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "x" / "config.json").read_bytes())["eos_token_id"] is None
    assert "dropped: the tokenizer, the optimizer's state, iteration 3 and the schedule" in result.output


@pytest.mark.parametrize("schedule", [5, "warmup", []])
@pytest.mark.parametrize("key", ["lr_schedule", "wd_schedule", "decoupled_lr_schedule"])
def test_a_schedule_of_a_trainer_file_that_is_no_object_is_refused_before_anything_is_written(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, key: str, schedule: object
) -> None:
    folder = Checkpoint.open(run_folder(small_gpt)).folder
    trainer = json.loads((folder / "trainer.json").read_text("utf-8"))
    (folder / "trainer.json").write_text(json.dumps(trainer | {key: schedule}), "utf-8")
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    del manifest["side_files"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 1}), "utf-8")
    (folder / "manifest.sha256").unlink()
    with pytest.raises(
        FormatError,
        match=f"trainer.json: {key}: is not what mega-train writes: found .*, wanted a JSON object",
    ):
        to_hugging_face(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gpt2s_two_files_become_one_tokenizer(hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    folder = hf_folder(small_gpt)
    vocab = {letter: i for i, letter in enumerate("abcdefg")} | {"<|endoftext|>": 7}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", "utf-8")
    assert from_hugging_face(folder, tmp_path / "run").tokenizer
    assert to_hugging_face(tmp_path / "run", tmp_path / "back").tokenizer
    assert open_tokenizer("HuggingFaceTokenizer", model=tmp_path / "back").identity.eod == 7


def test_numbers_without_text_have_no_tokenizer_file(
    run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    assert not to_hugging_face(run_folder(small_gpt), tmp_path / "out").tokenizer
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["eos_token_id"] == 10
    assert "the tokenizer" in convert(run_folder(small_gpt, "b"), tmp_path / "out b", "mega", "hf").dropped


@pytest.mark.parametrize("want", ["hf", "meta"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_only_numbers_that_are_converted_are_held_against_their_checksums(
    tmp_path: Path, run_folder: Callable[[ModelSpec], Path], small_llama: ModelSpec, want: str, dtype: str
) -> None:
    run, target = run_folder(small_llama), WriteOptions(dtype=dtype)
    folder = Checkpoint.open(run).folder
    converted = MODEL if dtype == "keep" else MAIN
    for space in ("optim.exp_avg", converted):
        file = folder / f"{space}-00000.safetensors"
        values = bytearray(file.read_bytes())
        values[-1] ^= 1
        file.write_bytes(values)
        if space == converted:
            with pytest.raises(FormatError, match=rf"{space}-00000.safetensors: .*crc32"):
                convert(run, tmp_path / "damaged", "mega", want, target=target)
            assert not (tmp_path / "damaged").exists()
        else:
            convert(run, tmp_path / "sound", "mega", want, target=target)


@pytest.mark.parametrize("have", ["megatron", "megatron-core", "torch_dist", "meta", "bin"])
def test_numbers_that_a_file_of_torchs_has_a_checksum_of_are_held_against_it(
    tmp_path: Path, run_folder: Callable[[ModelSpec], Path], small_llama: ModelSpec, have: str
) -> None:
    run = run_folder(small_llama)
    row = Checkpoint.open(run).read_raw(MODEL, "embed.weight", Slab((2, 0), (1, 8), (0, 0))).tobytes()
    theirs, have = tmp_path / "theirs", have if have != "bin" else "hf"
    convert(run, theirs, "mega", have)
    if have == "hf":
        weights = {name: torch.from_numpy(v) for name, v in load_file(theirs / "model.safetensors").items()}
        torch.save(weights, theirs / "pytorch_model.bin")
        (theirs / "model.safetensors").unlink()
    convert(theirs, tmp_path / "sound", have, "mega")
    (file,) = (f for f in theirs.rglob("*") if f.is_file() and row in f.read_bytes())
    before = file.read_bytes()
    position = before.index(row)
    file.write_bytes(before[:position] + bytes([before[position] ^ 1]) + before[position + 1 :])
    message = rf"{file.name}: data/\d+: values are not those that were written: crc32: found \w+, wanted \w+;"
    with pytest.raises(FormatError, match=message):
        convert(theirs, tmp_path / "damaged", have, "mega")
    assert not (tmp_path / "damaged").exists()
    with pytest.raises(FormatError, match=message):
        diff_checkpoints(*(format_of(have).read(theirs, ReadOptions()) for _ in range(2)))
