"""`transformers` models with random weights, and their conversion in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.formats.interface import WriteOptions, WriteResult
from mega_ckpt.operations.convert import convert
from mega_ckpt.tensors import safetensors_io
from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.runtime import Runtime
from mega_schema.checkpoint.reader import MODEL, Checkpoint

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
BLOOM = {"vocab_size": 61, "hidden_size": 32, "n_layer": 2}
NONE = {"bos_token_id": None, "eos_token_id": None}
SOME = {**LLAMA, **NONE, "num_key_value_heads": 2}
CASES: dict[str, Any] = {
    "gpt2": lambda: GPT2Config(**GPT2, **NONE),
    "gpt2 with its own width and gelu": lambda: GPT2Config(
        **GPT2, **NONE, n_inner=48, activation_function="gelu"
    ),
    "llama": lambda: LlamaConfig(**LLAMA, **NONE),
    "llama grouped": lambda: LlamaConfig(**LLAMA, **NONE, num_key_value_heads=2, rope_theta=500000.0),
    "llama grouped tied": lambda: LlamaConfig(
        **LLAMA, **NONE, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "llama 3.1": lambda: LlamaConfig(
        **LLAMA,
        **NONE,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama interpolated": lambda: LlamaConfig(
        **LLAMA, **NONE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama with wide heads": lambda: LlamaConfig(**LLAMA, **NONE, head_dim=16),
    "mistral": lambda: MistralConfig(**SOME, sliding_window=5),
    "qwen 2": lambda: Qwen2Config(**SOME, rope_theta=1000000.0),
    "qwen 2 tied with a window": lambda: Qwen2Config(
        **SOME, use_sliding_window=True, sliding_window=5, max_window_layers=0, tie_word_embeddings=True
    ),
    "qwen 3": lambda: Qwen3Config(**SOME, head_dim=12),
    "qwen 3 with a window": lambda: Qwen3Config(
        **SOME, head_dim=8, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "pythia": lambda: GPTNeoXConfig(**LLAMA, **NONE, rotary_pct=0.25),
    "gpt-neox with one branch after the other, tied": lambda: GPTNeoXConfig(
        **LLAMA,
        **NONE,
        use_parallel_residual=False,
        rotary_pct=1.0,
        rotary_emb_base=500,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        layer_norm_eps=1e-6,
    ),
    "gpt-neox interpolated": lambda: GPTNeoXConfig(
        **LLAMA,
        **NONE,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "bloom": lambda: BloomConfig(**BLOOM, **NONE, n_head=4),
    "bloom with six heads, untied": lambda: BloomConfig(
        **BLOOM | {"hidden_size": 48}, **NONE, n_head=6, tie_word_embeddings=False, layer_norm_epsilon=1e-6
    ),
    "bloom with residuals after the norm": lambda: BloomConfig(
        **BLOOM, **NONE, n_head=4, apply_residual_connection_post_layernorm=True
    ),
}


def from_hugging_face(load: Path, run: Path, **target: Any) -> WriteResult:
    return convert(load, run, "hf", "mega", target=WriteOptions(**target)).written


def to_hugging_face(run: Path, folder: Path, **target: Any) -> WriteResult:
    return convert(run, folder, "mega", "hf", target=WriteOptions(**target)).written


def save(config: Any, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():  # norms of ones and biases of zeros would hide an exchange
        torch.nn.init.normal_(weight, mean=0.1, std=0.2)
    model.to(dtype).save_pretrained(folder, **how)
    return model


def byte_level(folder: Path) -> None:
    """A tokenizer.json of eight letters, an end and two words of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.BPE({letter: i for i, letter in enumerate("abcdefgh")}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|user|>", "<|end|>"])
    library.save(str(folder / "tokenizer.json"))


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    entries = safetensors_io.read_header(folder / "model.safetensors").entries
    return {name: (f"{e.dtype} {e.shape}", e.values().tobytes()) for name, e in entries.items()}


def logits(model: Any, token_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token_BS).logits
    return logits


def spec_logits(source: CheckpointSource, token_BS: torch.Tensor) -> torch.Tensor:
    """Run the reference forward on an opened checkpoint of float32 weights, (B, S, vocabulary)."""
    model = build_model(Runtime.single_process(source.spec))
    fill_weights(model, lambda name, slab: np.array(source.read_box(MODEL, name, slab)))
    rows, length = token_BS.shape
    with torch.no_grad():
        position_T = torch.arange(length).repeat(rows)
        logits: torch.Tensor = model(token_BS.flatten(), position_T, PackedAttention(rows, length))
    return logits.unflatten(0, (rows, length))[..., : source.spec.vocab]


def build_for_inference(checkpoint: Checkpoint) -> Decoder:
    model = build_model(Runtime.single_process(checkpoint.spec))
    fill_weights(model, checkpoint.model_slab)
    return model


def mega_logits(checkpoint: Checkpoint, token_BS: torch.Tensor) -> torch.Tensor:
    rows, length = token_BS.shape
    with torch.no_grad():
        logits = build_for_inference(checkpoint)(
            token_BS.flatten(), torch.arange(length).repeat(rows), PackedAttention(rows, length)
        )
    return logits[:, : checkpoint.spec.vocab].unflatten(0, (rows, length))
