"""Round trips through all pairs of writable formats are bitwise exact.

Models are random. A format must refuse an unsupported model before it writes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_ckpt.formats.interface import WriteOptions
from mega_ckpt.formats.registry import NAMES, format_of
from mega_ckpt.name_maps.alias import whole_slab
from mega_ckpt.operations.convert import convert
from mega_schema.checkpoint.reader import DTYPES, MODEL, Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec import ModelSpec, gpt, llama

WRITTEN = [name for name in NAMES if format_of(name).write is not None]
# of a format that is cut; what Meta writes is split over tp alone, and does not say how long a context is
CUT = {"megatron": Layout(tp=2, pp=2), "megatron-core": Layout(tp=2, pp=2), "meta": Layout(tp=2)}
SEEDS = (0, 1, 2)


def random_spec(seed: int) -> ModelSpec:
    """A small model that some other program has too."""
    rng = np.random.default_rng(seed)
    pick: Any = rng.choice
    heads, width = int(pick([4, 8])), int(pick([4, 6]))
    size = {
        "layers": 2 * int(pick([1, 2])), "hidden": heads * width, "heads": heads, "max_seq_len": 16,
        "vocab": 2 * int(rng.integers(20, 45)), "vocab_multiple": 8,
    }  # fmt: skip
    if seed % 2:
        ffn, kv = 4 * int(rng.integers(3, 9)), int(pick([2, heads]))
        return llama(**size, ffn=ffn, kv_heads=kv, tied=bool(pick([True, False])))
    return gpt(**size, tied=bool(pick([True, False])), activation=str(pick(["gelu_tanh", "gelu_erf"])))


@pytest.mark.parametrize("second", WRITTEN)
@pytest.mark.parametrize("first", WRITTEN)
def test_what_goes_through_two_formats_comes_back_bit_for_bit(
    random_whole: Any, save_whole: Any, tmp_path: Path, first: str, second: str
) -> None:
    tensor_count = 0
    for seed in SEEDS:
        spec, folder = random_spec(seed), tmp_path / str(seed)
        whole = random_whole(spec, "BF16" if seed == 2 else "F32", seed=seed)
        save_whole(folder / "run", spec, whole, dtype="BF16" if seed == 2 else "F32")
        path, have = folder / "run", "mega"
        try:
            for number, want in enumerate((first, second, "mega")):
                target = WriteOptions(layout=CUT.get(want, WHOLE))
                convert(path, folder / str(number), have, want, target=target)
                path, have = folder / str(number), want
        except ConfigError:
            assert not (folder / str(number)).exists()
            continue
        tensor_count += 1
        back = Checkpoint.open(path)
        # how much a vocabulary is padded is no part of a model, and not every format says how it began
        expected_spec = replace(back.spec, vocab_multiple=8, init_std=spec.init_std)
        assert (
            replace(expected_spec, max_seq_len=16) if "meta" in (first, second) else expected_spec
        ) == spec
        tensors = back.tensors[MODEL]
        assert tensors.keys() == whole[MODEL].keys()
        for name, array in whole[MODEL].items():
            assert (DTYPES[tensors[name].dtype], tensors[name].shape) == (array.dtype, array.shape)
            assert back.read_raw(MODEL, name, whole_slab(array.shape)).tobytes() == array.tobytes(), name
    assert tensor_count, "no model that both formats have: the pair was not tried"
