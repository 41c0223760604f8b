"""The manifest holds the fields that docs/formats/checkpoint.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mega_schema.spec import ModelSpec

FORMAT = Path(__file__).resolve().parents[2] / "docs/formats/checkpoint.md"


def _table_keys(first_key: str) -> list[str]:
    """The keys in the first column of the table whose first row begins with this key."""
    lines = FORMAT.read_text("utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| `{first_key}`"))
    past = next(i for i in range(begin, len(lines)) if not lines[i].startswith("|"))
    return [key for line in lines[begin:past] for key in re.findall(r"`(\w+)`", line.split("|")[1])]


def test_the_fields_of_a_model_in_the_manifest_are_the_documented_ones(
    small_llama: ModelSpec, random_whole: Any, save_whole: Any, tmp_path: Path
) -> None:
    folder = save_whole(tmp_path / "run", small_llama, random_whole(small_llama))
    model = json.loads((folder / "manifest.json").read_text("utf-8"))["model"]
    assert sorted(_table_keys("family")) == sorted(model)
    renamed = {
        "head_dim": 4,
        "max_seq_len": 8,
        "rope_theta": 1e4,
        "rotary_fraction": 1.0,
        "sliding_window": None,
    }
    assert {key: model[key] for key in renamed} == renamed
