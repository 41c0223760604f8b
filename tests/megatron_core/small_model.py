"""A small model as a spec and as Megatron's arguments, and checkpoints with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mega_ckpt.tensors import dtypes
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MAIN, MODEL, OPTIMIZER, Checkpoint
from mega_schema.spec import ModelSpec
from tests.checkpoint_fixture import save_whole

WORDS, LENGTH = 61, 24
OURS: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "vocab": WORDS,
    "max_seq_len": LENGTH,
    "vocab_multiple": 3,
}
# of --num-layers 4 … and nothing else, in the words of Megatron's arguments
THEIRS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 128,
    "max_position_embeddings": LENGTH,
    "make_vocab_size_divisible_by": 3,
    "group_query_attention": False,
    "num_query_groups": 1,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "bias_gelu_fusion": True,
    "swiglu": False,
    "squared_relu": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "window_size": None,
    "num_experts": None,
}
LLAMA: dict[str, Any] = {
    "ffn_hidden_size": 40,
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "bias_gelu_fusion": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
}


def save_random(
    run: Path, spec: ModelSpec, *, seed: int, dtype: str = "F32", optimizer: bool = False
) -> Checkpoint:
    """A checkpoint of ours of random numbers: norms of ones and biases of zeros would hide an exchange."""
    rng = np.random.default_rng(seed)
    rows = [row for row in table(spec) if row.tied_to is None]
    spaces = [MODEL, *(OPTIMIZER if dtype != "F32" else OPTIMIZER[1:])] if optimizer else [MODEL]
    tensors = {
        space: {row.name: rng.normal(0.1, 0.2, row.shape).astype(np.float32) for row in rows}
        for space in spaces
    }
    if optimizer:
        tensors[OPTIMIZER[2]] = {name: values**2 for name, values in tensors[OPTIMIZER[2]].items()}
    if dtype != "F32":
        tensors[MODEL] = {name: dtypes.round_float32(main, dtype) for name, main in tensors[MAIN].items()}
    trained = {"optimizer_steps": 4, "learning_rate": 2e-3}
    config = "[optimizer]\nadam_beta1 = 0.8\nweight_decay = 0.25\n" if optimizer else ""
    save_whole(run, spec, tensors, dtype=dtype, iteration=5, trainer=trained, run_config=config)
    return Checkpoint.open(run)
