"""`mega-ckpt convert` of BERT: equal outputs of `transformers`, and bitwise round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from mega_ckpt.cli import cli
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.encoder import Encoder
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.spec import bert
from tests.conformance.conftest import SaveWhole

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForPreTraining", {}),
    "bert tanh": ("Bert", "ForPreTraining", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert without a binary head": ("Bert", "ForMaskedLM", {"type_vocab_size": 3}),
    "bert without heads": ("Bert", "Model", {}),
    "bert with classes": ("Bert", "ForSequenceClassification", {"num_labels": 3}),
    "bert with tags": ("Bert", "ForTokenClassification", {"id2label": {0: "O", 1: "B-X", 2: "I-X"}}),
    "bert with spans": ("Bert", "ForQuestionAnswering", {}),
    "megatron": ("MegatronBert", "ForPreTraining", {"layer_norm_eps": 1e-5}),
    "megatron tanh": ("MegatronBert", "ForPreTraining", {"hidden_act": "gelu_new"}),
    "megatron without a binary head": ("MegatronBert", "ForMaskedLM", {}),
    "megatron without heads": ("MegatronBert", "Model", {}),
    "megatron with tags": ("MegatronBert", "ForTokenClassification", {"num_labels": 5}),
    "megatron with spans": ("MegatronBert", "ForQuestionAnswering", {}),
    "megatron with classes": ("MegatronBert", "ForSequenceClassification", {"id2label": {0: "no", 1: "yes"}}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _save_model(case: str, folder: Path) -> Any:
    prefix, suffix, changes = CASES[case]
    torch.manual_seed(7)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **changes})
    model = getattr(transformers, prefix + suffix)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():  # norms of ones and biases of zeros would hide a mistake
            weight += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return model


def convert(source: str, target: str, load: Path, save: Path, *more: str) -> Result:
    words = ["convert", "--from", source, "--to", target, "--load", load, "--save", save, *more]
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_outputs_are_those_of_transformers_and_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    theirs = _save_model(case, tmp_path / "hf")
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "run", "--check-logits", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["logits"]
    assert report["by"] == ["transformers", "the reference forward"]
    assert report["alike"] is True
    checkpoint = Checkpoint.open(tmp_path / "run")
    model = load_model(checkpoint.spec, checkpoint.model_slab)
    assert isinstance(model, Encoder)
    generator = torch.Generator().manual_seed(2)
    token_BS = torch.randint(0, 61, (3, 24), generator=generator)
    type_BS = torch.randint(0, 2, (3, 24), generator=generator)
    mask_BS = (torch.arange(24) < torch.tensor([24, 17, 5])[:, None]).long()
    wanted = theirs(token_BS, attention_mask=mask_BS, token_type_ids=type_BS)
    x_TD = model.hidden_states(
        token_BS.flatten(),
        torch.arange(24).repeat(3),
        PackedAttention(3, 24, mask_BS, causal=False),
        token_type_T=type_BS.flatten(),
    )
    if checkpoint.spec.task_head == "span":
        logits_BS2 = model.row_logits(x_TD, 3)
        pairs = [
            (logits_BS2[..., column].flatten(), wanted[name][..., None])
            for column, name in enumerate(("start_logits", "end_logits"))
        ]
        pairs = [(ours, logits.flatten(1)) for ours, logits in pairs]
    elif checkpoint.spec.task_head == "token_classification":
        assert list(checkpoint.spec.labels) == list(theirs.config.id2label.values())
        pairs = [(model.row_logits(x_TD, 3).flatten(0, 1), wanted.logits)]
    elif "last_hidden_state" in wanted:
        pairs = [(x_TD, wanted.last_hidden_state)]
    elif checkpoint.spec.labels:
        task_BK = model.task_logits(x_TD, torch.arange(3) * 24)
        torch.testing.assert_close(task_BK, wanted.logits, atol=1e-5, rtol=1e-5)
        assert list(checkpoint.spec.labels) == list(theirs.config.id2label.values())
        pairs = []
    else:
        pairs = [(model.logits(x_TD)[:, :61], wanted.get("prediction_logits", wanted.get("logits")))]
    for found, expected in pairs:
        is_token_T = mask_BS.bool().flatten()
        torch.testing.assert_close(
            found[is_token_T], expected.flatten(0, 1)[is_token_T], atol=1e-5, rtol=1e-5
        )
    if checkpoint.spec.binary_head:
        binary = model.binary_logits(x_TD, torch.arange(3) * 24)
        torch.testing.assert_close(binary, wanted.seq_relationship_logits, atol=1e-5, rtol=1e-5)
    result = convert("mega", "hf", tmp_path / "run", tmp_path / "back", "--check-logits", "64")
    assert result.exit_code == 0, result.output
    back = type(theirs).from_pretrained(tmp_path / "back", local_files_only=True).eval()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
    second_result = convert("hf", "mega", tmp_path / "back", tmp_path / "again")
    assert second_result.exit_code == 0, second_result.output
    assert Checkpoint.open(tmp_path / "again").spec == checkpoint.spec
    assert json.loads((tmp_path / "back/config.json").read_text())["architectures"] == [type(theirs).__name__]


@pytest.mark.parametrize("post_norm", [False, True], ids=["megatron-bert", "bert"])
def test_a_model_without_token_types_computes_the_same_in_transformers(
    save_whole: SaveWhole, tmp_path: Path, post_norm: bool
) -> None:
    spec = bert(
        layers=2,
        hidden=16,
        heads=4,
        vocab=61,
        max_seq_len=24,
        activation="gelu_erf",
        post_norm_residual=post_norm,
        token_types=None,
        pooler=False,
        binary_head=False,
    )
    rng = np.random.default_rng(3)
    rows = [row for row in table(spec) if row.tied_to is None]
    weights = {row.name: (0.3 * rng.normal(size=row.shape)).astype(np.float32) for row in rows}
    save_whole(tmp_path / "run", spec, {MODEL: weights})
    result = convert("mega", "hf", tmp_path / "run", tmp_path / "hf", "--check-logits", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["logits"]
    assert report["by"] == ["the reference forward", "transformers"]
    assert report["alike"] is True


def test_a_published_folder_without_heads_is_read(shared: Path, tmp_path: Path) -> None:
    load = shared / "data/checkpoints/bert-xsmall-dummy"
    result = convert("hf", "mega", load, tmp_path / "run", "--check-logits", "64", "--no-tokenizer")
    assert result.exit_code == 0, result.output
    spec = Checkpoint.open(tmp_path / "run").spec
    assert (spec.family, spec.pooler, spec.binary_head, spec.head_transform) == ("bert", True, False, "none")


def test_names_of_old_files_are_read(tmp_path: Path) -> None:
    theirs = _save_model("bert", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
        for name, w in theirs.state_dict().items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    torch.save(old, tmp_path / "hf/pytorch_model.bin")
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "run")
    assert result.exit_code == 0, result.output
    old["cls.predictions.decoder.bias"] = torch.zeros(61)
    torch.save(old, tmp_path / "hf/pytorch_model.bin")
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "other")
    assert "cls.predictions.decoder.bias: is not cls.predictions.bias, which it is tied to" in str(
        result.exception
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["BertForMultipleChoice"]},
            "architectures: is not supported: found BertForMultipleChoice, wanted BertForPreTraining | ",
        ),
        ({"architectures": None}, "architectures: is not supported: found None, wanted BertForPreTraining"),
        ({"hidden_act": "relu"}, "hidden_act: is not supported: found relu, wanted gelu_fast | "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: is not supported: found"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: is not supported: found False, wanted True"),
        ({"is_decoder": True}, "is_decoder: is not supported: found True, wanted False"),
    ],
)
def test_what_no_model_of_ours_computes_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _save_model("bert", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, **change}))
    result = convert("hf", "mega", tmp_path / "hf", tmp_path / "run")
    assert message in str(result.exception)
    assert not (tmp_path / "run").exists()
