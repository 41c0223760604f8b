"""Detect the format of a checkpoint from the names of its files, without opening one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

# patterns of files that identify a format, tried in this order
FORMAT_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mega": ("manifest.json", "iter_*/manifest.json", ".iter_*.replaced/manifest.json"),
        "hf": ("config.json",),
        "megatron": ("mp_rank_*/model*_rng.pt", "*/mp_rank_*/model*_rng.pt"),
        "bigscience": ("layer_01-model_00-model_states.pt", "global_step*/layer_01-model_00-model_states.pt"),
        "meta": ("params.json",),
        "fairseq": ("*-model_part-0.pt",),
        "torch_dist": (".metadata", "iter_*/.metadata", "release/.metadata"),
    }
)
FORMAT_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "mega": "a checkpoint of Mega",
        "hf": "a Hugging Face folder",
        "megatron": "a Megatron-LM checkpoint",
        "bigscience": "a Megatron-DeepSpeed checkpoint",
        "meta": "a Llama folder of Meta",
        "fairseq": "a fairseq checkpoint",
        "torch_dist": "a Megatron core checkpoint (torch_dist)",
    }
)


def detect_format(path: Path) -> str | None:
    """Return the format's name in `mega-ckpt convert --from`, or None if the files match no format."""
    for name, marks in FORMAT_FILES.items():
        if any(next(path.glob(mark), None) is not None for mark in marks):
            return name
    return None


def conversion_command(source: Path, format_name: str) -> str:
    """Return the command that converts a checkpoint of this format to one of Mega."""
    return f"mega-ckpt convert --from {format_name} --to mega --load {source} --save CONVERTED"
