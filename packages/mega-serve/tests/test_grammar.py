"""Texts of a random model under a grammar match it; hostile grammars are refused in one line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer
from mega_serve.engine.detokenizer import Detokenizer
from mega_serve.engine.grammar import GrammarCompiler, GrammarError
from mega_serve.engine.grammar_checker import CPU_SECONDS
from mega_serve.engine.interfaces import SamplingRow
from mega_serve.engine.requests import GrammarSpec, SamplingParams
from mega_serve.engine.token_bytes import list_token_bytes
from mega_serve.execution.sampler import BatchSampler
from tests.serving.grammar_texts import accepts
from tests.serving.sentencepiece_model import train_sentencepiece
from tests.shared_data import require_shared

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "gpt2"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "bytes":
        tokenizer: Tokenizer = request.getfixturevalue("tokenizer")
        return tokenizer
    if request.param == "sentencepiece":
        return train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))
    path = require_shared() / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
    return open_tokenizer("HuggingFaceTokenizer", model=path)


@pytest.fixture(scope="module")
def compiler(any_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(any_tokenizer)


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer)
    compiler.start()
    yield compiler
    compiler.close()


def generate(tokenizer: Tokenizer, compiler: GrammarCompiler, spec: GrammarSpec, seed: int) -> str:
    """Sample a text from random logits until the grammar is finished or the end-of-document comes."""
    size = tokenizer.identity.vocab_size
    eod = tokenizer.identity.eod
    sampler = BatchSampler(size, eod)
    state = compiler.compile(spec)
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=400)
    ids: list[int] = []
    for position in range(400):
        row = SamplingRow(
            params=params,
            prompt_token_ids=(),
            output_token_ids=ids,
            sequence_index=0,
            position=position,
            seed=seed,
            top_p=1.0,
            grammar=state,
        )
        token = sampler.sample(torch.randn(1, size, generator=generator), [row])[0]
        assert token.error is None
        state.accept(token.token_id)
        if token.token_id == eod:
            break
        ids.append(token.token_id)
        if state.is_finished:
            break
    # SentencePiece strips a space that begins a text, so the text follows a prompt
    prompt = tokenizer.encode("x")
    detokenizer = Detokenizer(tokenizer, prompt)
    text, _ = detokenizer.append(ids)
    return text + detokenizer.flush()


def test_a_schema_forces_json_that_matches_it(any_tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    spec = GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA))
    for seed in range(12):
        value = json.loads(generate(any_tokenizer, compiler, spec, seed))
        assert list(value) == ["name", "age", "tags"]
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 12
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 150
        assert len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"a", "b", "é"}


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-f]{3,5}-[0-9]{2}(\n|é)", r"[a-f]{3,5}-[0-9]{2}(\n|é)"),
        ("choice", '["yes", "no", "yes, but (maybe)", "日本"]', r"yes|no|yes, but \(maybe\)|日本"),
        ("lark", 'start: "(" start ")" | "x"', r"\(*x\)*"),
    ],
)
def test_texts_match_their_grammar(
    any_tokenizer: Tokenizer, compiler: GrammarCompiler, kind: Any, text: str, pattern: str
) -> None:
    for seed in range(6):
        output = generate(any_tokenizer, compiler, GrammarSpec(kind=kind, text=text), seed)
        assert re.fullmatch(pattern, output), output
        if kind == "lark":
            assert output.count("(") == output.count(")")


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=add>", "schema": ADD, "end": "</f>"},
        {"begin": '<f="é\\\n>', "end": ""},
        {"begin": "[[", "schema": {"type": "string"}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}


FORMAT = {
    "type": "triggered_tags",
    "triggers": TAGS["triggers"],
    "tags": [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure.get("schema", True)},
            "end": structure["end"],
        }
        for structure in TAGS["structures"]
    ],
    "at_least_one": False,
}


@pytest.mark.parametrize(
    "tag", [TAGS, {"type": "structural_tag", "format": FORMAT}], ids=["vllm", "xgrammar"]
)
@pytest.mark.parametrize(
    ("text", "accepted", "may_stop"),
    [
        ("", "", True),
        ("free text, <f and [ too", "free text, <f and [ too", True),
        ('x <f=add>{"a":1}</f> y <f=add>{ "a": 2}</f>[["q"]] z', None, True),
        ('<f="é\\\n>[1,2]', None, True),
        ("<f=", None, False),
        ('<f=add>{"a":1}', None, False),
        ('<f=add>{"b":1}', '<f=add>{"', False),
        ("so <f=mul>", "so <f=", False),
        ("[[5]]", "[[", False),
    ],
)
def test_structures_follow_their_triggers_in_free_text(
    tokenizer: Tokenizer,
    checker: GrammarCompiler,
    text: str,
    accepted: str | None,
    may_stop: bool,
    tag: dict[str, Any],
) -> None:
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(tag))
    checker.validate(spec)
    state = checker.compile(spec)
    ids = []
    for token in tokenizer.encode(text):  # ids of single bytes
        before = state.may_stop
        try:
            state.accept(token)
        except GrammarError:
            assert not before
            break
        ids.append(token)
    else:
        assert state.may_stop == may_stop
    assert tokenizer.decode(ids) == (text if accepted is None else accepted)


def test_json_object_allows_objects_only(any_tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    state = compiler.compile(GrammarSpec(kind="json_object"))
    mask = np.zeros(-(-any_tokenizer.identity.vocab_size // 32), np.int32)
    state.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: any_tokenizer.identity.vocab_size]
    tokens = list_token_bytes(any_tokenizer).tokens
    assert bits.any()
    assert all(tokens[i].lstrip()[:1] in (b"{", b"") for i in np.flatnonzero(bits))
    assert not state.may_stop


def test_bytes_of_ids_join_to_the_text(any_tokenizer: Tokenizer) -> None:
    tokens = list_token_bytes(any_tokenizer)
    rng = random.Random(4)
    for text in ("hello world", "naïve 😀 日本", "a\n\tb  c"):
        ids = any_tokenizer.encode(text)
        assert b"".join(tokens.tokens[i] for i in ids).decode().strip() == any_tokenizer.decode(ids).strip()
    assert len(tokens.tokens) == any_tokenizer.identity.vocab_size
    assert any_tokenizer.identity.eod in tokens.special_ids
    assert rng.choice([i for i, token in enumerate(tokens.tokens) if token == b"a"]) not in tokens.special_ids


def test_an_id_that_the_grammar_excludes_is_an_error(tokenizer: Tokenizer) -> None:
    state = GrammarCompiler(tokenizer).compile(GrammarSpec(kind="regex", text="a"))
    with pytest.raises(GrammarError):
        state.accept(tokenizer.encode("b")[0])


def test_a_copy_goes_on_by_itself(tokenizer: Tokenizer) -> None:
    state = GrammarCompiler(tokenizer).compile(GrammarSpec(kind="regex", text="ab"))
    fork = state.copy()
    for letter in tokenizer.encode("ab"):
        state.accept(letter)
    assert state.is_finished
    assert not fork.is_finished


def test_ids_have_no_text_with_a_null_tokenizer() -> None:
    with pytest.raises(RequestError, match="has no text"):
        GrammarCompiler(open_tokenizer("NullTokenizer", vocab_size=100))


SLOW_SCHEMA = {"type": "integer", "multipleOf": 123456789}


def tag_text(structures: Any, triggers: Any) -> str:
    return json.dumps({"structures": structures, "triggers": triggers})


HOSTILE: list[tuple[Any, str]] = [
    ("regex", "(a"),
    ("regex", r"(a)\1"),
    ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    ("regex", "a?" * 1000 + "a" * 1000),
    ("regex", "(a?){1,5000}a{5000}"),
    ("regex", "\ud800"),
    ("regex", "x" * 70_000),
    ("regex", "|".join(f"a{i}.*b" for i in range(5500))),
    ("lark", ""),
    ("lark", "start: missing"),
    ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    ("lark", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "a"'),
    ("json_schema", "{"),
    ("json_schema", "[" * 50_000 + "]" * 15_000),
    ("json_schema", '{"items":' * 5_000 + "{}" + "}" * 5_000),
    ("json_schema", '{"type": "nonsense"}'),
    ("json_schema", "false"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    ("json_schema", '{"$ref": "http://example.invalid/schema.json"}'),
    ("json_schema", '{"type": "integer", "multipleOf": 123456789}'),
    ("json_schema", json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]})),
    ("json_schema", json.dumps({"properties": {f"k{i}": {"type": "integer"} for i in range(2500)}})),
    ("choice", "[]"),
    ("choice", '["a", 1]'),
    ("choice", "[" * 60_000),
    ("nonsense", "a"),
    ("structural_tag", "a"),
    ("structural_tag", "[]"),
    ("structural_tag", "[" * 60_000),
    ("structural_tag", tag_text([], ["<"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": ""}], [])),
    ("structural_tag", tag_text([{"begin": "<a>"}], ["<"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": "", "grammar": "x"}], ["<"])),
    ("structural_tag", tag_text([{"begin": "a", "end": ""}], ["<"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": ""}], ["<", "<a"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": ""}], ["<", "<"])),
    ("structural_tag", tag_text([{"begin": "<\ud800>", "end": ""}], ["<"])),
    ("structural_tag", tag_text([{"begin": "<" * 257, "end": ""}], ["<"])),
    ("structural_tag", tag_text([{"begin": f"<{i}>", "end": ""} for i in range(129)], ["<"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": "", "schema": {"type": "nonsense"}}], ["<"])),
    ("structural_tag", tag_text([{"begin": "<a>", "end": "", "schema": SLOW_SCHEMA}], ["<"])),
    ("structural_tag", '{"format": 5}'),
    ("structural_tag", '{"format": {"type": "any_text"}}'),
    ("structural_tag", '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [5]}}'),
    ("structural_tag", '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<"}]}}'),
    (
        "structural_tag",
        '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [], "excludes": []}}',
    ),
    (
        "structural_tag",
        '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [], "at_least_one": true}}',
    ),
]
EXPENSIVE: list[tuple[Any, str]] = [
    ("regex", "(a+)+b"),
    ("regex", "(x{1,1000}){1,1000}"),
    ("regex", "(a|b)*a(a|b){20}"),
    ("json_schema", json.dumps({"type": "object", "properties": {"next": {"$ref": "#"}}})),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 100_000})),
    ("lark", 'start: a\na: (b{1,100}){1,100}\nb: ("x"{1,100}){1,100}'),
]


@pytest.mark.parametrize(("kind", "text"), HOSTILE)
def test_a_hostile_grammar_is_refused_in_one_line(checker: GrammarCompiler, kind: Any, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        checker.validate(GrammarSpec(kind=kind, text=text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", '{"$ref": "#"}'), ("lark", "start: start"), ("regex", r"[^\x00-\U0010ffff]")],
)
def test_a_grammar_without_any_text_is_named_so(checker: GrammarCompiler, kind: Any, text: str) -> None:
    with pytest.raises(RequestError, match=f"^{kind}: no text matches it$"):
        checker.validate(GrammarSpec(kind=kind, text=text))


@pytest.mark.parametrize(("kind", "text"), EXPENSIVE)
def test_a_grammar_that_looks_expensive_is_accepted(checker: GrammarCompiler, kind: Any, text: str) -> None:
    checker.validate(GrammarSpec(kind=kind, text=text))


def test_the_checker_answers_after_a_fork_was_killed(checker: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=f"takes more than {CPU_SECONDS * 1000:.0f} ms"):
        checker.validate(GrammarSpec(kind="json_schema", text='{"type": "integer", "multipleOf": 123456789}'))
    checker.validate(GrammarSpec(kind="regex", text="a"))


def test_the_checker_starts_again_after_its_child_ended(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    try:
        compiler.validate(GrammarSpec(kind="regex", text="a"))
        compiler.close()
        compiler.validate(GrammarSpec(kind="regex", text="b"))
    finally:
        compiler.close()


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json_may_be_indented_but_cannot_be_blanks_for_ever(
    checker: GrammarCompiler, tokenizer: Tokenizer, kind: Any
) -> None:
    spec = GrammarSpec(kind=kind, text='{"type": "object"}')
    assert accepts(checker, tokenizer, spec, '{\n  "a": {\n    "b": [1, 2]\n  }\n}')
    assert accepts(checker, tokenizer, spec, '{"a":1}')
    assert not accepts(checker, tokenizer, spec, "{\n\n")
    assert not accepts(checker, tokenizer, spec, "{" + " " * 17)
