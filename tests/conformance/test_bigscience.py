"""BLOOM as Megatron-DeepSpeed saves it and `transformers` with the same weights: the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from mega_ckpt.operations.convert import convert
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import EnumMember, Record
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import Checkpoint

VOCAB, WIDTH, LAYERS, CONTEXT = 64, 24, 2, 16
ROWS = ("word_embeddings.weight", "query_key_value.weight", "query_key_value.bias")
COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")


def _transformers_model(heads: int) -> BloomForCausalLM:
    torch.manual_seed(3)
    config = BloomConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
        hidden_dropout=0.0,
    )
    model = BloomForCausalLM(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.1, std=0.2)
    return model


def _cut(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    if name.endswith(COLUMNS):
        return tensor.chunk(tp, 1)[rank].clone()
    if name.endswith((*ROWS, "dense_h_to_4h.weight", "dense_h_to_4h.bias")):
        return tensor.chunk(tp, 0)[rank].clone()
    return tensor.clone()


def _save(model: BloomForCausalLM, heads: int, tp: int, folder: Path) -> None:
    """The numbers of files and the names in them are those of BigScience's own converter."""
    whole: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in model.transformer.state_dict().items():
        if name.startswith("h."):
            _, layer, rest = name.split(".", 2)
            whole.setdefault(3 + int(layer), {})[rest] = tensor
        elif name.startswith("word_embeddings"):
            whole.setdefault(1, {})[name.replace("_layernorm.", ".norm.")] = tensor
        else:
            whole.setdefault(4 + LAYERS, {})[name.removeprefix("ln_f.")] = tensor
    folder.mkdir()
    for number, tensors in whole.items():
        for rank in range(tp):
            part: dict[str, Any] = {n: _cut(n, t, rank, tp) for n, t in tensors.items()}
            torch.save(part, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    args = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": 4 * WIDTH,
        "num_attention_heads": heads,
        "max_position_embeddings": CONTEXT,
        "position_embedding_type": EnumMember("megatron.enums.PositionEmbeddingType", 3, "alibi"),
        "embed_layernorm": True,
        "apply_residual_connection_post_layernorm": False,
        "bias_gelu_fusion": True,
        "padded_vocab_size": VOCAB,
        "tensor_model_parallel_size": tp,
    }
    state = {"iteration": 5, "args": Record("argparse.Namespace", (), args)}
    zip_writer.write(folder / "mp_rank_00_model_states.pt", state, lambda _: [])


@pytest.mark.parametrize(("heads", "tp"), [(4, 1), (4, 2), (6, 2)])
def test_logits_are_those_of_transformers(heads: int, tp: int, tmp_path: Path) -> None:
    theirs = _transformers_model(heads)
    _save(theirs, heads, tp, tmp_path / "global_step5")
    convert(tmp_path / "global_step5", tmp_path / "run", "bigscience", "mega")
    checkpoint = Checkpoint.open(tmp_path / "run")
    model = build_model(Runtime.single_process(checkpoint.spec))
    fill_weights(model, checkpoint.model_slab)
    ids = torch.randint(0, VOCAB, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
        ours = model(ids, torch.arange(CONTEXT), PackedAttention(1, CONTEXT))[:, :VOCAB]
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
