"""Run vLLM on folders, in its own Python environment and without this project."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",  # or it reports to its makers
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: some versions take 4 and more, whatever they are asked for
    "VLLM_LOGGING_LEVEL": "WARNING",
}
from vllm import LLM, SamplingParams

SMALL = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 4}


def weights(folder: Path, token_BS: list[list[int]]) -> dict[str, Any]:
    """The class that was chosen, the longest context, and log-probabilities (B, S, V) after every token."""
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_logprobs=-1, **SMALL)
    every = SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
    rows = []
    for output in llm.generate([{"prompt_token_ids": row} for row in token_BS], every, use_tqdm=False):
        places = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        rows.append([[place[token].logprob for token in range(len(place))] for place in places])
    config = llm.llm_engine.model_config
    return {"class": config.architecture, "context": config.max_model_len, "logprobs": rows}


def words(folder: Path, text: str, ends: list[int]) -> dict[str, Any]:
    """What the tokenizer, its template of chats and the generation config mean there."""
    llm = LLM(str(folder), **SMALL)
    sure = [SamplingParams(max_tokens=3, logit_bias={end: 100.0}) for end in ends]
    outputs = llm.generate([text] * len(ends), sure, use_tqdm=False)
    chat = llm.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=1), use_tqdm=False)
    return {
        "dtype": str(llm.llm_engine.model_config.dtype),
        "temperature": llm.get_default_sampling_params().temperature,
        "text": outputs[0].prompt_token_ids,
        "chat": chat[0].prompt_token_ids,
        "ends": [list(output.outputs[0].token_ids) for output in outputs],
    }


def answer(name: str, folder: str, *arguments: Any) -> None:
    """Leave what a function says of a folder beside it."""
    value = {"weights": weights, "words": words}[name](Path(folder), *arguments)
    Path(f"{folder}.json").write_text(json.dumps(value), "utf-8")


def main() -> None:
    """Carry out a list of [function, folder, what else it takes], each where memory is given back after."""
    for question in json.loads(Path(sys.argv[1]).read_bytes()):
        process = multiprocessing.get_context("fork").Process(target=answer, args=question)
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{question[:2]}: exit code {process.exitcode}")


if __name__ == "__main__":
    main()
