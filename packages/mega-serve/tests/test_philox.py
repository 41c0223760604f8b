"""Philox against the known answers of its authors' library, Random123."""

from __future__ import annotations

import numpy as np
import pytest

from mega_serve.execution.philox import draw_uniforms, philox4x32

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert tuple(words[0].tolist()) == wanted


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(0)
    counter = rng.integers(0, 2**32, (100, 4), np.uint32)
    key = rng.integers(0, 2**32, (100, 2), np.uint32)
    whole = philox4x32(counter, key)
    for i in range(100):
        assert np.array_equal(philox4x32(counter[i : i + 1], key[i : i + 1])[0], whole[i])


def test_uniforms_are_the_first_53_bits_of_the_counter() -> None:
    number = draw_uniforms([0], [0], [0])[0]
    assert number == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_seed_sequence_and_position_each_change_the_number() -> None:
    numbers = draw_uniforms([7, 8, 7, 7, 7 + 2**40], [0, 0, 1, 0, 0], [5, 5, 5, 6, 5])
    assert len(set(numbers.tolist())) == 5


def test_uniforms_are_uniform() -> None:
    size = 200_000
    numbers = draw_uniforms(np.full(size, 3), np.zeros(size), np.arange(size))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    chi_square = ((counts - size / 256) ** 2 / (size / 256)).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / size**0.5
