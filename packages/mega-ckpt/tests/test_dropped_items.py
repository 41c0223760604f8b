"""Items of a Hugging Face folder that the target format cannot store are reported, and only those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.operations.convert import convert
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer, open_tokenizer_folder

WORDS = {"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4}


def tokenizer_files(folder: Path, **roles: str) -> Path:
    """Write a tokenizer.json of five words, and which of them end and begin a text."""
    folder.mkdir(exist_ok=True)
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"bos_token_id": 3, "eos_token_id": 4}, ()),
        ({"bos_token_id": 3, "eos_token_id": [4]}, ()),
        ({"bos_token_id": None, "pad_token_id": None}, ()),
        ({"eos_token_id": [4, 2]}, ("eos_token_id [4, 2]",)),
        ({"eos_token_id": 4, "pad_token_id": 0}, ("pad_token_id 0",)),
        ({"attn_pdrop": 0.1, "resid_pdrop": 0.0}, ("attn_pdrop 0.1", "resid_pdrop 0.0")),
        ({"attention_dropout": 0.2, "hidden_dropout": 0.0}, ("attention_dropout 0.2",)),
    ],
    ids=str,
)
@pytest.mark.parametrize("want", ["mega", "hf"])
def test_ids_and_dropout_that_are_not_carried_over_are_told(
    hf_folder: Any,
    small_gpt: ModelSpec,
    tmp_path: Path,
    config: dict[str, Any],
    left: tuple[str, ...],
    want: str,
) -> None:
    folder = tokenizer_files(hf_folder(small_gpt, config=config), bos_token="<s>", eos_token="</s>")
    result = convert(folder, tmp_path / "out", "hf", want)
    assert result.dropped == left
    if want == "hf" and "eos_token_id" in config and not left:
        assert json.loads((tmp_path / "out/config.json").read_bytes())["eos_token_id"] == 4


def test_without_a_tokenizer_the_ids_are_told_and_every_file_that_stays(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path, mega: Any
) -> None:
    folder = hf_folder(small_gpt, config={"bos_token_id": 3, "eos_token_id": 4})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    words = ("convert", "--from", "hf", "--to", "mega", "--load", folder, "--save")
    result = mega(*words, tmp_path / "a")
    assert result.stderr == "dropped: bos_token_id 3, eos_token_id 4, chat_template.jinja\n"
    tokenizer_files(folder, bos_token="<s>", eos_token="</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    result = mega(*words, tmp_path / "b", "--no-tokenizer")
    assert result.stderr == (
        "dropped: the tokenizer, bos_token_id 3, eos_token_id 4, generation_config.json\n"
    )


def test_ids_that_travel_in_a_generation_config_are_not_told(
    hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    folder = tokenizer_files(hf_folder(small_gpt, config={"eos_token_id": [4, 2]}), eos_token="</s>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    assert convert(folder, tmp_path / "a", "hf", "hf").dropped == ()
    assert json.loads((tmp_path / "a/generation_config.json").read_bytes())["eos_token_id"] == [4, 2]
    # one that repeats config.json is made anew, of the tokenizer's ids
    config = json.dumps({"_from_model_config": True, "eos_token_id": [4, 2]})
    (folder / "generation_config.json").write_text(config)
    assert convert(folder, tmp_path / "b", "hf", "hf").dropped == ("eos_token_id [4, 2]",)


@pytest.mark.parametrize("have", ["hf", "mega"])
def test_a_tokenizer_that_is_given_takes_the_place_of_the_models(
    hf_folder: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path, have: str
) -> None:
    tokenizer = tokenizer_files(tmp_path / "given", eos_token="b")
    load = tokenizer_files(hf_folder(small_gpt)) if have == "hf" else run_folder(small_gpt)
    want = "mega" if have == "hf" else "hf"
    result = convert(load, tmp_path / "out", have, want, reading=ReadOptions(tokenizer=tokenizer))
    assert "the tokenizer of --load" in result.dropped
    if want == "mega":
        assert open_tokenizer_folder(Checkpoint.open(tmp_path / "out").tokenizer_folder).identity.eod == 2
    else:
        assert open_tokenizer("HuggingFaceTokenizer", model=tmp_path / "out").identity.eod == 2
    with pytest.raises(ConfigError, match="--tokenizer: no such folder: found .*nowhere"):
        convert(load, tmp_path / "new", have, want, reading=ReadOptions(tokenizer=tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()
