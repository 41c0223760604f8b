"""What prune removes, and what a tokenizer is for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.hf_tokenizer import export
from mega_schema.checkpoint import Checkpoint, latest_iteration
from mega_schema.errors import ConfigError, FormatError
from mega_schema.run_folder import LATEST, iterations
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer import open_tokenizer


@pytest.fixture
def run(run_folder: Any, small_gpt: ModelSpec) -> Path:
    for iteration in (10, 20, 30, 40, 50):
        made: Path = run_folder(small_gpt, iteration=iteration)
    return made


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (("--keep-last", 2), [40, 50]),
        (("--keep-last", 1), [50]),
        (("--keep-last", 9), [10, 20, 30, 40, 50]),
        (("--keep-every", 20), [20, 40, 50]),
        (("--keep-last", 2, "--keep-every", 30), [30, 40, 50]),
    ],
)
def test_the_newest_and_the_divided_stay(
    mega: Any, run: Path, flags: tuple[Any, ...], kept: list[int]
) -> None:
    size = sum(f.stat().st_size for f in (run / "iter_0000010").rglob("*") if f.is_file())
    told = json.loads(mega("prune", run, *flags, "--json", "--dry-run").output)
    assert iterations(run) == [10, 20, 30, 40, 50]
    done = json.loads(mega("prune", run, *flags, "--json").output)
    assert iterations(run) == kept == done["kept"]
    assert {**done, "dry_run": True} == told
    assert done["removed"] == [i for i in (10, 20, 30, 40, 50) if i not in kept]
    assert done["bytes"] == size * len(done["removed"])
    assert latest_iteration(run) == 50


def test_the_one_the_tracker_names_is_the_newest(mega: Any, run: Path) -> None:
    (run / LATEST).write_text("30\n", "utf-8")
    assert mega("prune", run, "--keep-last", 1).output == (
        f"{run}: removed 2 (10, 20): {_size(run / 'iter_0000030') * 2:,} bytes\n{run}: kept 3 (30, 40, 50)\n"
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_nothing_goes_while_the_newest_is_not_whole(mega: Any, run: Path) -> None:
    file = run / "iter_0000050" / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    done = mega("prune", run, "--keep-last", 1)
    assert isinstance(done.exception, FormatError)
    assert "iter_0000050/model-00000.safetensors: size in bytes" in str(done.exception)
    assert iterations(run) == [10, 20, 30, 40, 50]


def test_what_to_keep_has_to_be_said(mega: Any, run: Path) -> None:
    done = mega("prune", run)
    assert str(done.exception).endswith("hint: --keep-last 3")
    assert isinstance(done.exception, ConfigError)


@pytest.fixture
def with_letters(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> Checkpoint:
    """A checkpoint whose tokenizer has text."""
    vocab = {letter: number for number, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8, "ab": 9}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", "utf-8")
    tokenizer = open_tokenizer(
        "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
    )
    found = Checkpoint.open(run_folder(small_gpt))
    tokenizer.save(found.folder / "tokenizer")
    return found


def test_the_tokenizers_library_loads_what_was_exported(
    mega: Any, with_letters: Checkpoint, tmp_path: Path
) -> None:
    import tokenizers

    done = mega("export-tokenizer", with_letters.folder, "--save", tmp_path / "out")
    assert (
        done.output == f"{tmp_path / 'out'}: special_tokens_map.json, tokenizer.json, tokenizer_config.json\n"
    )
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert theirs.encode("abcab", add_special_tokens=False).ids == [9, 2, 9]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
    assert (config["eos_token"], config["model_max_length"]) == ("<|endoftext|>", 6)


def test_what_is_there_is_replaced_only_when_asked_and_only_a_tokenizer(
    with_letters: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(with_letters, out)
    with pytest.raises(ConfigError, match="--save: there is something already: .*--force"):
        export(with_letters, out)
    export(with_letters, out, force=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").write_text("years", "utf-8")
    with pytest.raises(ConfigError, match="holds something else than a tokenizer"):
        export(with_letters, tmp_path / "papers", force=True)
    assert (tmp_path / "papers" / "thesis").read_text("utf-8") == "years"


def test_what_hugging_face_has_not_is_refused(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    numbers = Checkpoint.open(run_folder(small_gpt))
    with pytest.raises(FormatError, match="Hugging Face has no such tokenizer: found NullTokenizer"):
        export(numbers, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for file in (numbers.folder / "tokenizer").iterdir():
        file.unlink()
    (numbers.folder / "tokenizer").rmdir()
    with pytest.raises(FormatError, match="tokenizer: the checkpoint has no tokenizer"):
        export(numbers, tmp_path / "out")
