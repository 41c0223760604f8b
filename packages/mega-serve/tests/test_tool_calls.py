"""Tool calls that a grammar forces, parsed from every split of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mega_schema.errors import RequestError
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.grammar import GrammarCompiler, GrammarError
from mega_serve.engine.interfaces import SamplingRow
from mega_serve.engine.requests import SamplingParams
from mega_serve.engine.tool_calls import ToolCallParser, tool_grammar
from mega_serve.execution.sampler import BatchSampler

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/count"}},
                "required": ["city", "days"],
                "additionalProperties": False,
                "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
NESTED = '{"a":"}{\\"]","b":[1,{"c":null}]}'
TEXTS = [
    ('{"name":"f","arguments":{}}', [("f", "{}")]),
    (f'{{"name":"f","arguments":{NESTED}}}', [("f", NESTED)]),
    (
        '[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":[2]},{"name":"h","arguments":"x\\\\"}]',
        [("f", '{"a":1}'), ("g", "[2]"), ("h", '"x\\\\"')],
    ),
    (
        ' [ { "name" : "f" , "arguments" : 12 } , {"name":"g\\u00e9","arguments": {} } ] ',
        [("f", "12 "), ("gé", "{}")],
    ),
]


def join_calls(parts: Sequence[str]) -> tuple[list[tuple[str, str]], bool]:
    parser = ToolCallParser()
    calls: list[tuple[str, str]] = []
    for part in parts:
        for delta in parser.append(part):
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert parser.calls == len(calls)
    return calls, parser.is_complete


def test_a_forced_call_has_no_blanks(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    spec = tool_grammar(TOOLS, "required")
    text = '{"name":"weather","arguments":{"city":"Bern","days":2}}'
    state = compiler.compile(spec)
    for token in tokenizer.encode(text):
        state.accept(token)
    assert state.is_finished
    for start in ("{", '{"name":"weather",', '{"name":"weather","arguments":{', text[:-2]):
        state = compiler.compile(spec)
        for token in tokenizer.encode(start):
            state.accept(token)
        for blank in (" ", "\n", "\t"):
            with pytest.raises(GrammarError):
                state.copy().accept(tokenizer.encode(blank)[0])


@pytest.mark.parametrize(("text", "calls"), TEXTS)
def test_every_split_gives_the_same_calls(text: str, calls: list[tuple[str, str]]) -> None:
    assert join_calls([text]) == (calls, True)
    assert join_calls(list(text)) == (calls, True)
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert join_calls([text[:i], text[i:j], text[j:]]) == (calls, True)


@pytest.mark.parametrize(("text", "calls"), TEXTS[:3])
def test_a_text_that_was_cut_is_not_complete(text: str, calls: list[tuple[str, str]]) -> None:
    call_ends = [
        text.index(f'"arguments":{wanted}}}') + len(f'"arguments":{wanted}}}') for _, wanted in calls
    ]
    for end in range(len(text)):
        parsed, is_complete = join_calls([text[:end]])
        assert is_complete == any(text[i:end].strip(",]") == "" for i in call_ends if i <= end), text[:end]
        for (name, arguments), (wanted_name, wanted) in zip(parsed, calls, strict=False):
            assert name == wanted_name
            assert wanted.startswith(arguments)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolCallParser()
    assert parser.append('{"name":"f","arguments":') == []
    first = parser.append('{"a":')
    assert [(delta.index, delta.name, delta.arguments) for delta in first] == [(0, "f", '{"a":')]
    second = parser.append('"x"}}')
    assert [(delta.index, delta.name, delta.arguments) for delta in second] == [(0, None, '"x"}')]
    assert parser.append(" ") == []


def test_text_that_is_no_call_is_ignored() -> None:
    assert join_calls(["I cannot call a tool. " * 1000, '{"name":"f","arguments":{}}']) == ([], False)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_random_model_calls_the_tools(tokenizer: Tokenizer, choice: Any, parallel: bool) -> None:
    compiler = GrammarCompiler(tokenizer)
    size = tokenizer.identity.vocab_size
    spec = tool_grammar(TOOLS, choice, parallel=parallel)
    names = set[str]()
    for seed in range(6):
        state = compiler.compile(spec)
        sampler = BatchSampler(size, tokenizer.identity.eod)
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        while not state.is_finished:
            row = SamplingRow(
                params=SamplingParams(max_tokens=1),
                prompt_token_ids=(),
                output_token_ids=ids,
                sequence_index=0,
                position=len(ids),
                seed=seed,
                top_p=1.0,
                grammar=state,
            )
            ids.append(sampler.sample(torch.randn(1, size, generator=generator), [row])[0].token_id)
            state.accept(ids[-1])
        text = tokenizer.decode(ids)
        rng = random.Random(seed)
        cut = rng.randrange(len(text))
        calls, is_complete = join_calls([text[:cut], text[cut:]])
        assert is_complete
        assert parallel or len(calls) == 1
        for name, arguments in calls:
            names.add(name)
            value = json.loads(arguments)
            assert set(value) == ({"city", "days"} if name == "weather" else set())
            assert name != "weather" or 1 <= value["days"] <= 9
    assert names == ({"weather", "now"} if choice == "required" else {"weather"})


def test_a_tool_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match=r"tool_choice: no such tool: found 'x', wanted weather \| now"):
        tool_grammar(TOOLS, {"type": "function", "function": {"name": "x"}})
    with pytest.raises(RequestError, match="tools: empty"):
        tool_grammar([], "required")
    with pytest.raises(RequestError, match="tool_choice: has no grammar"):
        tool_grammar(TOOLS, "auto")
