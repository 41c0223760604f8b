"""Chat templates: Hugging Face's results, special tokens in messages, templates that attack the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mega_schema.errors import FormatError, RequestError
from mega_schema.tokenizer.tokenizer import FastTokenizer, Tokenizer
from mega_serve.api.chat_templates import ChatTemplate, find_chat_template, special_token_ids

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}
CHATML = (
    "{% for m in messages %}<|endoftext|>{{ m['role'] }}\n{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def open_template(tokenizer: Tokenizer) -> Iterator[Any]:
    """A function that makes a template; its process ends with the module."""
    templates = []

    def make(source: str, **options: Any) -> ChatTemplate:
        templates.append(ChatTemplate(source, tokenizer, **options))
        return templates[-1]

    yield make
    for template in templates:
        template.close()


def encode(template: ChatTemplate, *messages: dict[str, Any], **options: Any) -> tuple[str, list[int]]:
    return asyncio.run(template.encode(list(messages), **options))


def test_only_the_templates_special_tokens_become_ids(open_template: Any, tokenizer: Tokenizer) -> None:
    message = {"role": "user", "content": "a <|endoftext|> b"}
    text, ids = encode(open_template(CHATML), message)
    eod = tokenizer.identity.eod
    assert text == "<|endoftext|>user\na <|endoftext|> b\n<|endoftext|>assistant\n"
    assert ids == [eod, *tokenizer.encode("user\na <|endoftext|> b\n"), eod, *tokenizer.encode("assistant\n")]


@pytest.mark.parametrize("character", ["\ufdd0", "\ufdd1\ufdd0", "\ufffe", "<\ufdd0|endoftext|>"])
def test_a_noncharacter_in_a_message_stays(open_template: Any, tokenizer: Tokenizer, character: str) -> None:
    content = f"x{character}y"
    text, ids = encode(open_template("{{ messages[0].content }}"), {"role": "user", "content": content})
    assert text == content
    assert ids == tokenizer.encode(content)


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% if not loop.last %}|{% endif %}"
        "{% endfor %}",
        "{%- for m in messages %}\n    {{- m | tojson }}\n{%- endfor %}\n  "
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_text_is_that_of_transformers(open_template: Any, tokenizer: Tokenizer, source: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": " é ☃ \n"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    variables = {"eos_token": "<|endoftext|>", "bos_token": "", "pad_token": ""}
    expected, _ = utilities.render_jinja_template(
        [messages], chat_template=source, tools=tools, add_generation_prompt=True, **variables
    )
    assert encode(open_template(source), *messages, tools=tools)[0] == expected[0]


def test_the_last_message_can_be_continued(open_template: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert encode(open_template(CHATML), *messages, **options)[0].endswith("assistant\nThe answer")


def test_messages_that_the_template_refuses_are_refused_with_its_words(open_template: Any) -> None:
    template = open_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refused by the chat template: roles must alternate"):
        encode(template, USER)


# each takes a process; `make test` has an attack of each kind
SANDBOX = [
    pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", marks=pytest.mark.long),
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('id') }}",
    pytest.param("{{ raise_exception.__globals__['sys'].modules }}", marks=pytest.mark.long),
    pytest.param("{{ strftime_now.__code__ }}", marks=pytest.mark.long),
    pytest.param("{{ messages.__class__.__base__.__subclasses__() }}", marks=pytest.mark.long),
    pytest.param("{{ (messages | attr('__class__')).__mro__ }}", marks=pytest.mark.long),
    "{{ '{0.__class__}'.format(messages) }}",
    pytest.param("{{ '%s'.__mod__.__self__.__class__ }}", marks=pytest.mark.long),
    pytest.param("{{ lipsum.__globals__ }}", marks=pytest.mark.long),
    pytest.param("{{ namespace.__init__.__globals__ }}", marks=pytest.mark.long),
    "{{ messages.append(1) }}",
    pytest.param("{{ messages[0].update(a=1) }}", marks=pytest.mark.long),
    "{% include '/etc/passwd' %}",
    pytest.param("{% import 'os' as os %}{{ os }}", marks=pytest.mark.long),
    pytest.param("{% extends 'x' %}", marks=pytest.mark.long),
    "{{ open('/etc/passwd').read() }}",
    pytest.param("{{ range(1000000000) | list }}", marks=pytest.mark.long),
    "{{ [0] * 100000000000 }}",
    pytest.param("{{ 'a' * 10000000000 }}", marks=pytest.mark.long),
    pytest.param("{{ 'a' | center(10000000000) }}", marks=pytest.mark.long),
    "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    pytest.param("{{ 9 ** (9 ** 9) }}", marks=pytest.mark.long),
]


@pytest.mark.parametrize("source", SANDBOX)
def test_a_hostile_template_gets_an_error_and_nothing_else(open_template: Any, source: str) -> None:
    template = open_template(source, render_seconds=1.0, start_seconds=3.0)
    try:
        text, _ = encode(template, USER)
    except RequestError:
        return
    finally:
        template.close()
    # the sandbox replaces an attribute that it hides by an undefined value, which is empty
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{% for i in range(99999) %}{% endfor %}"
            "{{ f(1) }}",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "{% set ns = namespace(x=3) %}"
            "{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_template_without_end_holds_neither_the_loop_nor_the_next_request(
    open_template: Any, source: str
) -> None:
    template = open_template(source, render_seconds=0.5)

    async def exchange() -> float:
        longest = 0.0
        task = asyncio.create_task(template.encode([USER]))
        while not task.done():
            start = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - start)
        with pytest.raises(RequestError):
            task.result()
        return longest

    start = time.monotonic()
    assert asyncio.run(exchange()) < 0.4
    assert time.monotonic() - start < 10
    with pytest.raises(RequestError):  # a process of its own again
        encode(template, USER)
    template.close()


def test_a_template_that_is_not_one_says_so_and_is_not_tried_again(open_template: Any) -> None:
    template = open_template("{% for %}")
    for _ in range(2):
        with pytest.raises(RequestError, match="chat template cannot be compiled: found line 1: "):
            encode(template, USER)
    assert template._process is None


def test_one_process_renders_many_conversations(open_template: Any) -> None:
    template = open_template(CHATML)
    encode(template, USER)
    process = template._process
    long = {"role": "user", "content": "é" * 300_000}
    assert len(encode(template, long)[0]) > 300_000
    encode(template, USER)
    assert template._process is process


def test_the_process_sees_nothing_of_the_servers_environment(
    open_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGA_SECRET", "x")
    template = open_template(CHATML)
    encode(template, USER)
    environment = Path(f"/proc/{template._process.pid}/environ").read_bytes()
    assert b"MEGA_SECRET" not in environment


class WithCompanions(FastTokenizer):
    """A tokenizer with companion files only."""

    def __init__(self, companions: dict[str, bytes]) -> None:
        self.companions = companions


@pytest.mark.parametrize(
    ("companions", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": b"{}"}, None),
        ({"tokenizer_config.json": b'{"chat_template": "x"}'}, "x"),
        ({"tokenizer_config.json": b'{"chat_template": "x"}', "chat_template.jinja": b"y"}, "y"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "t"},
                            {"name": "default", "template": "d"},
                        ]
                    }
                ).encode()
            },
            "{% if tools %}{{ '' }}t{{ '' }}{% else %}{{ '' }}d{{ '' }}{% endif %}",
        ),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "default", "template": "d"}]}'}, "d"),
    ],
)
def test_the_template_of_a_checkpoint_is_its_own_file_or_in_the_config(
    companions: dict[str, bytes], expected: str | None
) -> None:
    assert find_chat_template(WithCompanions(companions)) == expected


def test_templates_by_name_are_each_rendered_as_they_are(open_template: Any) -> None:
    plain = "\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n  "
    with_tools = "  \n{{ tools[0].function.name }} {% if 1 %}\n{% endif %}\n"
    entries = [{"name": "default", "template": plain}, {"name": "tool_use", "template": with_tools}]
    config = json.dumps({"chat_template": entries}).encode()
    source = find_chat_template(WithCompanions({"tokenizer_config.json": config}))
    assert source is not None
    for tools, single in ((None, plain), ([TOOL], with_tools)):
        values = {"messages": [USER], "tools": tools}
        assert open_template(source).render(values, 0.0) == open_template(single).render(values, 0.0)


@pytest.mark.parametrize(
    "companions",
    [
        {"chat_template.jinja": b"\xff"},
        {"tokenizer_config.json": b'{"chat_template": 5}'},
        {"tokenizer_config.json": b'{"chat_template": [5]}'},
        {"tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'},
        {"tokenizer_config.json": b'{"chat_template": [{"name": "rag", "template": "r"}]}'},
        {"tokenizer_config.json": b'{"chat_template": []}'},
    ],
)
def test_a_template_of_another_type_is_refused(companions: dict[str, bytes]) -> None:
    with pytest.raises(FormatError):
        find_chat_template(WithCompanions(companions))


def test_special_tokens_are_the_tokenizers(tokenizer: Tokenizer) -> None:
    assert special_token_ids(tokenizer) == {"<|endoftext|>": tokenizer.identity.eod}
