"""TEXT2TEXT beside transformers: the loss of targets and greedy decoding of a converted Flan-T5."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from mega_ckpt.cli import cli
from mega_train.telemetry.event_log import read_events
from tests.train_command import run_mega_train

WORDS = 60
SIZES = {
    "vocab_size": WORDS + 4,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _save_model(folder: Path) -> Any:
    """Save a T5 1.1 and its tokenizer of words as transformers do."""
    torch.manual_seed(7)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.empty(SIZES["vocab_size"], 32))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    model.lm_head.weight.data[1] *= 4  # some outputs end
    folder.mkdir()
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    pieces = ["<pad>", "</s>", "<unk>", "<extra_id_0>", *(f"v{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return model


def _write_pairs(path: Path, count: int) -> list[tuple[list[int], list[int]]]:
    """Write pairs of words; return their ids with the end token."""
    rng = np.random.default_rng(1)
    pairs = []
    for _ in range(count):
        texts = [rng.integers(4, WORDS + 4, rng.integers(1, 9)).tolist() for _ in range(2)]
        pairs.append((texts[0] + [1], texts[1] + [1]))
    rows = ({"input": _text(source[:-1]), "target": _text(target[:-1])} for source, target in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return pairs


def _text(ids: list[int]) -> str:
    return " ".join(f"v{i - 4}" for i in ids)


@torch.no_grad()
def test_loss_and_greedy_decoding_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = _save_model(tmp_path / "hf")
    words = ["convert", "--from", "hf", "--to", "mega", "--load", tmp_path / "hf", "--save", tmp_path / "run"]
    result = CliRunner().invoke(cli, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    pairs = _write_pairs(tmp_path / "dev.jsonl", 19)
    argv = ["--task", "TEXT2TEXT", "--valid-data", str(tmp_path / "dev.jsonl"), "--epochs", "0", "--lr", "1"]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "hf")]
    argv += ["--seq-length", "16", "--decoder-seq-length", "12", "--micro-batch-size", "8"]
    out, _ = run_mega_train(
        "finetune", *argv, "--load", str(tmp_path / "run"), "--finetune", "--save", str(tmp_path / "out")
    )
    width = max(len(source) for source, _ in pairs)
    ids = torch.tensor([source + [0] * (width - len(source)) for source, _ in pairs])
    labels = torch.tensor([target + [-100] * (9 - len(target)) for _, target in pairs])
    mask = (ids != 0).long()
    loss = float(theirs(input_ids=ids, attention_mask=mask, labels=labels).loss)
    (validation,) = (event for event in read_events(tmp_path / "out") if event["event"] == "validation")
    assert validation["loss"] == pytest.approx(loss, rel=1e-5)
    generated = theirs.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=1
    )
    (file,) = tmp_path.glob("out/predictions/*")
    predictions = [json.loads(line)["prediction"] for line in file.read_text("utf-8").splitlines()]
    wanted = [_decode(row) for row in generated[:, 1:].tolist()]
    assert predictions == wanted
    assert len({len(text.split()) for text in wanted}) > 1, wanted
    assert re.search(r"dev at iteration \d+ \| loss", out)


def _decode(row: list[int]) -> str:
    names = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    row = row[: row.index(1)] if 1 in row else row
    return " ".join(names[i] if i < 4 else f"v{i - 4}" for i in row)
