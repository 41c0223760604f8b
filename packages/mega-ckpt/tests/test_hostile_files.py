"""Hostile files that aim at memory, time, the terminal or other files: one-line errors, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.tensors import safetensors_io
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_ckpt.torch_files import pickle_reader
from mega_ckpt.torch_files.pickle_values import PickleFile
from mega_schema.errors import FormatError, MegaError, escape_controls
from mega_schema.spec import ModelSpec, gpt
from mega_schema.tokenizer.tokenizer import open_tokenizer

Folder = Callable[..., Path]
Mega = Callable[..., Any]


def test_a_width_that_no_file_holds_is_refused_before_a_list_of_it_is_made(
    hf_folder: Folder, run_limited: Any
) -> None:
    spec = gpt(layers=2, hidden=8, heads=4, vocab=11, max_seq_len=6, positions="alibi", embed_norm=True)
    folder = hf_folder(spec, config={"hidden_size": 10**12})
    result = run_limited("inspect", folder)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "numbers in all tensors: found " in result.stderr


def test_keys_that_collide_are_refused_at_once(tmp_path: Path) -> None:
    step = 2**61 - 1  # what Python divides an integer by to hash it
    keys = b""
    for number in range(1, 40_001):
        raw = (number * step).to_bytes(11, "little", signed=True)
        keys += b"\x8a" + bytes([len(raw)]) + raw + b"N"
    path = tmp_path / "keys.pt"
    path.write_bytes(b"\x80\x02}(" + keys + b"u.")
    begun = time.process_time()
    with pytest.raises(
        FormatError, match="keys.pt: has a key that is not read: found 65 bits, wanted at most 64"
    ):
        pickle_reader.open_file(path)
    assert time.process_time() - begun < 4


def test_more_tuples_as_keys_than_any_checkpoint_has_are_refused(tmp_path: Path) -> None:
    keys = b"".join(b"J" + number.to_bytes(4, "little") + b"\x85N" for number in range(1025))
    path = tmp_path / "keys.pt"
    path.write_bytes(b"\x80\x02}(" + keys + b"u.")
    with pytest.raises(FormatError, match="tuples as keys of one dict: found 1025, wanted at most 1024"):
        pickle_reader.open_file(path)


def test_a_tuple_of_many_values_is_no_key(tmp_path: Path) -> None:
    # a thousand of one hash, alike but for their ends, take ten seconds of a core to tell apart
    program = b"\x80\x02}(" + b"(" + b"N" * 100 + b"tN" + b"u."
    path = tmp_path / "keys.pt"
    path.write_bytes(program)
    with pytest.raises(FormatError, match="values in a key of a dict: found 101, wanted at most 64"):
        pickle_reader.open_file(path)
    path.write_bytes(b"\x80\x02}(" + b"(" + b"N" * 60 + b"tK\x07" + b"u.")
    assert pickle_reader.open_file(path).tree == {(None,) * 60: 7}


def test_a_long_key_over_many_tensors_is_not_written_out_for_each(tmp_path: Path) -> None:
    tensor = MappedTensor(tmp_path / "a.pt", "F32", (1,), 0)
    assert PickleFile(tmp_path / "a.pt", {"a" * 1000: [tensor, {"b": tensor}]}).tensors().keys() == {
        f"{'a' * 1000}.0",
        f"{'a' * 1000}.1.b",
    }
    with pytest.raises(FormatError, match="names of tensors are too long: wanted at most 134,217,728"):
        PickleFile(tmp_path / "a.pt", {"a" * (1 << 20): [tensor] * 200}).tensors()


def test_seconds_and_memory_of_what_a_pickle_says_are_limited_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "many.pt"
    path.write_bytes(b"\x80\x02](" + b"N" * 50_000 + b"e.")
    assert len(pickle_reader.open_file(path).tree) == 50_000
    with monkeypatch.context() as patch:
        patch.setattr(pickle_reader, "_MAX_SECONDS", -1)  # over before it begins
        with pytest.raises(
            FormatError, match=r"many.pt: takes too long to read: found 16,384 values, wanted"
        ):
            pickle_reader.open_file(path)

    def no_memory(text: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(pickle_reader.json, "loads", no_memory)
    with pytest.raises(FormatError, match=r"many.pt: takes too much memory to read; hint: if you trust"):
        pickle_reader.open_file(path)


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    hf_folder: Folder, small_gpt: ModelSpec, mega: Mega
) -> None:
    name = "transformer.\x1b]52;c;ZXZpbA==\x07\x9b2J"
    folder = hf_folder(small_gpt, tensors=lambda all_: {**all_, name: all_["transformer.wte.weight"]})
    message = str(mega("inspect", folder).exception)
    assert "\\x1b]52;c;ZXZpbA==\\x07\\x9b2J" in message
    assert message.isprintable()
    assert str(MegaError("a\nb", "c\r", found="\u202e\ud800")) == "a\\nb: c\\r: found \\u202e\\ud800"
    assert escape_controls("größe 中 é") == "größe 中 é"


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_config_that_is_a_link_out_of_its_folder_is_refused_and_one_into_the_hubs_cache_is_not(
    hf_folder: Folder, small_gpt: ModelSpec, mega: Mega, tmp_path: Path, command: str
) -> None:
    source = hf_folder(small_gpt)
    more = () if command == "inspect" else ("--from", "hf", "--to", "mega", "--save", tmp_path / "run")

    def run(folder: Path) -> Any:
        return (
            mega(command, folder, *more) if command == "inspect" else mega(command, "--load", folder, *more)
        )

    snapshot = tmp_path / "models--a--b/snapshots/0123"
    (tmp_path / "models--a--b/blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    source.rename(snapshot)
    (snapshot / "config.json").rename(tmp_path / "models--a--b/blobs/77")
    (snapshot / "config.json").symlink_to("../../blobs/77")
    assert run(snapshot).exit_code == 0
    (tmp_path / "models--a--b/blobs/77").rename(tmp_path / "private.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "private.json")
    message = str(run(snapshot).exception)
    assert message.startswith(f"{snapshot / 'config.json'}: is a link out of its folder: found ")


def tokenizer_folder(folder: Path) -> Path:
    """Write a tokenizer.json of three words."""
    words = {"<unk>": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


def test_a_link_out_of_a_tokenizers_folder_is_refused_and_one_into_the_hubs_cache_is_not(
    tmp_path: Path,
) -> None:
    snapshot = tokenizer_folder(tmp_path / "models--a--b/snapshots/0123")
    (tmp_path / "models--a--b/blobs").mkdir()
    (tmp_path / "models--a--b/blobs/77").write_text("{{ messages }}")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/77")
    assert open_tokenizer("HuggingFaceTokenizer", model=snapshot).companions == {  # type: ignore[attr-defined]
        "chat_template.jinja": b"{{ messages }}"
    }
    (tmp_path / "id_rsa").write_text("secret")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(
        FormatError, match=r"chat_template.jinja: is a link out of its folder: found .*id_rsa"
    ):
        open_tokenizer("HuggingFaceTokenizer", model=snapshot)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", "rubbish", "generation_config.json: is not JSON"),
        ("generation_config.json", "[]", "generation_config.json: content: found list, wanted a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not JSON"),
        ("chat_template.jinja", "a" * 16_000_001, "size in bytes: found 16000001, wanted at most 16000000"),
    ],
)
def test_a_file_beside_a_tokenizer_is_small_and_what_its_name_says(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    folder = tokenizer_folder(tmp_path / "hf")
    (folder / name).write_text(content)
    with pytest.raises(FormatError, match=message):
        open_tokenizer("HuggingFaceTokenizer", model=folder)


def test_a_panic_of_the_tokenizers_library_is_one_line(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "hf")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match="tokenizer.json: not a tokenizer.json"):
        open_tokenizer("HuggingFaceTokenizer", model=folder)


def header_file(path: Path, text: bytes, numbers: int = 4) -> Path:
    """Write a safetensors file with this header."""
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(numbers))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', "the key 'a' twice"),
        (b'{"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', "the key 'dtype' twice"),
        (
            '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.encode("utf-16"),
            "is not a safetensors file",
        ),
        (b"\xef\xbb\xbf" + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "BOM"),
        (
            b'{"a":{"dtype":"F32","shape":[' + b"1," * 99_999 + b'1],"data_offsets":[0,4]}}',
            "100000 dimensions, more than 64",
        ),
    ],
    ids=["two tensors", "two dtypes", "UTF-16", "BOM", "dimensions"],
)
def test_a_safetensors_header_is_what_the_format_allows(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        safetensors_io.read_header(header_file(tmp_path / "a.safetensors", text))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["initializer_range", "layer_norm_epsilon"])
def test_a_number_that_is_no_float_is_refused(small_gpt: ModelSpec, key: str) -> None:
    config = {**config_json.from_spec(small_gpt, "x"), key: 10**400}
    with pytest.raises(FormatError, match="not a number"):
        config_json.to_spec(config, "hf/config.json")
