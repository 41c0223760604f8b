"""One-line errors for fairseq's files. tests/conformance compares the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.fairseq import dictionary as fairseq_dictionary
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import Record
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder

Trees = list[dict[str, Any]]
Write = Callable[..., Path]
ARGS = {
    "decoder_layers": 1,
    "decoder_embed_dim": 4,
    "decoder_ffn_embed_dim": 6,
    "decoder_attention_heads": 2,
    "tokens_per_sample": 5,
    "activation_fn": "gelu",
    "model_parallel_size": 2,
}
LAYER = "decoder.layers.0."
SHAPES = {
    "decoder.embed_tokens.weight": (4, 4),
    **{f"{LAYER}self_attn.{x}_proj.weight": (2, 4) for x in "qkv"},
    **{f"{LAYER}self_attn.{x}_proj.bias": (2,) for x in "qkv"},
    LAYER + "self_attn.out_proj.weight": (4, 2),
    LAYER + "self_attn.out_proj.bias": (4,),
    LAYER + "fc1.weight": (3, 4),
    LAYER + "fc1.bias": (3,),
    LAYER + "fc2.weight": (4, 3),
    LAYER + "fc2.bias": (4,),
    **{
        f"{LAYER}{n}.{k}": (4,)
        for n in ("self_attn_layer_norm", "final_layer_norm")
        for k in ("weight", "bias")
    },
    **{f"decoder.layer_norm.{kind}": (4,) for kind in ("weight", "bias")},
}
Q, NORM, EMBEDDING = (
    LAYER + "self_attn.q_proj.weight",
    "decoder.layer_norm.bias",
    "decoder.embed_tokens.weight",
)


def _namespace(**change: Any) -> Record:
    return Record("argparse.Namespace", (), {**ARGS, **change})


@pytest.fixture
def fairseq(tmp_path: Path) -> Write:
    """Write two parts and a dictionary of two of GPT-2's ids, the trees of the files changed as asked."""

    def write(change: Callable[[Trees], Any] = len) -> Path:
        folder = tmp_path / "model"
        trees: Trees = [
            {"args": _namespace(), "model": {n: np.ones(s, np.float32) for n, s in SHAPES.items()}}
            for _ in range(2)
        ]
        change(trees)
        folder.mkdir()
        (folder / "dict.txt").write_text("1 9\n0 8\nmadeupword0000 0\n", "utf-8")
        for rank, tree in enumerate(trees):
            arrays = tree["model"]
            model = (
                {n: TensorHeader(n, "F32", a.shape) for n, a in arrays.items()}
                if type(arrays) is dict
                else arrays
            )
            zip_writer.write(
                folder / f"model-model_part-{rank}.pt",
                {**tree, "model": model},
                lambda t, arrays=arrays: [arrays[t.name]],
            )
        return folder

    return write


def _args(**change: Any) -> Callable[[Trees], Any]:
    return lambda trees: [tree.update(args=_namespace(**change)) for tree in trees]


