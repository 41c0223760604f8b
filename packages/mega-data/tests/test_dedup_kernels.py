"""The C++ kernels of dedup against their definition in numpy, and the bits of the keys on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mega_data.dedup.kernels import REFERENCE, HashKernels, load_kernels
from mega_data.dedup.kernels.cpp import CppKernels
from mega_data.dedup.minhash import band_keys, minhash_signatures
from mega_data.dedup.presets import PRESETS
from mega_data.dedup.shingles import Shingles
from mega_schema.cpp_library import CompileError

TEXTS = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab9 7,\nZ"), max_size=40),
        st.text(st.sampled_from("ab1٣ éÉ\u0301İΣς我カﾊ\U0001f600\U00020000\ud800 \n\u2028'"), max_size=40),
        st.text(max_size=30),
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def cpp() -> HashKernels:
    try:
        CppKernels()
    except CompileError as error:
        pytest.skip(f"no kernels in C++ here: {error}")
    return load_kernels()


def signatures(name: str, texts: list[str], kernels: HashKernels, piece: int) -> np.ndarray:
    preset = PRESETS[name]
    parts = Shingles(preset, kernels).keys_in_pieces(texts, piece)
    return minhash_signatures(parts, len(texts), preset.bins, kernels)


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
@settings(max_examples=100, deadline=None)
@given(texts=TEXTS)
@example(texts=["x" * 5000 + " a b c d e"])  # a word with more characters than there are powers
@example(texts=["", "\n\n", "1 2 33 444 5 6", "a我b9我 c d e f"])
def test_cpp_kernels_equal_numpys_in_every_bit(cpp: HashKernels, name: str, texts: list[str]) -> None:
    shingles = Shingles(PRESETS[name], REFERENCE), Shingles(PRESETS[name], cpp)
    by_definition, by_cpp = (part.keys(texts) for part in shingles)
    assert by_cpp.dtype == by_definition.dtype
    assert by_cpp.tolist() == by_definition.tolist()
    for piece in (1 << 18, 7):
        table = signatures(name, texts, cpp, piece)
        assert table.tolist() == signatures(name, texts, REFERENCE, piece).tolist()


@pytest.mark.parametrize(
    ("name", "last_keys"),
    [
        ("datatrove", [0xDB60E28CBBCD7485, 0xD25C1349C992C951]),
        ("megatron", [0x99301409AA3726C4, 0x1225EF38EE518B63]),
    ],
)
def test_band_keys_have_the_bits_of_earlier_versions(name: str, last_keys: list[int]) -> None:
    """Keys of an earlier run are compared with new ones, see `dedup --against`."""
    preset = PRESETS[name]
    texts = [
        "The 2 quick brown foxes jumped over 13 lazy dogs in Ankara",
        "Bir gün İstanbul'da çok güzel 我们 ev",
    ]
    for kernels in (REFERENCE, load_kernels()):
        keys = band_keys(signatures(name, texts, kernels, 1 << 18), preset.bands)
        assert keys[:, -1].tolist() == last_keys


def test_numpy_hashes_where_no_compiler_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert load_kernels.__wrapped__() is REFERENCE
