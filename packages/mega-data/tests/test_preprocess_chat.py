"""Conversations become context and turns of the assistant, as the chat template and the tokenizer say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from mega_data.chat.template import SpecialTokenParser, TemplateError, TurnTemplate
from mega_data.cli import commands
from mega_schema.app.cli_runner import run_command
from mega_schema.dataset.indexed_dataset import open_dataset
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.fast import FastTokenizer
from mega_schema.tokenizer.tokenizer import open_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Two."},
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small tokenizer with the special tokens and the template of ChatML."""
    folder = tmp_path_factory.mktemp("tokenizer")
    lines = folder / "text.jsonl"
    lines.write_text(json.dumps({"text": "Yes, one or two? Be brief. user assistant system " * 3}) + "\n")
    arguments = ["train-tokenizer", "--input", str(lines), "--vocab-size", "280", "--output"]
    with pytest.raises(SystemExit):
        run_command(commands, [*arguments, str(folder / "base")])
    library = Library.from_file(str(folder / "base/tokenizer.json"))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    chat = folder / "chat"
    chat.mkdir()
    library.save(str(chat / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (chat / "tokenizer_config.json").write_text(json.dumps(config))
    return chat


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> FastTokenizer:
    opened = open_tokenizer("HuggingFaceTokenizer", model=tokenizer_folder)
    assert isinstance(opened, FastTokenizer)
    return opened


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("a", 5), ("b", 3)):
        rows = [{"messages": CHAT[: 3 + 2 * (number % 2)]} for number in range(count)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def encode(folder: Path, prefix: str, *words: str, code: int = 0) -> None:
    arguments = ["preprocess-chat", "--tokenizer-model", str(folder), "--output-prefix", prefix, *words]
    with pytest.raises(SystemExit) as end:
        run_command(commands, arguments)
    assert end.value.code == code


@pytest.mark.usefixtures("chats")
def test_sequences_alternate_between_context_and_the_assistants_turns(tokenizer_folder, tokenizer, capfd):
    encode(tokenizer_folder, "out", "--input", "a.jsonl", "b.jsonl")
    data = open_dataset(Path("out_chat_document"))
    assert len(data.documents) - 1 == 8
    assert data.documents.tolist()[:3] == [0, 2, 6]
    texts = [tokenizer.decode(data[sequence]) for sequence in range(2, 6)]
    assert texts == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "Yes, one.<|im_end|>\n",
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
        "Two.<|im_end|>\n",
    ]
    assert data.info is not None
    assert set(data.info.options["chat"]) == {"template_sha256"}
    assert data.info.sources == ("a.jsonl", "b.jsonl")
    turns = sum(map(int, data.lengths[1::2]))  # every document has an even number of sequences
    printed = capfd.readouterr().out
    assert f"{data.tokens:,} tokens, {turns:,} of them with a loss" in printed
    assert not Path("out_chat_document.work").exists()


@pytest.mark.usefixtures("chats")
def test_workers_and_a_run_in_parts_write_the_same_bytes(tokenizer_folder):
    words = ("--input", "a.jsonl", "b.jsonl")
    encode(tokenizer_folder, "single", *words)
    encode(tokenizer_folder, "two", *words, "--workers", "2")
    encode(tokenizer_folder, "parts", *words, "--stage", "encode:1")
    assert not Path("parts_chat_document.idx").exists()
    encode(tokenizer_folder, "parts", *words)
    for suffix in (".bin", ".idx", ".json"):
        contents = {Path(f"{name}_chat_document{suffix}").read_bytes() for name in ("single", "two", "parts")}
        assert len(contents) == 1


def test_special_tokens_in_a_message_stay_text(tokenizer):
    parser = SpecialTokenParser(tokenizer)
    messages = [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "c"}]
    protected, marker = parser.protect(messages)
    parts = [parser.encode(text, marker) for text in TurnTemplate(CHATML, tokenizer).split_turns(protected)]
    end = parser.encode("<|im_end|>", marker)
    assert len(end) == 1
    assert parts[0].count(end[0]) == 1
    assert tokenizer.decode(parts[0]).startswith("<|im_start|>user\na <|im_end|> b<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{{ loop.last }}{% endfor %}", "depends on later messages"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_cannot_be_split_or_is_unsafe_is_refused(tokenizer, source, message):
    with pytest.raises(TemplateError, match=message):
        TurnTemplate(source, tokenizer).split_turns(CHAT)


def test_marks_of_generated_text_are_accepted(tokenizer):
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{%- endgeneration -%}")
    plain, with_marks = (TurnTemplate(source, tokenizer).split_turns(CHAT) for source in (CHATML, marked))
    assert plain == with_marks


@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("wrong", "a.jsonl:1: not JSON"),
        ('{"text": "x"}', "a.jsonl:1: no messages under 'messages': found text"),
        ('{"messages": [{"role": "user"}]}', "a.jsonl:1: message 1 is no text"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "no message of the assistant: found user",
        ),
        ('{"messages": []}', "a.jsonl:1: no message of the assistant: found no message"),
    ],
)
def test_a_line_that_is_no_conversation_ends_the_run_or_is_skipped(line, message, tokenizer_folder, capfd):
    Path("a.jsonl").write_text(line + "\n" + json.dumps({"messages": CHAT}) + "\n")
    encode(tokenizer_folder, "out", "--input", "a.jsonl", code=2)
    assert message in capfd.readouterr().err
    assert not list(Path().glob("out*"))
    encode(tokenizer_folder, "out", "--input", "a.jsonl", "--on-error", "skip")
    assert "note: 1 conversation was skipped" in capfd.readouterr().err
    assert len(open_dataset(Path("out_chat_document")).documents) == 2


@pytest.mark.usefixtures("chats")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--chat-template broken.jinja", "--chat-template: is not a Jinja template: found line 1"),
        ("--json-key chat", "a.jsonl:1: no messages under 'chat'"),
        ("--tokenizer-model plain", "--chat-template: the tokenizer has no chat template"),
        ("--tokenizer-type NullTokenizer", "--vocab-size"),
        ("--max-errors 5", "--max-errors: has no effect without --on-error skip"),
    ],
)
def test_a_wrong_option_is_refused(words, message, tokenizer_folder, capfd):
    Path("broken.jinja").write_text("{% for %}")
    Path("plain").mkdir()
    Path("plain/tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    encode(tokenizer_folder, "out", "--input", "a.jsonl", *words.split(), code=2)
    assert message in capfd.readouterr().err
    assert not list(Path().glob("out*"))


@pytest.mark.usefixtures("chats")
def test_no_conversation_is_left(tokenizer_folder):
    Path("a.jsonl").write_text("{}\n")
    encode(tokenizer_folder, "out", "--input", "a.jsonl", "--on-error", "skip", code=1)
    assert not Path("out_chat_document.idx").exists()


def test_without_jinja_the_package_to_install_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"needs jinja2; hint: pip install .*mega-data\[chat\]"):
        TurnTemplate(CHATML, tokenizer)
