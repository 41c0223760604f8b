"""vLLM loads the folders that `convert --to hf` writes, as they are, and its log-probabilities are ours.

vLLM pins torch and transformers, so it has an environment of its own: `MEGA_VLLM` names the Python there.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_schema.checkpoint.reader import Checkpoint
from tests.conformance.hf_models import (
    CASES,
    byte_level,
    from_hugging_face,
    mega_logits,
    save,
    to_hugging_face,
)

# it loads all of BLOOM but a head of its own, in folders of transformers' own too
LOADED = sorted(CASES.keys() - {"bloom with six heads, untied"})
# its kernels for CPUs know few widths of a head: 32 and 64 are two
WIDE_HEADS = {"qwen 3": 64, "llama with wide heads": 64}
# one fewer than there are places: it wants one for an answer
token_BS = torch.randint(0, 61, (3, 23), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def vllm() -> str:
    python = os.environ.get("MEGA_VLLM")
    if python is None:
        pytest.skip("vLLM is asked only where MEGA_VLLM names the Python of an environment that has it")
    return python


def _ask(python: str, questions: list[list[Any]], folder: Path) -> None:
    """Ask all at once: starting it takes longer than what it is asked."""
    (folder / "questions.json").write_text(json.dumps(questions), "utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    words = [python, str(Path(__file__).with_name("vllm_program.py")), str(folder / "questions.json")]
    process = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=folder, timeout=900)
    assert process.returncode == 0, process.stderr[-6000:]


@pytest.fixture(scope="module")
def answers(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each case: the run, what was written from it, and what vLLM answered."""
    folder = tmp_path_factory.mktemp("vllm")
    for case in LOADED:
        config = CASES[case]()
        config.hidden_size = 128
        if getattr(config, "head_dim", None) is not None:
            config.head_dim = WIDE_HEADS.get(case, 32)
        save(config, folder / case / "hf")
        from_hugging_face(folder / case / "hf", folder / case / "run")
        cut = {"shard": 100_000} if case == "qwen 2" else {}
        to_hugging_face(folder / case / "run", folder / case / "back", **cut)
    _ask(vllm, [["weights", str(folder / case / "back"), token_BS.tolist()] for case in LOADED], folder)
    return folder


@pytest.mark.parametrize("case", LOADED)
def test_vllms_log_probabilities_of_a_written_folder_are_ours(case: str, answers: Path) -> None:
    answers_of_vllm = json.loads((answers / case / "back.json").read_bytes())
    config = json.loads((answers / case / "back" / "config.json").read_bytes())
    assert answers_of_vllm["class"] == config["architectures"][0]
    run = Checkpoint.open(answers / case / "run")
    # of positions interpolated by a factor it takes as many times more
    assert answers_of_vllm["context"] == run.spec.max_seq_len * run.spec.rope_interpolation
    wanted = mega_logits(run, token_BS).log_softmax(-1)
    assert wanted.std() > 0.1
    close = 1e-3 if "bloom" in case else 1e-5  # BLOOM's GELU by tanh is the one by erf there
    torch.testing.assert_close(torch.tensor(answers_of_vllm["logprobs"]), wanted, atol=close, rtol=close)


def test_vllm_reads_the_tokenizer_the_template_and_what_ends_an_answer(vllm: str, tmp_path: Path) -> None:
    config = CASES["qwen 3"]()
    config.hidden_size, config.head_dim = 128, 64
    save(config, tmp_path / "hf", torch.bfloat16)
    byte_level(tmp_path / "hf")
    roles = {"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    files = {
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}),
        "special_tokens_map.json": json.dumps(roles),
        "generation_config.json": json.dumps({"eos_token_id": [10, 8], "temperature": 0.6}),
        "chat_template.jinja": "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}",
    }
    for name, text in files.items():
        (tmp_path / "hf" / name).write_text(text, "utf-8")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    _ask(vllm, [["words", str(tmp_path / "back"), "fade", [10, 8, 9]]], tmp_path)
    assert json.loads((tmp_path / "back.json").read_bytes()) == {
        "dtype": "torch.bfloat16",
        "temperature": 0.6,
        "text": [5, 0, 3, 4],
        "chat": [9, 5, 0, 3, 4, 10],
        "ends": [[10], [8], [9, 9, 9]],
    }
