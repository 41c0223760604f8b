"""llama2.c's files of both versions: all tensors are read, and other files are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer, open_tokenizer_folder

DIM, FFN, LAYERS, HEADS, KEYS, VOCAB, CONTEXT = SIZES = 8, 6, 2, 2, 1, 270, 5
SHAPES = {
    "tok_embeddings": (VOCAB, DIM),
    "attention_norm": (LAYERS, DIM),
    "wq": (LAYERS, DIM, DIM),
    "wk": (LAYERS, DIM // 2, DIM),
    "wv": (LAYERS, DIM // 2, DIM),
    "wo": (LAYERS, DIM, DIM),
    "ffn_norm": (LAYERS, DIM),
    "w1": (LAYERS, FFN, DIM),
    "w2": (LAYERS, DIM, FFN),
    "w3": (LAYERS, FFN, DIM),
    "norm": (DIM,),
    "output": (VOCAB, DIM),
}
Tensors = dict[str, np.ndarray]
Write = Callable[..., tuple[Path, Tensors]]


@pytest.fixture
def model(tmp_path: Path) -> Write:
    """Write a model with a head of its own or without, and give its tensors."""

    def write(version: int, *, tied: bool, name: str = "model.bin") -> tuple[Path, Tensors]:
        rng = np.random.default_rng(3)
        tensors = {n: rng.normal(size=shape).astype("<f4") for n, shape in SHAPES.items()}
        blob = b"".join(tensors[n].tobytes() for n in SHAPES if n != "output")
        if version == 0:
            sizes = (*SIZES[:5], VOCAB if tied else -VOCAB, CONTEXT)
            file = struct.pack("<7i", *sizes) + blob + bytes(4 * CONTEXT * DIM // HEADS)
        else:
            first = ("attention_norm", "ffn_norm", "norm")
            rest = [n for n in SHAPES if n not in (*first, "output")]
            blob = b"".join(tensors[n].tobytes() for n in (*first, *rest))
            file = struct.pack("<4si7iB", b"24ka", 1, *SIZES, tied).ljust(256, b"\0") + blob
        (tmp_path / name).write_bytes(file + (b"" if tied else tensors["output"].tobytes()))
        return tmp_path / name, tensors

    return write


FIRST = (b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256)))
PIECES = (*FIRST, *(b" ", b"a", b"b", b"ab", b" a", b"c", b"bc", b"d", b"\xc3\xa9", b"e", b"f"))


def _tokenizer(pieces: tuple[bytes, ...] = PIECES) -> bytes:
    scores = [-float(max(0, i - len(FIRST))) for i in range(len(pieces))]
    parts = [struct.pack("<fi", s, len(p)) + p for s, p in zip(scores, pieces, strict=True)]
    return struct.pack("<i", 8) + b"".join(parts)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_every_tensor_is_where_the_program_has_it(
    model: Write, tmp_path: Path, version: int, tied: bool
) -> None:
    path, theirs = model(version, tied=tied)
    convert(path, tmp_path / "run", "llama2c", "mega")
    ours = Checkpoint.open(tmp_path / "run")
    rows = {row.name: row for row in table(ours.spec)}
    assert (ours.spec.tied, ours.spec.kv_heads, ours.spec.max_seq_len) == (tied, KEYS, CONTEXT)

    def read(name: str) -> np.ndarray:
        return ours.read_raw(MODEL, name, whole_slab(rows[name].shape))

    pairs_apart = [0, 2, 1, 3]
    assert np.array_equal(read("embed.weight"), theirs["tok_embeddings"])
    assert np.array_equal(read("final_norm.weight"), theirs["norm"])
    if not tied:
        assert np.array_equal(read("head.weight"), theirs["output"])
    for i in range(LAYERS):
        queries = theirs["wq"][i].reshape(HEADS, 4, DIM)[:, pairs_apart].reshape(DIM, DIM)
        qkv = np.concatenate((queries, theirs["wk"][i][pairs_apart], theirs["wv"][i]))
        assert np.array_equal(read(f"layers.{i}.qkv.weight"), qkv)
        gate_up = np.concatenate((theirs["w1"][i], theirs["w3"][i]))
        assert np.array_equal(read(f"layers.{i}.gate_up.weight"), gate_up)
        for name, part in (("attn_norm", "attention_norm"), ("ffn_norm", "ffn_norm"), ("out", "wo")):
            assert np.array_equal(read(f"layers.{i}.{name}.weight"), theirs[part][i])
        assert np.array_equal(read(f"layers.{i}.down.weight"), theirs["w2"][i])


def _sizes(**change: int) -> bytes:
    names = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
    return struct.pack("<7i", *(dict(zip(names, SIZES, strict=True)) | change).values())


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda b: b[:-4], "model.bin: size in bytes: found 11,740, wanted 11,744 for 2 layers"),
    "longer": (lambda b: b + b"\0", "model.bin: size in bytes: found"),
    "empty": (lambda b: b"", "model.bin: size in bytes: found 0, wanted a header and a model"),
    "quantised": (
        lambda b: b[:4] + struct.pack("<i", 2) + b[8:],
        "model.bin: has quantised weights: found version 2, wanted 0 | 1; hint: export",
    ),
    "of the future": (
        lambda b: b[:4] + struct.pack("<i", 3) + b[8:],
        "model.bin: version: found 3, wanted 0 | 1",
    ),
    "of another program": (
        lambda b: b"PK\3\4" + b[4:],
        "model.bin: size in bytes: found 11,744, wanted 386,783,775,410,255,548 for",
    ),
    "more layers than memory": (
        lambda b: b[:8] + _sizes(n_layers=2**31 - 1) + b[36:],
        "wanted 3,023,656,983,904 for 2,147,483,647 layers, hidden 8, vocabulary 270; hint: the file "
        "is truncated",
    ),
    "no heads": (lambda b: b[:8] + _sizes(n_heads=0) + b[36:], "is not a llama2.c model: model.heads"),
    "layers below 0": (lambda b: b[:8] + _sizes(n_layers=-1) + b[36:], "model.layers: not a count: found -1"),
    "no context": (lambda b: b[:8] + _sizes(seq_len=0) + b[36:], "model.max_seq_len: not a count: found 0"),
    "odd heads": (lambda b: b[:8] + _sizes(n_heads=8) + b[36:], "rotary components come in pairs"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_is_none_is_refused_in_one_line(model: Write, tmp_path: Path, what: str) -> None:
    change, message = DAMAGE[what]
    path, _ = model(1, tied=True)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(FormatError) as caught:
        convert(path, tmp_path / "run", "llama2c", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_file_of_version_0_that_was_cut_is_refused(model: Write, tmp_path: Path) -> None:
    path, _ = model(0, tied=False)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="size in bytes: found .* for 2 layers, hidden 8, vocabulary 270"):
        convert(path, tmp_path / "run", "llama2c", "mega")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no.bin: no such file or folder; hint: ls "):
        convert(tmp_path / "no.bin", tmp_path / "run", "llama2c", "mega")


def test_it_is_only_read(model: Write, tmp_path: Path) -> None:
    path, _ = model(0, tied=True)
    convert(path, tmp_path / "run", "llama2c", "mega")
    with pytest.raises(ConfigError, match="--to: is a read-only format: found llama2c"):
        convert(tmp_path / "run", tmp_path / "x.bin", "mega", "llama2c")


@pytest.mark.parametrize("name", ["tok270.bin", "tokenizer.bin"])
def test_the_tokenizer_beside_the_model_travels_along(model: Write, tmp_path: Path, name: str) -> None:
    path, _ = model(0, tied=True)
    (tmp_path / name).write_bytes(_tokenizer())
    assert convert(path, tmp_path / "run", "llama2c", "mega").written.tokenizer
    tokenizer = open_tokenizer_folder(Checkpoint.open(tmp_path / "run").folder / "tokenizer")
    assert (tokenizer.identity.vocab_size, tokenizer.identity.bos, tokenizer.identity.eod) == (270, 1, 2)
    # " abc": b with a (262, the best score there), then the space before it has no union with ab
    space, c, ab = 259, 264, 262
    assert tokenizer.encode("abc") == [space, ab, c]
    assert tokenizer.encode("é\0") == [space, 267, 3]
    assert tokenizer.encode("") == []
    for text in ("abc", " a  b", "漢 é\n", "<s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_that_is_named_is_taken_instead(model: Write, tmp_path: Path) -> None:
    path, _ = model(0, tied=True)
    (tmp_path / "tokenizer.bin").write_bytes(b"")
    open_tokenizer("NullTokenizer", vocab_size=269).save(tmp_path / "null")
    reading = ReadOptions(tokenizer=tmp_path / "null")
    assert convert(path, tmp_path / "run", "llama2c", "mega", reading=reading).written.tokenizer
    open_tokenizer("NullTokenizer", vocab_size=270).save(tmp_path / "null")
    with pytest.raises(FormatError, match="null: has ids outside the model's vocabulary: found 271"):
        convert(path, tmp_path / "more", "llama2c", "mega", reading=reading)


TOKENIZERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "tokenizer.bin: has no piece 0: found 0 bytes, wanted 270 pieces"),
    "cut": (_tokenizer()[:-1], "has no piece 269: found 3"),
    "longer": (_tokenizer() + b"12345", "has more than the model's ids: found 5 bytes more, wanted 270"),
    "length below 0": (struct.pack("<ifi", 8, 0, -4) + bytes(99), "has no piece 0"),
    "not text": (_tokenizer((*PIECES[:-1], b"\xff")), "has no piece 269"),
    "twice": (_tokenizer((*PIECES[:-1], b"a")), "is not a llama2.c tokenizer: found ['<unk>'"),
    "no bytes": (_tokenizer((b"x", *PIECES[1:])), "is not a llama2.c tokenizer: found ['x', '<s>'"),
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused(model: Write, tmp_path: Path, what: str) -> None:
    content, message = TOKENIZERS[what]
    path, _ = model(0, tied=True)
    (tmp_path / "tokenizer.bin").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        convert(path, tmp_path / "run", "llama2c", "mega")
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
