"""Samples as BigScience's generate_samples_gpt.py makes them: from a file of prompts, or unconditional.

    {"id": "sample-8c1f...", "custom_id": "sample-0", "prompt": "...", "text": "...", "length": 12,
     "finished": true, "settings": {"out_seq_length": 64, "temperature": 1.0, ...}}

`text` is the continuation, `length` its tokens without the end-of-document token, `finished` whether that
token came, `settings` how it was drawn. Unlike there, a prompt that contains the word stop does not end the
run, and the last line of the file counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import orjson

from mega_schema.errors import FormatError, MegaError
from mega_serve.client.offline.batch_run import Line, WorkItem
from mega_serve.client.offline.resumable_lines import request_id
from mega_serve.engine.interfaces import EngineClient
from mega_serve.engine.requests import EngineRequest, SamplingParams

_EXAMPLE_LINE: Final = '{"prompt": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """How to sample; part of each request's hash.

    Attributes:
        out_seq_length: generated tokens, at most; the model's context limits them too.
        temperature: 0 is greedy.
        top_k: 0 keeps all words.
        top_p: 0 or 1 keeps all words.
        seed: each sample gets its own seed from this one and its number.
    """

    out_seq_length: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample to draw.

    Attributes:
        prompt: None for an unconditional sample, which begins with the end-of-document token.
    """

    number: int
    prompt: str | None


def read_sample_prompts(path: Path) -> list[str]:
    """Return the prompts: of JSON lines with "prompt" or "text" (*.jsonl), or else one a line.

    Raises:
        FormatError: a line has no prompt, or the file has none.
    """
    prompts = []
    is_json = path.suffix in (".jsonl", ".json")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if is_json:
                if line.strip():
                    prompts.append(_read_prompt(where, line))
                continue
            try:
                prompts.append(line.decode("utf-8").removesuffix("\n").removesuffix("\r"))
            except UnicodeDecodeError:
                raise FormatError(where, "is not UTF-8") from None
    if not prompts:
        wanted = f"{_EXAMPLE_LINE} on each line" if is_json else "a prompt on each line"
        raise FormatError(path, "has no prompts", wanted=wanted)
    return prompts


def sample_items(prompts: Sequence[str | None], settings: SampleSettings) -> list[WorkItem[Sample]]:
    """Return the work items of prompts, or of None for each unconditional sample."""
    values = asdict(settings)
    return [
        WorkItem(f"sample-{number}", request_id("sample-", [number, prompt, values]), Sample(number, prompt))
        for number, prompt in enumerate(prompts)
    ]


def settings_difference(line: Line, settings: SampleSettings) -> tuple[str, str] | None:
    """Return the options of an output line and those of this run, where they differ; None if none does."""
    earlier, present = line.get("settings"), asdict(settings)
    if not isinstance(earlier, dict) or earlier.keys() != present.keys():
        return None
    names = [name for name, value in present.items() if earlier[name] != value]
    if not names:
        return None
    old, new = (
        " ".join(_format_option(name, values[name]) for name in names) for values in (earlier, present)
    )
    return old, new


def _format_option(name: str, value: float) -> str:
    if name == "temperature" and value == 0:
        return "--greedy"
    return f"--{name.replace('out_seq_length', 'out-seq-length')} {value}"


async def draw_sample(
    item: WorkItem[Sample],
    client: EngineClient,
    encode: Callable[[str], Sequence[int]],
    settings: SampleSettings,
) -> Line:
    """Return the output line of a sample.

    A prompt that leaves no room in the model's context gets a line with the key "error".

    Args:
        encode: returns the ids of a text.

    Raises:
        EngineOverloadedError: the sample can be drawn later.
        MegaError: the engine failed, or the model has no end-of-document token to begin with.
    """
    sample = item.request
    line: Line = {"id": item.id, "custom_id": item.custom_id, "settings": asdict(settings)}
    line |= {"prompt": sample.prompt} if sample.prompt is not None else {}
    ids = _prompt_ids(sample, client, encode)
    max_tokens = min(settings.out_seq_length, client.model.max_seq_len - len(ids))
    if max_tokens < 1 or not ids:
        limit = client.model.max_seq_len
        problem = f"the prompt has {len(ids):,} tokens and the context {limit:,}" if ids else "empty prompt"
        return {**line, "text": "", "length": 0, "finished": False, "error": problem}
    request = EngineRequest(
        request_id=f"{item.custom_id}-{item.id}",
        prompt_token_ids=tuple(ids),
        params=SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p or 1.0,
            seed=_seed_of(settings.seed, sample.number),
        ),
    )
    text = ""
    tokens = 0
    # EngineClient.generate is an asynchronous generator in all implementations; its type says less
    async with aclosing(cast(Any, client.generate(request))) as outputs:
        async for output in outputs:
            text += output.text
            tokens += len(output.token_ids)
            if output.finish_reason == "stop":
                return {**line, "text": text, "length": max(tokens - 1, 0), "finished": True}
            if output.finish_reason == "length":
                return {**line, "text": text, "length": tokens, "finished": False}
            if output.finish_reason is not None:
                found = output.error or output.finish_reason
                raise MegaError(item.custom_id, "the engine stopped the request", found=found)
    raise MegaError(item.custom_id, "the engine ended the request without a reason")


def _prompt_ids(
    sample: Sample, client: EngineClient, encode: Callable[[str], Sequence[int]]
) -> Sequence[int]:
    if sample.prompt is not None:
        return encode(sample.prompt)
    if client.model.eod is None:
        hint = "give prompts with --sample-input-file"
        raise MegaError("--num-samples", "the model's tokenizer has no end-of-document token", hint=hint)
    return (client.model.eod,)


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of one sample: the same in every run, different from the seeds of its neighbours."""
    return int(request_id("", [seed, number])[:15], 16)


def _read_prompt(where: str, line: bytes) -> str:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FormatError(where, "is not JSON", found=error.msg, wanted=_EXAMPLE_LINE) from None
    prompt = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
    if isinstance(prompt, dict):  # RealToxicityPrompts: {"prompt": {"text": ...}}
        prompt = prompt.get("text")
    if not isinstance(prompt, str):
        raise FormatError(where, "has no prompt", wanted=_EXAMPLE_LINE)
    return prompt
