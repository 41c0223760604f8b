"""`mega-train --sft` reads the conversations of `mega-data preprocess-chat` with their loss mask."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

from mega_data.cli import commands
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import open_dataset
from mega_schema.errors import ConfigError, FormatError
from mega_train.config import DataConfig
from mega_train.data.sft import (
    EXAMPLE,
    LEARNT,
    POSITION,
    TOKEN,
    ChatExamples,
    PackedSftDataset,
    open_examples,
)

# a token for each word: user 0, assistant 1, one 2, two 3, three 4, <end> 5
WORDS = ("user", "assistant", "one", "two", "three")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
CHATS = [
    [("user", "one two"), ("assistant", "three")],
    [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "one two")],
]
TOKENS = [[0, 2, 3, 5, 1, 4, 5], [0, 2, 5, 1, 3, 5, 0, 4, 5, 1, 2, 3, 5]]
MASKS = [[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    library = Library(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<end>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    (tmp_path / "chats.jsonl").write_text(lines)
    words = ["--input", str(tmp_path / "chats.jsonl"), "--output-prefix", str(tmp_path / "chats")]
    with pytest.raises(SystemExit) as end:
        run_command(commands, ["preprocess-chat", *words, "--tokenizer-model", str(folder)])
    assert end.value.code == 0
    return tmp_path / "chats"


def test_only_the_assistants_turns_have_a_loss(prefix: Path) -> None:
    examples = open_examples(DataConfig(sft=True, path=(str(prefix),)))
    assert isinstance(examples, ChatExamples)
    assert (len(examples), examples.eod) == (2, 5)
    assert examples.tokenizer is not None
    for number, (tokens, mask) in enumerate(zip(TOKENS, MASKS, strict=True)):
        ids, learnt = examples.read_example(number)
        assert ids.tolist() == tokens
        assert learnt.tolist() == mask
        assert examples.example_lengths[number] == len(tokens)


def test_conversations_are_packed_whole_with_their_mask(prefix: Path) -> None:
    examples = open_examples(DataConfig(sft=True, path=(str(prefix),)))
    packed = PackedSftDataset(examples, (0, 2), length=23, rows=1, seed=1, name="the training split")
    row = packed[0]
    order = packed.order[: packed.ends[0]].tolist()
    tokens = np.concatenate([TOKENS[number] for number in order])
    assert row[TOKEN].tolist() == [*tokens, *[5] * (24 - len(tokens))]
    assert row[LEARNT].tolist() == [*np.concatenate([MASKS[number] for number in order]), *[0] * 4]
    lengths = [len(TOKENS[number]) for number in order]
    assert row[EXAMPLE].tolist() == np.repeat([0, 1, 2], [*lengths, 4]).tolist()
    assert row[POSITION].tolist() == [i for length in (*lengths, 4) for i in range(length)]


def test_a_dataset_of_text_is_no_dataset_of_conversations(prefix: Path) -> None:
    path = prefix.with_name("chats_chat_document.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "options": {}}))
    with pytest.raises(FormatError, match="has no option 'chat'.*hint: mega-data preprocess-chat"):
        ChatExamples(prefix)


def test_a_prefix_of_conversations_and_of_prompts_is_refused(prefix: Path) -> None:
    for suffix in (".idx", ".bin"):
        source = open_dataset(prefix.with_name("chats_chat_document")).prefix
        prefix.with_name(f"chats_prompt_document{suffix}").write_bytes(
            source.with_name(source.name + suffix).read_bytes()
        )
    with pytest.raises(ConfigError, match="--data-path: names conversations and prompts"):
        open_examples(DataConfig(sft=True, path=(str(prefix),)))
