"""The names of the formats, apart from what reads them: the command line asks before anything is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# name on the command line -> module of this folder, which has a FORMAT, and what it is
NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mega": ("mega.format", "a checkpoint of ours, or a run's folder"),
        "hf": ("huggingface.format", "a Hugging Face folder"),
        "meta": ("meta.format", "Meta's folder of a Llama: params.json, consolidated.00.pth"),
        "fairseq": ("fairseq.format", "fairseq's megatron_11b: model-model_part-0.pt, dict.txt"),
        "bigscience": (
            "bigscience.format",
            "a step of Megatron-DeepSpeed's, or a run's folder: BLOOM as it was trained",
        ),
        "llama2c": ("llama2c.format", "a model's .bin of llama2.c"),
        "megatron": ("megatron.format", "a classic checkpoint of Megatron-LM's, or a run's folder"),
        "megatron-core": ("megatron.core", "the same, in the names of Megatron's core class"),
        "torch_dist": (
            "torch_dist.format",
            "a folder of Megatron core's, written by torch.distributed.checkpoint",
        ),
    }
)
READ_ONLY = frozenset({"fairseq", "bigscience", "llama2c"})
WRITTEN = tuple(name for name in NAMES if name not in READ_ONLY)
