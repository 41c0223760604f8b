"""A model trained by llama2.c: text, scores and tokens in Mega and in Hugging Face."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mega_ckpt.formats.llama2c import tokenizer as llama2c_tokenizer
from mega_ckpt.operations.convert import convert
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.generate import generate, score
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.tokenizer.tokenizer import open_tokenizer_folder

BOS = 1


@pytest.fixture(scope="module")
def stories(golden: Path) -> Path:
    return golden.parent / "data/checkpoints/stories260K"


@pytest.fixture(scope="module")
def expected_outputs(stories: Path) -> Any:
    return json.loads((stories / "expected.json").read_text("utf-8"))


@pytest.fixture(scope="module", params=["stories260K.bin", "stories260K.v1.bin"])
def run(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories") / "run"
    convert(stories / request.param, folder, "llama2c", "mega")
    return folder


def _model(run: Path) -> Any:
    spec = Checkpoint.open(run).spec
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, Checkpoint.open(run).model_slab)
    return model


def test_greedy_tokens_and_text_are_those_of_the_float64_forward(run: Path, expected_outputs: Any) -> None:
    model, tokenizer = _model(run), open_tokenizer_folder(Checkpoint.open(run).folder / "tokenizer")
    for case in expected_outputs["greedy"]:
        prompt = [BOS, *tokenizer.encode(case["prompt"])]
        assert prompt == case["prompt_ids"]
        new = len(case["ids"]) - len(prompt)
        (row,) = generate(model, [prompt], new_tokens=new, top_k=1).rows
        assert row == case["ids"]
        assert tokenizer.decode(row[1:]) == case["text"]


def test_scores_are_those_of_the_float64_forward(run: Path, expected_outputs: Any) -> None:
    model, tokenizer = _model(run), open_tokenizer_folder(Checkpoint.open(run).folder / "tokenizer")
    wanted = expected_outputs["scored"]
    ids = [BOS, *tokenizer.encode(wanted["text"])]
    assert ids == wanted["ids"]
    logprobs = score(model, [ids]).logprobs
    assert logprobs is not None
    assert -np.mean(logprobs[0]) == pytest.approx(wanted["mean_nll"], abs=1e-5)
    with torch.no_grad():
        logits = model(torch.tensor(ids), torch.arange(len(ids)), PackedAttention(1, len(ids)))
    torch.testing.assert_close(
        logits[-1, :8], torch.tensor(wanted["last_logits_first8"]), atol=1e-4, rtol=1e-5
    )


def test_transformers_says_the_same_of_the_folder_it_becomes(run: Path, expected_outputs: Any) -> None:
    folder = run.parent / "hf"
    convert(run, folder, "mega", "hf")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for case in expected_outputs["greedy"]:
        prompt = tokenizer(case["prompt"], return_tensors="pt")["input_ids"]
        assert prompt[0].tolist() == case["prompt_ids"]
        row = model.generate(prompt, max_length=len(case["ids"]), do_sample=False)[0]
        assert row.tolist() == case["ids"]
        assert tokenizer.decode(row, skip_special_tokens=True) == case["text"]


def test_ids_are_those_of_llama2cs_own_way_to_join_pieces(stories: Path) -> None:
    """Of all neighbours the pair whose union scores best, the first of equal ones, until none is known."""
    data, offset, pieces = (stories / "tok512.bin").read_bytes(), 4, list[tuple[bytes, float]]()
    for _ in range(512):
        best, length = struct.unpack_from("<fi", data, offset)
        pieces.append((data[offset + 8 : offset + 8 + length], best))
        offset += 8 + length
    number = {piece: i for i, (piece, _) in enumerate(pieces)}

    def encode(text: str) -> list[int]:
        ids = [number[b" "]] if text else []
        for letter in map(str.encode, text):
            ids += [number[letter]] if letter in number else [byte + 3 for byte in letter]
        while True:
            unions = [number.get(pieces[a][0] + pieces[b][0]) for a, b in zip(ids, ids[1:], strict=False)]
            known = [(-pieces[union][1], i, union) for i, union in enumerate(unions) if union is not None]
            if not known:
                return ids
            _, i, union = min(known)
            ids[i : i + 2] = [union]

    tokenizer, rng = llama2c_tokenizer.read_tokenizer(stories / "tok512.bin", 512), random.Random(4)
    letters = "etaoinshrdlu   ..,TLhe\n\"'aaa  sssooo\u00e9\u6f22"
    texts = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(500)]
    assert [tokenizer.encode(text) for text in texts] == [encode(text) for text in texts]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