DAMAGE: dict[str, tuple[Callable[[Trees], Any], str]] = {
    "a part too few": (lambda t: t.pop(), "model: parts of the model: found 1, wanted 2"),
    "two checkpoints": (
        lambda t: t[1]["model"].update({NORM: np.zeros(4, np.float32)}),
        f"model-model_part-1.pt: {NORM}: differs from model-model_part-0.pt's; hint: these files "
        "belong to two",
    ),
    "missing": (lambda t: t[1]["model"].pop(Q), f"model-model_part-1.pt: has no tensor: wanted {Q}"),
    "no embedding": (lambda t: t[0]["model"].pop(EMBEDDING), f"part-0.pt: has no matrix: wanted {EMBEDDING}"),
    "unknown": (
        lambda t: t[0]["model"].update(x=np.ones(1, np.float32)),
        "model-model_part-0.pt: has a tensor that is not in the model: found x",
    ),
    "shape": (
        lambda t: t[1]["model"].update({Q: np.ones((4, 2), np.float32)}),
        f"model-model_part-1.pt: {Q}: shape: found (4, 2), wanted (2, 4)",
    ),
    "head of its own": (
        lambda t: t[0]["model"].update({"decoder.output_projection.weight": np.zeros((4, 4), np.float32)}),
        "decoder.output_projection.weight: is not the embedding, which it is tied to",
    ),
    "head and embedding of no dimension": (
        lambda t: t[0]["model"].update(
            {name: np.ones((), np.float32) for name in (EMBEDDING, "decoder.output_projection.weight")}
        ),
        f"part-0.pt: has no matrix: wanted {EMBEDDING}",
    ),
    "no model": (lambda t: t[0].update(model=None), "part-0.pt: is not a fairseq checkpoint"),
    "no arguments": (lambda t: t[0].pop("args"), "part-0.pt: has no arguments: wanted args or cfg"),
    "no layers": (_args(decoder_layers=None), "part-0.pt: decoder_layers: not a count: found None"),
    "layers": (_args(decoder_layers=2**40), "decoder_layers: more than the file has: found 1099511627776"),
    "one layer more": (_args(decoder_layers=2), "has no tensor: wanted decoder.layers.1."),
    "heads": (_args(decoder_attention_heads=3), "part-0.pt: model.heads: do not divide model.hidden"),
    "parts between heads": (
        _args(decoder_attention_heads=1),
        "cannot be in 2 parts: layers.0.qkv.weight: 1 heads",
    ),
    "relu": (
        _args(activation_fn="relu"),
        "activation_fn: is not supported: found relu, wanted gelu | gelu_fast",
    ),
    "learned positions": (
        _args(decoder_learned_pos=True),
        "decoder_learned_pos: is not supported: found True",
    ),
    "post-norm": (
        _args(decoder_normalize_before=False),
        "decoder_normalize_before: is not supported: found False",
    ),
    "input of another width": (
        _args(decoder_input_dim=2),
        "decoder_input_dim: is not supported: found 2, wanted 4",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_files_that_are_not_whole_are_refused_in_one_line(fairseq: Write, tmp_path: Path, what: str) -> None:
    change, message = DAMAGE[what]
    folder = fairseq(change)
    with pytest.raises(FormatError) as caught:
        convert(folder, tmp_path / "run", "fairseq", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_files_that_are_missing_cut_or_of_two_checkpoints_are_named(fairseq: Write, tmp_path: Path) -> None:
    def assert_refused(message: str, load: Path) -> None:
        with pytest.raises(FormatError, match=message):
            convert(load, tmp_path / "run", "fairseq", "mega")

    folder = fairseq()
    first, second = (folder / f"model-model_part-{rank}.pt" for rank in range(2))
    assert_refused("best.pt: has no weights: wanted best-model_part-0.pt and on", folder / "best.pt")
    (folder / "best-model_part-0.pt").write_bytes(b"")
    assert_refused("several checkpoints: found best model, wanted one; hint: --load .*best.pt", folder)
    (folder / "best-model_part-0.pt").unlink()
    (folder / "dict.txt").rename(folder / "words.txt")
    assert_refused("dict.txt: not readable: found No such file", folder)
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert_refused("model-model_part-1.pt: ", folder)
    first.unlink()
    assert_refused("model-model_part-0.pt: no such file: wanted a file for every rank to 1", folder)
    second.unlink()
    assert_refused("model: has no weights: wanted model-model_part-0.pt and on", folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_arguments_of_newer_releases_are_found(fairseq: Write, tmp_path: Path, wrapped: bool) -> None:
    def change(trees: Trees) -> None:
        for tree in trees:
            tree.pop("args")
            model: Any = _namespace()
            if wrapped:  # as OmegaConf keeps it
                nodes = {k: Record("omegaconf.nodes.AnyNode", (), {"_val": v}) for k, v in ARGS.items()}
                model = Record("omegaconf.dictconfig.DictConfig", (), {"_content": nodes})
            tree["cfg"] = {"model": model}

    convert(fairseq(change), tmp_path / "run", "fairseq", "mega")
    spec = Checkpoint.open(tmp_path / "run").spec
    assert (spec.positions, spec.scale_embedding, spec.ffn, spec.max_seq_len) == ("sinusoidal", True, 6, 5)


def test_gpt2s_tokenizer_beside_the_files_travels_along(fairseq: Write, tmp_path: Path) -> None:
    folder = fairseq()
    (folder / "encoder.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}), "utf-8")
    (folder / "vocab.bpe").write_text("#version: 0.2\n", "utf-8")
    assert convert(folder, tmp_path / "run", "fairseq", "mega").written.tokenizer
    tokenizer = open_tokenizer_folder(Checkpoint.open(tmp_path / "run").folder / "tokenizer")
    assert (tokenizer.encode("aa"), tokenizer.identity.eod) == ([0, 0], 1)
    more = {letter: i for i, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8}
    (folder / "encoder.json").write_text(json.dumps(more), "utf-8")
    with pytest.raises(
        FormatError, match=r"encoder.json: has ids outside the model's vocabulary: found 9, wanted at most"
    ):
        convert(folder, tmp_path / "more", "fairseq", "mega")


def test_ids_of_gpt2_come_first_and_its_end_is_fairseqs(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("2 9\nmadeupword0000 0\n0 7\n1 7\n", "utf-8")
    # lines are 4, 5, 6 and 7; 8 is a row that fills up; 2 is </s>
    assert fairseq_dictionary.id_order(path, 9).tolist() == [6, 7, 2, 0, 1, 4, 3, 5, 8]


DICTIONARIES: dict[str, tuple[str, str]] = {
    "too long": (
        "0 1\n1 1\n2 1\n3 1\n4 1\n",
        "dict.txt: has more lines than the model has ids: found 5, wanted at most 4",
    ),
    "words": ("0 1\nthe 1\n", "dict.txt:2: is not an id of GPT-2: found 'the'"),
    "twice": ("0 1\n0 1\n", "dict.txt:2: duplicate id: found 0"),
    "a hole": ("0 1\n2 1\n", "dict.txt: lacks an id of GPT-2: wanted 1"),
    "empty": ("", "dict.txt: lacks an id of GPT-2: wanted 0"),
    "no counts": ("0\n", "dict.txt:1: is not a line of a dictionary: found '0', wanted token count"),
}


@pytest.mark.parametrize("what", DICTIONARIES)
def test_a_dictionary_of_something_else_is_refused(tmp_path: Path, what: str) -> None:
    text, message = DICTIONARIES[what]
    (tmp_path / "dict.txt").write_text(text, "utf-8")
    with pytest.raises(FormatError) as caught:
        fairseq_dictionary.id_order(tmp_path / "dict.txt", 8)
    assert message in str(caught.value)
