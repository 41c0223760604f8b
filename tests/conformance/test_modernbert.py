"""ModernBERT: logits and gradients of `transformers` for padded and packed rows, and conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface.names import aliases
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.encoder import Encoder
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.presets import preset
from tests.conformance.test_bert_conversion import convert

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
    "local_attention": 8,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "masked": ("ForMaskedLM", {}),
    "every second layer": (
        "ForMaskedLM",
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "no window": ("ForMaskedLM", {"layer_types": ["full_attention"] * 5, "decoder_bias": False}),
    "norm biases": ("ForMaskedLM", {"norm_bias": True, "classifier_activation": "gelu_new"}),
    "without a head": ("Model", {}),
}
LENGTHS = torch.tensor([24, 17, 5])
IS_TOKEN_BS = torch.arange(24) < LENGTHS[:, None]
TOKENS_BS = torch.randint(2, 61, (3, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _save_model(case: str, folder: Path) -> Any:
    suffix, changes = CASES[case]
    torch.manual_seed(7)
    config = transformers.ModernBertConfig(**{**SIZES, **changes})
    model = getattr(transformers, f"ModernBert{suffix}")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms of ones and biases of zeros would hide a mistake
            weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return model


def _their_logits(model: Any) -> Tensor:
    output = model(TOKENS_BS, attention_mask=IS_TOKEN_BS.long())
    logits: Tensor = (
        output.logits
        if "logits" in output
        else output.last_hidden_state @ model.get_input_embeddings().weight.T
    )
    return logits[IS_TOKEN_BS]


def _our_logits(model: Encoder, *, packed: bool) -> Tensor:
    """Compute the logits of all tokens but padding, (T, V): of padded rows, or of one row without padding."""
    position_BS = torch.arange(24).expand(3, -1)
    if packed:
        row_1S = torch.arange(3).repeat_interleave(LENGTHS)[None]
        attend = PackedAttention(1, int(LENGTHS.sum()), row_1S, causal=False)
        return model(TOKENS_BS[IS_TOKEN_BS], position_BS[IS_TOKEN_BS], attend)[:, :61]
    attend = PackedAttention(3, 24, IS_TOKEN_BS.long(), causal=False)
    logits: Tensor = model(TOKENS_BS.flatten(), position_BS.flatten(), attend)
    return logits[IS_TOKEN_BS.flatten(), :61]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = _save_model(case, tmp_path / "hf")
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "run", "--check-logits", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["logits"]
    assert report["by"] == ["transformers", "the reference forward"]
    assert report["alike"] is True
    checkpoint = Checkpoint.open(tmp_path / "run")
    wanted = _their_logits(theirs)
    target_T = torch.where(torch.arange(len(wanted)) % 3 == 0, TOKENS_BS[IS_TOKEN_BS], -100)
    F.cross_entropy(wanted, target_T).backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for packed in (False, True):
        model = load_model(checkpoint.spec, checkpoint.model_slab)
        assert isinstance(model, Encoder)
        logits = _our_logits(model, packed=packed)
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
        F.cross_entropy(logits, target_T).backward()
        ours = {name: weight.grad for name, weight in model.named_parameters()}
        prefix = "" if case == "without a head" else "model."
        pairs = {alias.foreign.removeprefix("model."): alias.ours for alias in aliases(checkpoint.spec)}
        assert {*ours} == {*pairs.values()}
        assert {*gradients} == {
            name if name.startswith(("head.", "decoder.")) else prefix + name for name in pairs
        }
        for foreign, name in pairs.items():
            gradient = gradients[foreign if foreign in gradients else prefix + foreign]
            our_gradient = ours[name][: len(gradient)]  # without the padding of the vocabulary
            torch.testing.assert_close(our_gradient, gradient, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    theirs = _save_model(case, tmp_path / "hf")
    assert convert("hf", "mega", tmp_path / "hf", tmp_path / "run").exit_code == 0
    result = convert("mega", "hf", tmp_path / "run", tmp_path / "back", "--check-logits", "64")
    assert result.exit_code == 0, result.output
    back = type(theirs).from_pretrained(tmp_path / "back", local_files_only=True).eval()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
    assert back.config.layer_types == theirs.config.layer_types
    assert back.config.rope_parameters == theirs.config.rope_parameters
    assert convert("hf", "mega", tmp_path / "back", tmp_path / "again").exit_code == 0
    assert Checkpoint.open(tmp_path / "again").spec == Checkpoint.open(tmp_path / "run").spec


# the config of answerdotai/ModernBERT-base in the names of transformers 4, without keys that compute nothing
PUBLISHED = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "decoder_bias": True,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "vocab_size": 50368,
}


def test_the_preset_is_the_published_config() -> None:
    assert config_json.to_spec(PUBLISHED, "config.json") == preset("modernbert-base")
    ours = transformers.ModernBertConfig(**config_json.from_spec(preset("modernbert-base"), "x"))
    published = transformers.ModernBertConfig(**PUBLISHED)
    assert ours.layer_types == published.layer_types
    assert ours.rope_parameters == published.rope_parameters
    assert ours.sliding_window == published.sliding_window == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["sliding_attention"] * 22},
            "layer_types: is not supported: found full_attention in none of 22 layers, wanted",
        ),
        (
            {"layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 20]},
            "layer_types: is not supported: found full_attention in 0, 1 of 22 layers, wanted",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling: positions scaled in this way are not supported: found yarn, wanted default",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.full_attention: positions scaled in this way are not supported: found linear",
        ),
        ({"mlp_bias": True}, "mlp_bias: is not supported: found True, wanted False"),
        ({"hidden_activation": "silu"}, "hidden_activation: is not supported: found silu, wanted gelu"),
        (
            {"architectures": ["ModernBertForSequenceClassification"]},
            "architectures: is not supported: found ModernBertForSequenceClassification, wanted ",
        ),
    ],
)
def test_other_computations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        config_json.to_spec({**PUBLISHED, **change}, "config.json")
    assert f"config.json: {message}" in str(caught.value)
