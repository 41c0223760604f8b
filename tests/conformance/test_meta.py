"""Meta's Llama folders and `transformers` with the same weights: equal logits, exact round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.operations.convert import convert
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.parallel_layout import Layout
from tests.conformance.hf_models import mega_logits

VOCAB, DIM, HEADS, FFN, LAYERS = 64, 64, 8, 96, 2
PARAMS = {
    "dim": DIM,
    "n_heads": HEADS,
    "n_layers": LAYERS,
    "norm_eps": 1e-5,
    "vocab_size": -1,
    "multiple_of": 32,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
THREE = {"rope_theta": 500000.0, "vocab_size": VOCAB, "n_kv_heads": 2}
# parts, whether the embedding is cut between rows, and more for params.json and for transformers' config
CASES: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    "llama 1": (1, True, {"norm_eps": 1e-6}, {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}),
    "llama 1, two parts": (2, False, {}, {}),
    "llama 2, grouped": (2, False, {"n_kv_heads": 4}, {"num_key_value_heads": 4}),
    "llama 3": (2, True, THREE, {"rope_theta": 500000.0, "num_key_value_heads": 2}),
    "llama 3, a key head on two parts": (4, True, THREE, {"rope_theta": 500000.0, "num_key_value_heads": 2}),
    "llama 3.1": (
        1,
        True,
        {**THREE, "use_scaled_rope": True, "ffn_dim_multiplier": 1.3},
        {"rope_parameters": {**SCALED, "factor": 8.0}, "num_key_value_heads": 2},
    ),
    "llama 3.2": (
        1,
        True,
        {**THREE, "use_scaled_rope": True},
        {
            "rope_parameters": {**SCALED, "factor": 32.0},
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


def _transformers_model(config: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(6)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=DIM,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            bos_token_id=None,
            eos_token_id=None,
            **{"rms_norm_eps": 1e-5, **config},
        )
    ).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.1, std=0.2)
    return model


def _pairs_side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """The rows of heads as Meta has them, from those of transformers'."""
    width = DIM // HEADS
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _write(model: LlamaForCausalLM, folder: Path, params: dict[str, Any], parts: int, by_rows: bool) -> None:
    """The dims along which Meta's program cuts its tensors are written down here."""
    theirs = model.state_dict()
    whole = {
        "tok_embeddings.weight": (theirs["model.embed_tokens.weight"], 0 if by_rows else 1),
        "norm.weight": (theirs["model.norm.weight"], None),
        "output.weight": (theirs["lm_head.weight"], 0),
    }
    for i in range(LAYERS):
        prefix, foreign_prefix = f"layers.{i}.", f"model.layers.{i}."
        q, k = (_pairs_side_by_side(theirs[f"{foreign_prefix}self_attn.{x}_proj.weight"]) for x in "qk")
        whole |= {
            prefix + "attention.wq.weight": (q, 0),
            prefix + "attention.wk.weight": (k, 0),
            prefix + "attention.wv.weight": (theirs[foreign_prefix + "self_attn.v_proj.weight"], 0),
            prefix + "attention.wo.weight": (theirs[foreign_prefix + "self_attn.o_proj.weight"], 1),
            prefix + "feed_forward.w1.weight": (theirs[foreign_prefix + "mlp.gate_proj.weight"], 0),
            prefix + "feed_forward.w2.weight": (theirs[foreign_prefix + "mlp.down_proj.weight"], 1),
            prefix + "feed_forward.w3.weight": (theirs[foreign_prefix + "mlp.up_proj.weight"], 0),
            prefix + "attention_norm.weight": (theirs[foreign_prefix + "input_layernorm.weight"], None),
            prefix + "ffn_norm.weight": (theirs[foreign_prefix + "post_attention_layernorm.weight"], None),
        }
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}), "utf-8")
    for rank in range(parts):
        part = {}
        for name, (tensor, dim) in whole.items():
            if dim is None:
                part[name] = tensor.clone()
            elif len(tensor) < parts * DIM // HEADS and name.endswith(("wk.weight", "wv.weight")):
                heads = tensor.split(DIM // HEADS)  # fewer key heads than parts
                part[name] = heads[rank * len(heads) // parts].clone()
            else:
                part[name] = tensor if parts == 1 else tensor.chunk(parts, dim)[rank].clone()
        part["rope.freqs"] = torch.ones(DIM // HEADS // 2)
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_and_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    parts, by_rows, params, config = CASES[case]
    theirs = _transformers_model(config)
    _write(theirs, tmp_path / "meta", params, parts, by_rows)
    result = convert(tmp_path / "meta", tmp_path / "run", "meta", "mega")
    assert (result.written.parameters, result.dropped) == (theirs.num_parameters(), ())
    token_BS = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = theirs(token_BS).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(
        mega_logits(Checkpoint.open(tmp_path / "run"), token_BS), wanted, atol=1e-5, rtol=1e-5
    )
    layout = WriteOptions(layout=Layout(tp=parts))
    convert(tmp_path / "run", tmp_path / "back", "mega", "meta", target=layout)
    _write(theirs, tmp_path / "rows", params, parts, True)
    for rank in range(parts):
        name = f"consolidated.{rank:02d}.pth"
        back, written = (
            torch.load(tmp_path / folder / name, weights_only=True) for folder in ("back", "rows")
        )
        del written["rope.freqs"]
        assert back.keys() == written.keys()
        assert all(torch.equal(back[key], written[key]) for key in written)
    convert(tmp_path / "back", tmp_path / "again", "meta", "mega")
    torch.testing.assert_close(
        mega_logits(Checkpoint.open(tmp_path / "again"), token_BS), wanted, atol=1e-5, rtol=1e-5
    )
    repeated, first = (Checkpoint.open(tmp_path / name) for name in ("again", "run"))
    assert repeated.spec == first.spec


def test_hugging_faces_folder_of_it_has_transformers_own_weights(tmp_path: Path) -> None:
    parts, by_rows, params, config = CASES["llama 2, grouped"]
    theirs = _transformers_model(config).to(torch.bfloat16)
    _write(theirs, tmp_path / "meta", params, parts, by_rows)
    convert(tmp_path / "meta", tmp_path / "hf", "meta", "hf")
    back = LlamaForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True).state_dict()
    assert all(torch.equal(back[name], value) for name, value in theirs.state_dict().items())
    assert back["lm_head.weight"].dtype == torch.bfloat16


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    parts, by_rows, params, config = CASES["llama 3.2"]
    _write(_transformers_model(config), tmp_path / "meta", params, parts, by_rows)
    convert(tmp_path / "meta", tmp_path / "run", "meta", "mega")
    assert Checkpoint.open(tmp_path / "run").spec.tied
    convert(tmp_path / "run", tmp_path / "back", "mega", "meta")
    back = torch.load(tmp_path / "back" / "consolidated.00.pth", weights_only=True)
    assert back["output.weight"].data_ptr() == back["tok_embeddings.weight"].data_ptr()
    ffn = json.loads((tmp_path / "back" / "params.json").read_bytes())
    # Meta's FeedForward, in its own words
    hidden = int(ffn["ffn_dim_multiplier"] * int(2 * (4 * ffn["dim"]) / 3))
    assert ffn["multiple_of"] * ((hidden + ffn["multiple_of"] - 1) // ffn["multiple_of"]) == FFN
