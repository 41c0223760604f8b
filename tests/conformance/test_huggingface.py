"""Models of Hugging Face's `transformers` and ours: the same logits, and every tensor back bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
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

from mega_ckpt import safetensors
from mega_ckpt.convert import convert
from mega_ckpt.formats import Target, Written
from mega_model.attend import Packed
from mega_model.build import build, fill
from mega_model.generate import generate
from mega_model.runtime import Runtime
from mega_model.stage import Decoder
from mega_schema.checkpoint import Checkpoint

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


def from_hugging_face(load: Path, run: Path, **target: Any) -> Written:
    return convert(load, run, "hf", "mega", target=Target(**target)).written


def to_hugging_face(run: Path, folder: Path, **target: Any) -> Written:
    return convert(run, folder, "mega", "hf", target=Target(**target)).written


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


def _save(config: Any, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():  # norms of ones and biases of zeros would hide an exchange
        torch.nn.init.normal_(weight, mean=0.1, std=0.2)
    model.to(dtype).save_pretrained(folder, **how)
    return model


def _tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    entries = safetensors.read(folder / "model.safetensors").entries
    return {name: (f"{e.dtype} {e.shape}", e.values().tobytes()) for name, e in entries.items()}


def _logits(model: Any, token_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(token_BS).logits
    return logits


def _built(checkpoint: Checkpoint) -> Decoder:
    model = build(checkpoint.spec, Runtime.alone(checkpoint.spec))
    fill(model, checkpoint.model_slab)
    return model


def _ours(checkpoint: Checkpoint, token_BS: torch.Tensor) -> torch.Tensor:
    rows, length = token_BS.shape
    with torch.no_grad():
        logits = _built(checkpoint)(
            token_BS.flatten(), torch.arange(length).repeat(rows), Packed(rows, length)
        )
    return logits[:, : checkpoint.spec.vocab].unflatten(0, (rows, length))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_hugging_faces_and_every_tensor_comes_back(case: str, tmp_path: Path) -> None:
    theirs = _save(CASES[case](), tmp_path / "hf")
    there = from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(2))
    wanted = _logits(theirs, token_BS)
    assert wanted.std() > 0.1
    torch.testing.assert_close(
        _ours(Checkpoint.open(tmp_path / "run"), token_BS), wanted, atol=1e-5, rtol=1e-5
    )
    assert there.parameters == theirs.num_parameters()
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True)
    assert type(loaded) is type(theirs)
    assert torch.equal(_logits(loaded.eval(), token_BS), wanted)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_that_transformers_generates(case: str, tmp_path: Path) -> None:
    theirs = _save(CASES[case](), tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.randint(0, 61, (3, 6), generator=torch.Generator().manual_seed(3))
    wanted = theirs.generate(
        token_BS, attention_mask=torch.ones_like(token_BS), max_new_tokens=18, do_sample=False
    )
    model = _built(Checkpoint.open(tmp_path / "run"))
    assert generate(model, token_BS.tolist(), new_tokens=18, top_k=1).rows == wanted.tolist()


@pytest.mark.parametrize("case", ["gpt2", "llama grouped"])
def test_bfloat16_comes_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    _save(CASES[case](), tmp_path / "hf", torch.bfloat16)
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back")
    assert _tensors(tmp_path / "back") == _tensors(tmp_path / "hf")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.bfloat16


def test_a_sharded_folder_reads_as_a_whole_one(tmp_path: Path) -> None:
    _save(CASES["llama grouped"](), tmp_path / "one")
    _save(CASES["llama grouped"](), tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    a, b = (from_hugging_face(tmp_path / name, tmp_path / f"{name}-run").folder for name in ("one", "many"))
    assert (a / "model-00000.safetensors").read_bytes() == (b / "model-00000.safetensors").read_bytes()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", ["gpt2", "qwen 2 tied with a window", "bloom"])
def test_a_folder_of_pickles_reads_as_one_of_safetensors(case: str, zipped: bool, tmp_path: Path) -> None:
    _save(CASES[case](), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    weights = load_file(tmp_path / "one" / "model.safetensors")
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    torch.save({"lr": 0.1}, tmp_path / "pickled" / "training_args.bin")
    shutil.copytree(tmp_path / "pickled", tmp_path / "cut")
    (tmp_path / "cut" / "pytorch_model.bin").unlink()
    where = {name: f"pytorch_model-{i % 2 + 1:05d}-of-00002.bin" for i, name in enumerate(weights)}
    for file in set(where.values()):
        torch.save({n: weights[n] for n in weights if where[n] == file}, tmp_path / "cut" / file)
    index = json.dumps({"metadata": {}, "weight_map": where})
    (tmp_path / "cut" / "pytorch_model.bin.index.json").write_text(index, "utf-8")
    runs = [
        from_hugging_face(tmp_path / name, tmp_path / f"{name}-run").folder
        for name in ("one", "pickled", "cut")
    ]
    one, *others = [(run / "model-00000.safetensors").read_bytes() for run in runs]
    assert others == [one, one]


def test_a_folder_of_several_files_is_loaded_by_transformers(tmp_path: Path) -> None:
    theirs = _save(CASES["qwen 2"](), tmp_path / "hf")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    to_hugging_face(tmp_path / "run", tmp_path / "back", shard=20_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", local_files_only=True).eval()
    token_BS = torch.arange(20)[None]
    assert torch.equal(_logits(loaded, token_BS), _logits(theirs, token_BS))


def _rename(folder: Path, name: Callable[[str], str], more: dict[str, np.ndarray]) -> None:
    """Write the weights again under other names, with others beside them."""
    file = folder / "model.safetensors"
    values = {name(n): np.array(e.values()) for n, e in safetensors.read(file).entries.items()} | more
    announced = [safetensors.Announced(n, "F32", array.shape) for n, array in values.items()]
    header, _ = safetensors.header(announced, {"format": "pt"})
    file.write_bytes(header + b"".join(array.tobytes() for array in values.values()))


MASK, RATES = np.ones((1, 1, 24, 24), np.float32), np.ones(4, np.float32)
OLDER: dict[str, tuple[str, Callable[[str], str], dict[str, np.ndarray]]] = {
    "gpt-2 of OpenAI's: the model inside, with its masks": (
        "gpt2",
        lambda n: n.removeprefix("transformer."),
        {"h.0.attn.bias": MASK, "h.1.attn.masked_bias": RATES[:1]},
    ),
    "the bloom of BigScience": ("bloom", lambda n: n.removeprefix("transformer."), {}),
    "llama with its angles": ("llama", str, {"model.layers.1.self_attn.rotary_emb.inv_freq": RATES}),
    "pythia with masks and angles": (
        "pythia",
        str,
        {
            "gpt_neox.layers.0.attention.bias": MASK,
            "gpt_neox.layers.0.attention.masked_bias": RATES[:1],
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": RATES,
        },
    ),
    "gpt-neox by its names in transformers 5": ("pythia", lambda n: n.replace("embed_out", "lm_head"), {}),
    "a tied head beside the embedding": ("bloom", str, {"lm_head.weight": RATES}),
}


@pytest.mark.parametrize("form", OLDER)
def test_other_forms_of_a_folder_are_read_too(form: str, tmp_path: Path) -> None:
    case, name, more = OLDER[form]
    theirs = _save(CASES[case](), tmp_path / "hf")
    if "lm_head.weight" in more:
        more = {"lm_head.weight": theirs.get_input_embeddings().weight.detach().numpy()}
    _rename(tmp_path / "hf", name, more)
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    token_BS = torch.arange(20)[None]
    torch.testing.assert_close(
        _ours(Checkpoint.open(tmp_path / "run"), token_BS), _logits(theirs, token_BS), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("style", ["rope_theta", "rope_parameters", "rope_scaling"])
def test_both_styles_of_rope_keys_mean_the_same(style: str, tmp_path: Path) -> None:
    _save(CASES["llama grouped"](), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    del config["rope_parameters"]
    config |= {
        "rope_theta": {"rope_theta": 7000.0, "rope_scaling": None},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}},
        "rope_scaling": {"rope_theta": 7000, "rope_scaling": {"type": "default"}},
    }[style]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), "utf-8")
    from_hugging_face(tmp_path / "hf", tmp_path / "run")
    assert Checkpoint.open(tmp_path / "run").spec.rope_base == 7000.0


def test_the_command_converts_and_transformers_loads_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    _save(CASES["gpt2"](), tmp_path / "hf")
    vocab = {letter: i for i, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8}
    library = Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "hf" / "tokenizer.json"))
    for words in (
        ("--from", "hf", "--to", "mega", "--load", "hf", "--save", "run"),
        ("--from", "mega", "--to", "hf", "--load", "run", "--save", "back"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mega_ckpt", "convert", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "with a tokenizer" in done.stdout
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (
        tmp_path / "hf" / "tokenizer.json"
    ).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    assert tokenizer("fade")["input_ids"] == [5, 0, 3, 4]
    assert tokenizer.eos_token_id == 8
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").config.eos_token_id == 8
