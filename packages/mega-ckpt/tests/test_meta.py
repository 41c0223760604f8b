"""Meta's folders: their parts are merged, and others are refused. tests/conformance compares the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.interface import ReadOptions, WriteOptions
from mega_ckpt.formats.meta import params as meta_params
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError, LayoutError
from mega_schema.parallel_layout import Layout
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec, gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer

Parts = list[dict[str, np.ndarray]]
Write = Callable[..., Path]
PARAMS = {"dim": 8, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": -1}
SHAPES = {
    "tok_embeddings.weight": (12, 4),
    "layers.0.attention_norm.weight": (8,),
    "layers.0.attention.wq.weight": (4, 8),
    "layers.0.attention.wk.weight": (2, 8),
    "layers.0.attention.wv.weight": (2, 8),
    "layers.0.attention.wo.weight": (8, 4),
    "layers.0.ffn_norm.weight": (8,),
    "layers.0.feed_forward.w1.weight": (3, 8),
    "layers.0.feed_forward.w2.weight": (8, 3),
    "layers.0.feed_forward.w3.weight": (3, 8),
    "norm.weight": (8,),
    "output.weight": (6, 8),
}
WQ, NORM = "layers.0.attention.wq.weight", "norm.weight"


@pytest.fixture
def meta(tmp_path: Path) -> Write:
    """Write a folder of two parts, the parameters and the tensors changed as asked."""

    def write(params: dict[str, Any] | None = None, change: Callable[[Parts], Any] = len) -> Path:
        rng, folder = np.random.default_rng(5), tmp_path / "meta"
        parts = [{n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(2)]
        for name, shape in SHAPES.items():
            if len(shape) == 1:
                parts[1][name] = parts[0][name]
        change(parts)
        folder.mkdir()
        content = {k: v for k, v in {**PARAMS, **(params or {})}.items() if v is not None}
        (folder / "params.json").write_text(json.dumps(content), "utf-8")
        names = {"float32": "F32", "float16": "F16", "int32": "I32"}
        for rank, part in enumerate(parts):
            tree = {n: TensorHeader(n, names[str(a.dtype)], a.shape) for n, a in part.items()}
            values = dict(part)
            zip_writer.write(
                folder / f"consolidated.{rank:02d}.pth", tree, lambda t, values=values: [values[t.name]]
            )
        return folder

    return write


def test_parts_are_joined_each_where_it_was_cut(meta: Write, tmp_path: Path) -> None:
    parts: Parts = []
    convert(meta(change=parts.extend), tmp_path / "run", "meta", "mega")
    ours = Checkpoint.open(tmp_path / "run")
    rows = {row.name: row for row in table(ours.spec)}

    def concatenate_parts(name: str, dim: int) -> np.ndarray:
        return np.concatenate([part[name] for part in parts], dim)

    def read(name: str) -> np.ndarray:
        return ours.read_raw(MODEL, name, whole_slab(rows[name].shape))

    assert np.array_equal(read("embed.weight"), concatenate_parts("tok_embeddings.weight", 1))
    assert np.array_equal(read("head.weight"), concatenate_parts("output.weight", 0))
    assert np.array_equal(read("layers.0.out.weight"), concatenate_parts("layers.0.attention.wo.weight", 1))
    assert np.array_equal(
        read("layers.0.down.weight"), concatenate_parts("layers.0.feed_forward.w2.weight", 1)
    )
    gate_up = [concatenate_parts(f"layers.0.feed_forward.{w}.weight", 0) for w in ("w1", "w3")]
    assert np.array_equal(read("layers.0.gate_up.weight"), np.concatenate(gate_up))
    qkv = [
        concatenate_parts(f"layers.0.attention.{w}.weight", 0) for w in ("wq", "wk", "wv")
    ]  # a head is one pair
    assert np.array_equal(read("layers.0.qkv.weight"), np.concatenate(qkv))


DAMAGE: dict[str, tuple[dict[str, Any] | None, Callable[[Parts], Any], str]] = {
    "a part too few": (None, lambda p: p.pop(), "params.json: parts of the model: found 1, wanted 2; hint: "),
    "a part too many": (None, lambda p: p.append(p[0]), "parts of the model: found 3, wanted 2"),
    "two checkpoints": (
        None,
        lambda p: p[1].update({NORM: p[1][NORM] + 1}),
        f"consolidated.01.pth: {NORM}: differs from consolidated.00.pth's; hint: these files belong to two",
    ),
    "missing": (None, lambda p: p[1].pop(WQ), f"consolidated.01.pth: has no tensor: wanted {WQ}"),
    "missing in the first": (None, lambda p: p[0].pop(WQ), f"params.json: has no tensor: wanted {WQ}"),
    "head of one part": (None, lambda p: p[1].pop("output.weight"), "has no tensor: wanted output.weight"),
    "unknown": (
        None,
        lambda p: p[1].update(x=np.ones(1, np.float32)),
        "has a tensor that is not in the model: found x",
    ),
    "shape": (
        None,
        lambda p: p[1].update({WQ: p[1][WQ].T.copy()}),
        f"consolidated.01.pth: {WQ}: shape: found (8, 4), wanted (4, 8)",
    ),
    "no matrix": (
        None,
        lambda p: p[0].update({WQ: p[0][NORM]}),
        f"{WQ}: shape: found (8,), wanted two dimensions",
    ),
    "numbers": (None, lambda p: p[0].update({NORM: np.ones(8, np.int32)}), "dtype: found I32, wanted F32"),
    "dtypes": (
        None,
        lambda p: p[0].update({WQ: p[0][WQ].astype(np.float16)}),
        "dtypes differ: found ['F16', 'F32']",
    ),
    "parameter": ({"moe": 8}, len, "params.json: moe: is not a known parameter: wanted dim | "),
    "no dim": ({"dim": None}, len, "params.json: dim: not a count: found None"),
    "dim as a text": ({"dim": "8"}, len, "params.json: dim: not a count: found 8"),
    "no heads": ({"n_heads": 0}, len, "n_heads: not a count: found 0"),
    "heads": ({"n_heads": 3}, len, "n_heads: does not divide dim: found 3, wanted a divisor of 8"),
    "key heads": ({"n_kv_heads": 3}, len, "model.kv_heads: query heads must share key heads evenly"),
    "layers": ({"n_layers": 2**40}, len, "n_layers: more than the files have: found 1099511627776, wanted"),
    "one layer more": ({"n_layers": 2}, len, "has no tensor: wanted layers.1.attention_norm.weight"),
    "vocabulary": ({"vocab_size": 13}, len, "vocab_size: is not the embedding's: found 13, wanted -1 or 12"),
    "norm": ({"norm_eps": "x"}, len, "model.norm_eps: not a number: found x"),
    "base": ({"rope_theta": "x"}, len, "model.rope_theta: not a number: found x"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(meta: Write, tmp_path: Path, what: str) -> None:
    params, change, message = DAMAGE[what]
    folder = meta(params, change)
    with pytest.raises(FormatError) as caught:
        convert(folder, tmp_path / "run", "meta", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_files_that_are_missing_or_cut_are_named(meta: Write, tmp_path: Path) -> None:
    def assert_refused(message: str) -> None:
        with pytest.raises(FormatError, match=message):
            convert(tmp_path / "meta", tmp_path / "run", "meta", "mega")

    assert_refused("meta: no such file or folder; hint: ls ")
    (tmp_path / "meta").mkdir()
    assert_refused("meta: has no params.json: wanted a folder of Meta's Llama")
    (tmp_path / "meta").rmdir()
    folder = meta()
    first, second = (folder / f"consolidated.0{rank}.pth" for rank in range(2))
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert_refused("consolidated.01.pth: ")
    second.rename(folder / "consolidated.02.pth")
    assert_refused("consolidated.01.pth: no such file: wanted a part for every rank to consolidated.02.pth")
    (folder / "consolidated.02.pth").unlink()
    zip_writer.write(first, {"model": {}}, lambda _: [])
    assert_refused("consolidated.00.pth: is not a part of a Llama: wanted a dictionary of tensors")
    first.unlink()
    assert_refused("meta: has no weights: wanted consolidated.00.pth and on")
    (folder / "params.json").write_text("{", "utf-8")
    assert_refused("params.json: is not JSON")
    (folder / "params.json").write_text("[]", "utf-8")
    assert_refused("params.json: content: found list, wanted a JSON object")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("params", "max_seq_len"),
    [
        ({"norm_eps": 1e-6}, 2048),
        ({}, 4096),
        ({"rope_theta": 500000.0}, 8192),
        ({"rope_theta": 1000000}, 16384),
        ({"rope_theta": 500000.0, "use_scaled_rope": True}, 131072),
        ({"max_seq_len": 77, "rope_theta": 500000.0}, 77),
    ],
)
def test_the_release_tells_the_longest_sequence(
    meta: Write, tmp_path: Path, params: dict[str, Any], max_seq_len: int
) -> None:
    convert(meta(params), tmp_path / "run", "meta", "mega")
    assert Checkpoint.open(tmp_path / "run").spec.max_seq_len == max_seq_len


def test_what_mistral_adds_to_the_parameters_is_known(meta: Write, tmp_path: Path) -> None:
    convert(meta({"head_dim": 2, "hidden_dim": 6, "sliding_window": 5}), tmp_path / "run", "meta", "mega")
    assert Checkpoint.open(tmp_path / "run").spec.sliding_window == 5


def test_a_tokenizer_is_the_one_that_is_named_or_the_folders(meta: Write, tmp_path: Path) -> None:
    folder = meta()
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\n")
    message = "tokenizer.model: tokens: found 1 and 256 special ones, wanted the model's 12"
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "run", "meta", "mega")
    open_tokenizer("NullTokenizer", vocab_size=11).save(tmp_path / "null")
    reading = ReadOptions(tokenizer=tmp_path / "null")
    assert convert(folder, tmp_path / "run", "meta", "mega", reading=reading).written.tokenizer
    assert not convert(
        folder, tmp_path / "none", "meta", "mega", reading=ReadOptions(no_tokenizer=True)
    ).written.tokenizer
    (folder / "tokenizer.model").write_bytes(b"\nx")
    with pytest.raises(FormatError, match="tokenizer.model: not a SentencePiece model"):
        convert(folder, tmp_path / "more", "meta", "mega")


SMALL: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 4, "ffn": 6, "vocab": 11, "max_seq_len": 6}


@pytest.mark.parametrize("ffn", [1, 6, 21, 22, 1000])
def test_metas_program_finds_the_width_of_the_feed_forward(ffn: int) -> None:
    params = meta_params.from_spec(llama(**SMALL | {"ffn": ffn}), "x")
    assert int(params["ffn_dim_multiplier"] * int(2 * (4 * params["dim"]) / 3)) == ffn
    assert params["multiple_of"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sliding_window": 3},
            "model.sliding_window: is not supported by Meta's Llama: found 3, wanted None",
        ),
        ({"qkv_bias": True}, "model.qkv_bias"),
        ({"qk_norm": True}, "model.qk_norm"),
        ({"rope_interleaved": True}, "model.rope_interleaved"),
        ({"rope_interpolation": 2.0}, "model.rope_interpolation"),
        ({"rope_scaling": 4.0}, "model.rope_scaling: .*found 4.0, wanted 8.0"),
        ({"head_dim": 4}, "model.head_dim"),
    ],
)
def test_a_model_that_metas_program_has_not_is_refused(
    run_folder: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = run_folder(llama(**SMALL | change))
    with pytest.raises(ConfigError, match=message):
        convert(run, tmp_path / "out", "mega", "meta")
    assert not (tmp_path / "out").exists()


def test_a_gpt_is_no_llama(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="model.norm: is not supported by Meta's Llama: found layernorm, wanted rmsnorm"
    ):
        convert(run_folder(small_gpt), tmp_path / "out", "mega", "meta")


GATED: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False}
GATED |= {"qkv_bias": False, "tied": False}


def test_a_gpt_with_all_that_a_llama_has_is_written_as_one(run_folder: Any, tmp_path: Path) -> None:
    gated = gpt(**SMALL | GATED)
    result = convert(
        run_folder(gated), tmp_path / "out", "mega", "meta", target=WriteOptions(layout=Layout())
    )
    assert result.written.parameters == count_params(table(gated))
    convert(tmp_path / "out", tmp_path / "back", "meta", "mega")
    back, before = Checkpoint.open(tmp_path / "back"), Checkpoint.open(tmp_path / "run")
    assert back.spec == replace(gated, family="llama", max_seq_len=back.spec.max_seq_len)
    for name, tensor in before.tensors[MODEL].items():
        slab = whole_slab(tensor.shape)
        theirs = back.read_raw(MODEL, name, slab)
        assert np.array_equal(before.read_raw(MODEL, name, slab), theirs)


@pytest.mark.parametrize(
    "field", ["embed_norm", "post_norm_residual", "parallel_residual", "scale_embedding"]
)
def test_a_gated_gpt_with_more_than_a_llama_is_refused_by_the_field(
    run_folder: Any, tmp_path: Path, field: str
) -> None:
    run = run_folder(gpt(**SMALL | GATED | {field: True}))
    with pytest.raises(ConfigError, match=f"model.{field}: is not supported by Meta's Llama: found True"):
        convert(run, tmp_path / "out", "mega", "meta")
    assert not (tmp_path / "out").exists()


def test_cuts_that_cannot_be_and_places_that_are_taken_are_refused(
    run_folder: Any, small_llama: ModelSpec, tmp_path: Path
) -> None:
    run, out = run_folder(small_llama), tmp_path / "out"

    def to_meta(layout: Layout, **more: Any) -> Any:
        return convert(run, out, "mega", "meta", target=WriteOptions(layout=layout, **more))

    with pytest.raises(LayoutError, match="the vocabulary cannot be split evenly: found 11 rows over tp=2"):
        to_meta(Layout(tp=2))
    with pytest.raises(ConfigError, match="--pp: Meta's parts are of every layer: found 2, wanted 1"):
        to_meta(Layout(pp=2))
    assert not out.exists()
    out.write_text("years", "utf-8")
    for force in (False, True):
        with pytest.raises(ConfigError, match="--save: "):
            to_meta(Layout(), force=force)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert out.read_text("utf-8") == "years"
    out.unlink()
    out.mkdir()
    (out / "mine.txt").write_text("x", "utf-8")
    with pytest.raises(ConfigError, match="exists already: found .*hint: add --force"):
        to_meta(Layout())
    with pytest.raises(ConfigError, match=r"contains something other than a model: no params.json"):
        to_meta(Layout(), force=True)
    (out / "mine.txt").rename(out / "params.json")
    result = to_meta(Layout(), force=True, dtype="bf16")
    assert sorted(path.name for path in out.iterdir()) == ["consolidated.00.pth", "params.json"]
    assert result.written.bytes == 2 * result.written.parameters
    assert set(result.dropped) >= {"the optimizer's state", "the tokenizer", "the run's configuration"}
