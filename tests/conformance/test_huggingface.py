"""`transformers` models and their conversions: equal logits, and bitwise round trips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from mega_model.generate import generate
from mega_schema.checkpoint.reader import Checkpoint
from tests.conformance.hf_models import (
    CASES,
    build_for_inference,
    from_hugging_face,
    logits,
    mega_logits,
    save,
    tensors,
    to_hugging_face,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_hugging_faces_and_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    theirs = save(CASES[case](), tmp_path / "hf")
    converted = from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(2))
    wanted = logits(theirs, token_BS)
    assert wanted.std() > 0.1
    torch.testing.assert_close(
        mega_logits(Checkpoint.open(tmp_path / "run"), token_BS), wanted, atol=1e-5, rtol=1e-5
    )
    assert converted.parameters == theirs.num_parameters()
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True)
    assert type(loaded) is type(theirs)
    assert torch.equal(logits(loaded.eval(), token_BS), wanted)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_that_transformers_generates(case: str, tmp_path: Path) -> None:
    theirs = save(CASES[case](), tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.randint(0, 61, (3, 6), generator=torch.Generator().manual_seed(3))
    wanted = theirs.generate(
        token_BS, attention_mask=torch.ones_like(token_BS), max_new_tokens=18, do_sample=False
    )
    model = build_for_inference(Checkpoint.open(tmp_path / "run"))
    assert generate(model, token_BS.tolist(), new_tokens=18, top_k=1).rows == wanted.tolist()


@pytest.mark.parametrize("case", ["gpt2", "llama grouped"])
def test_bfloat16_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    save(CASES[case](), tmp_path / "hf", torch.bfloat16)
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "hf")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


def test_a_sharded_folder_reads_as_a_whole_one(tmp_path: Path) -> None:
    save(CASES["llama grouped"](), tmp_path / "one")
    save(CASES["llama grouped"](), tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    a, b = (from_hugging_face(tmp_path / name, tmp_path / f"{name}-run").folder for name in ("one", "many"))
    assert (a / "model-00000.safetensors").read_bytes() == (b / "model-00000.safetensors").read_bytes()
