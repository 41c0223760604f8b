"""`mega-ckpt convert` of T5: logits of `transformers`, and bitwise round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from mega_ckpt.cli import cli
from mega_ckpt.formats.huggingface import config_json
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.presets import preset
from mega_schema.spec import t5

SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.0": ("T5", {}),
    "1.1": ("T5", GATED),
    "umt5": ("UMT5", GATED),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _save_model(case: str, folder: Path) -> Any:
    """Save a model as transformers 4 did: an untied output matrix, and the key that says so."""
    prefix, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    if changes:
        model.lm_head.weight = torch.nn.Parameter(torch.empty(61, 32))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": config.model_type, "architectures": [type(model).__name__], **SIZES, **changes}
        )
    )
    return model


def convert(source: str, target: str, load: Path, save: Path, *more: str) -> Result:
    words = ["convert", "--from", source, "--to", target, "--load", load, "--save", save, *more]
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    theirs = _save_model(case, tmp_path / "hf")
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "run", "--check-logits", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["logits"]
    assert report["by"] == ["transformers", "the reference forward"]
    assert report["alike"] is True
    result = convert("mega", "hf", tmp_path / "run", tmp_path / "back", "--check-logits", "64")
    assert result.exit_code == 0, result.output
    back = type(theirs).from_pretrained(tmp_path / "back", local_files_only=True).eval()
    assert back.config.scale_decoder_outputs is theirs.config.scale_decoder_outputs
    ids = torch.arange(40)[None]
    logits = [model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits for model in (theirs, back)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
    spec = Checkpoint.open(tmp_path / "run").spec
    back.save_pretrained(tmp_path / "saved by transformers 5")
    for folder in ("back", "saved by transformers 5"):
        result = convert("hf", "mega", tmp_path / folder, tmp_path / f"run of {folder}")
        assert result.exit_code == 0, result.output
        assert Checkpoint.open(tmp_path / f"run of {folder}").spec == spec


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("t5-small", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}),
        ("flan-t5-base", {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, **GATED}),
    ],
)
def test_a_preset_is_the_model_of_the_published_config(name: str, sizes: dict[str, Any]) -> None:
    config = {"model_type": "t5", "vocab_size": 32128, "d_kv": 64, "n_positions": 512, **sizes}
    assert config_json.to_spec(config, "config.json") == preset(name)


def test_a_copy_of_the_embedding_that_differs_is_refused(tmp_path: Path) -> None:
    _save_model("1.0", tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    assert convert("hf", "mega", tmp_path / "hf", tmp_path / "run").exit_code == 0
    tensors["encoder.embed_tokens.weight"][3] += 1
    save_file(tensors, file, {"format": "pt"})
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "other")
    message = "hf: encoder.embed_tokens.weight: is not shared.weight, which it is tied to"
    assert isinstance(result.exception, FormatError)
    assert str(result.exception).endswith(message)
    assert not (tmp_path / "other").exists()


def test_a_t5_with_learned_positions_has_no_class(tmp_path: Path) -> None:
    spec = t5(encoder_layers=1, decoder_layers=1, hidden=8, heads=2, vocab=9, max_seq_len=8)
    with pytest.raises(ConfigError) as caught:
        config_json.from_spec(spec, "run")
    assert "is not supported by" in str(caught.value)
