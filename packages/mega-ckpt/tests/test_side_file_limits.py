"""Links and sizes of the side files of an untrusted folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.bigscience import format as bigscience_format
from mega_ckpt.formats.fairseq import dictionary as fairseq_dictionary
from mega_ckpt.formats.fairseq import format as fairseq_format
from mega_ckpt.formats.huggingface import folder as hf_folder
from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.llama2c import tokenizer as llama2c_tokenizer
from mega_ckpt.formats.megatron.run_dir import find_checkpoint_dir
from mega_ckpt.formats.meta import format as meta_format
from mega_ckpt.formats.torch_dist import format as torch_dist_format
from mega_schema.checkpoint.foreign_files import (
    MAX_COMPANION_BYTES,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    read_foreign,
)
from mega_schema.errors import FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer

Read = Callable[[Path, ModelSpec], object]


def of_hugging_face(folder: Path, spec: ModelSpec) -> object:
    return hf_folder.read_tokenizer(folder, spec)


# every file that is read whole: what reads it, which others have to be there, and the most bytes it may have
READERS: dict[str, tuple[str, Read, tuple[str, ...], int]] = {
    "hf tokenizer.json": ("tokenizer.json", of_hugging_face, (), MAX_TOKENIZER_BYTES),
    "hf vocab.json": ("vocab.json", of_hugging_face, ("merges.txt",), MAX_TOKENIZER_BYTES),
    "hf merges.txt": ("merges.txt", of_hugging_face, ("vocab.json",), MAX_TOKENIZER_BYTES),
    "hf tokenizer.model": ("tokenizer.model", of_hugging_face, (), MAX_TOKENIZER_BYTES),
    "hf config.json": ("config.json", lambda f, _: hf_folder.open_hf_folder(f), (), MAX_JSON_BYTES),
    "a tokenizer's folder": (
        "tokenizer.json",
        lambda f, _: open_tokenizer("HuggingFaceTokenizer", model=f),
        (),
        MAX_TOKENIZER_BYTES,
    ),
    "meta params.json": ("params.json", lambda f, _: meta_format.read(f, ReadOptions()), (), MAX_JSON_BYTES),
    "meta tokenizer.model": (
        "tokenizer.model",
        lambda f, s: meta_format._tokenizer(f, ReadOptions(), s),
        (),
        MAX_TOKENIZER_BYTES,
    ),
    "fairseq dict.txt": (
        "dict.txt",
        lambda f, _: fairseq_dictionary.id_order(f / "dict.txt", 9),
        (),
        MAX_TOKENIZER_BYTES,
    ),
    "fairseq encoder.json": (
        fairseq_format._TOKENIZERS[0][0],
        lambda f, s: fairseq_format._tokenizer(f, ReadOptions(), s),
        (fairseq_format._TOKENIZERS[0][1],),
        MAX_TOKENIZER_BYTES,
    ),
    "fairseq vocab.bpe": (
        fairseq_format._TOKENIZERS[0][1],
        lambda f, s: fairseq_format._tokenizer(f, ReadOptions(), s),
        (fairseq_format._TOKENIZERS[0][0],),
        MAX_TOKENIZER_BYTES,
    ),
    "llama2c tokenizer.bin": (
        "tokenizer.bin",
        lambda f, _: llama2c_tokenizer.find_tokenizer(f / "model.bin", 9),
        (),
        MAX_TOKENIZER_BYTES,
    ),
    "bigscience latest": ("latest", lambda f, _: bigscience_format._folder(f), (), MAX_COMPANION_BYTES),
    "megatron's tracker": (
        "latest_checkpointed_iteration.txt",
        lambda f, _: find_checkpoint_dir(f, lambda _: False, "files"),
        (),
        MAX_COMPANION_BYTES,
    ),
    "torch_dist metadata.json": (
        "metadata.json",
        lambda f, _: torch_dist_format._check_backends(f),
        (),
        MAX_JSON_BYTES,
    ),
}


@pytest.mark.parametrize("case", READERS)
def test_a_link_out_of_the_folder_is_not_read(tmp_path: Path, small_gpt: ModelSpec, case: str) -> None:
    name, read, others, _ = READERS[case]
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "private").write_text("secret")
    (folder / name).symlink_to(tmp_path / "private")
    for neighbour in others:
        (folder / neighbour).touch()
    with pytest.raises(FormatError, match="is a link out of its folder: found .*private") as refused:
        read(folder, small_gpt)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("case", READERS)
def test_a_file_larger_than_any_such_file_is_not_read(
    tmp_path: Path, small_gpt: ModelSpec, case: str
) -> None:
    name, read, others, most = READERS[case]
    for neighbour in others:
        (tmp_path / neighbour).touch()
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, most + 1)  # no byte of it is on the disk
    with pytest.raises(FormatError, match=f"size in bytes: found {most + 1}, wanted at most {most}"):
        read(tmp_path, small_gpt)


def test_a_link_within_the_folder_or_into_the_hubs_cache_is_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").mkdir()
    (tmp_path / "models--a--b/blobs/77").write_text("blob")
    (snapshot / "here").write_text("beside")
    (snapshot / "a").symlink_to("../../blobs/77")
    (snapshot / "b").symlink_to("here")
    assert [read_foreign(snapshot / name, 99) for name in "ab"] == [b"blob", b"beside"]
    with pytest.raises(FileNotFoundError):
        read_foreign(snapshot / "c", 99)
    os.mkfifo(snapshot / "d")
    with pytest.raises(FormatError, match="d: is not a file"):
        read_foreign(snapshot / "d", 99)


def test_weights_may_be_links(hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, mega: Any) -> None:
    folder = hf_folder(small_gpt)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    result = mega("inspect", folder, "--json")
    assert json.loads(result.output)["format"] == "hf"
