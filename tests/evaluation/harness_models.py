"""Tiny models of `transformers` with a trained byte-level tokenizer, and their conversion for mega-eval."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

CONTEXT = 48
WORDS = [
    *(
        "the",
        "a",
        "of",
        "harbour",
        "boat",
        "river",
        "captain",
        "window",
        "morning",
        "letter",
        "garden",
        "old",
    ),
    *("quiet", "green", "small", "looked", "walked", "asked", "slowly", "toward", "behind", "under", "but"),
]


def write_sentences(count: int, seed: int = 3) -> list[str]:
    """Sentences of random words, some with quotes and line breaks."""
    rng = random.Random(seed)
    marks = [".", ".", " ?", " !", ' , " yes "', " ;"]
    return [
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 30))).capitalize() + rng.choice(marks)
        for _ in range(count)
    ]


def save_tokenizer(folder: Path, *, bos: bool) -> int:
    """Train a byte-level tokenizer, with a token before every text if `bos`; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    specials = ["<s>", "</s>"] if bos else ["<|endoftext|>"]
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(write_sentences(200, seed=1), trainer)
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[-1],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(library.get_vocab_size())


def save_model(folder: Path, family: str) -> None:
    """Save a random model and its tokenizer as `transformers` does."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    vocab = save_tokenizer(folder, bos=family == "llama")
    configs: dict[str, Any] = {
        "gpt2": lambda: GPT2Config(
            vocab_size=vocab,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "llama": lambda: LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=0,
            eos_token_id=1,
        ),
    }
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(configs[family]()).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=0.02, std=0.25)
    model.save_pretrained(folder)


def convert_model(folder: Path, run: Path) -> None:
    """Convert a saved model to our format."""
    from mega_ckpt.operations.convert import convert

    convert(folder, run, "hf", "mega")
