"""Random data cases, and the dataset files that they name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_train.data.splits import parse_split, split_ranges

Case = dict[str, Any]
KINDS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "float32", "float64")
SEPARATORS = (",", ", ", "/", " ", ";")


def draw_cases(folder: Path, seed: int = 1234) -> dict[str, list[Any]]:
    """All cases; the files they name are written."""
    rng = random.Random(seed)
    for name in ("ours", "theirs", "corpora"):
        (folder / name).mkdir()
    written = [_dataset(folder, rng, number) for number in range(60)]
    corpora = [_corpus(folder, rng, number) for number in range(14)]
    return {
        "written": written,
        "merged": [_draw_merge(rng, number, written) for number in range(16)],
        "read": [_read(folder, rng, case) for case in written if case["ids"]],
        "samples": [_samples(rng, number, corpora) for number in range(400)],
        "cuts": [_cut(rng) for _ in range(40)],
        "greedy": [_greedy(rng) for _ in range(30)],
        "blends": [_blend(rng, number, corpora) for number in range(150)],
        "words": [_words(rng) for _ in range(100)],
        "splits": [_split(rng) for _ in range(3000)],
        "masks": [_mask(rng) for _ in range(150)],
        "dtypes": [None, 1, 255, 65_499, 65_500, 65_501, 65_536, 250_000],
        "courses": [_course(rng) for _ in range(400)],
        "batches": [_batch(rng) for _ in range(200)],
        "scales": [_scale(rng) for _ in range(80)],
    }


def write(prefix: Path, case: Case) -> None:
    """A dataset of ours as the case says it."""
    ids, lengths = np.array(case["ids"], case["dtype"]), list(itertools.chain(*case["documents"]))
    parts = iter(np.split(ids, np.cumsum(lengths)[:-1]) if lengths else [])
    modes = iter(case["modes"] or [0] * len(lengths))
    with IndexedWriter(prefix, case["dtype"], multimodal=case["modes"] is not None) as out:
        for document in case["documents"]:
            for _ in document:
                out.add(next(parts), next(modes))
            out.end_document()


def _dataset(folder: Path, rng: random.Random, number: int) -> Case:
    dtype = rng.choice(KINDS)
    documents = [
        [rng.choice((0, 1, rng.randint(1, 30))) for _ in range(rng.choice((0, 1, 1, 3)))]
        for _ in range(rng.choice((1, 2, 12)))
    ]
    lengths = list(itertools.chain(*documents))
    limits = np.iinfo(dtype if "int" in dtype else "int8")
    case = {
        "ours": f"ours/{number}",
        "theirs": f"theirs/{number}",
        "dtype": dtype,
        "documents": documents,
        "ids": [rng.randint(limits.min, limits.max) for _ in range(sum(lengths))],
        "modes": [rng.randint(0, 5) for _ in lengths] if rng.random() < 0.3 else None,
        "whole": rng.random() < 0.5,
    }
    write(folder / case["ours"], case)
    return case


def _draw_merge(rng: random.Random, number: int, written: Sequence[Case]) -> Case:
    first = rng.choice(written)
    dtype, multimodal = first["dtype"], first["modes"] is not None
    alike = [case for case in written if case["dtype"] == dtype and (case["modes"] is not None) == multimodal]
    parts = rng.choices(alike, k=rng.randint(1, 4))
    return {
        "theirs": f"theirs/merged{number}",
        "dtype": dtype,
        "multimodal": multimodal,
        "parts": [part[rng.choice(("ours", "theirs"))] for part in parts],
    }


def _read(folder: Path, rng: random.Random, case: Case) -> Case:
    lengths = list(itertools.chain(*case["documents"]))
    pieces = []
    for _ in range(8):
        sequence = rng.randrange(len(lengths))
        offset = rng.randint(0, lengths[sequence])
        pieces.append((sequence, offset, rng.choice((None, rng.randint(0, lengths[sequence] - offset)))))
    return {
        "ours": case["ours"],
        "multimodal": case["modes"] is not None,
        "mmap": rng.random() < 0.7,
        "pieces": pieces,
    }


def _corpus(folder: Path, rng: random.Random, number: int) -> Case:
    """Documents of one sequence, of odd lengths: none, one token, many samples long."""
    draws = (lambda: 0, lambda: 1, lambda: rng.randint(2, 20), lambda: rng.randint(50, 300))
    weights = rng.choice(((1, 1, 8, 2), (0, 0, 1, 0), (5, 1, 1, 1), (0, 1, 0, 0), (1, 2, 3, 0)))
    lengths = [rng.choices(draws, weights)[0]() for _ in range(rng.choice((7, 40, 120)))] + [9]
    case: Case = {
        "prefix": f"corpora/{number}",
        "dtype": rng.choice(("uint16", "int32")),
        "documents": [[length] for length in lengths],
        "ids": [rng.randrange(60_000) for _ in range(sum(lengths))],
        "modes": None,
    }
    write(folder / case["prefix"], case)
    return {"prefix": case["prefix"], "lengths": lengths}


def _samples(rng: random.Random, number: int, corpora: Sequence[Case]) -> Case:
    while True:
        corpus, length = rng.choice(corpora), rng.choice((2, 3, 8, 17, 64))
        lengths = corpus["lengths"]
        first = rng.choice((0, 0, rng.randrange(len(lengths))))
        last = rng.choice((len(lengths), rng.randint(first + 1, len(lengths))))
        tokens, extra, drop = sum(lengths[first:last]), rng.random() < 0.7, rng.random() < 0.7
        wanted = rng.choice((None, 1, rng.randint(1, 30), int(tokens / length * rng.uniform(0.5, 7)) + 1))
        if tokens > 1 and (wanted is not None or (tokens - extra) // length > 0):
            break
    return {
        "prefix": corpus["prefix"],
        "range": (first, last),
        "samples": wanted,
        "length": length,
        "seed": rng.choice((0, 1234, rng.randrange(1 << 32))),
        "use": rng.choice(("train", "valid", "test")),
        "extra": extra,
        "drop": drop,
        "mmap": rng.random() < 0.7,
        "cache": f"samples{number}",
        "shown": [0, 1, 2, 3, rng.randrange(500), rng.randrange(500)],
    }


def _cut(rng: random.Random) -> Case:
    """Documents of millions of tokens: a float32 no longer counts them one by one."""
    lengths = [rng.choice((0, 1, rng.randrange(1 << 10), rng.randrange(1 << 26))) for _ in range(9)] + [9999]
    epochs = rng.randint(1, 4)
    return {
        "lengths": lengths,
        "documents": [number for _ in range(epochs) for number in rng.sample(range(10), 10)],
        "length": rng.choice((1023, 2048, 8192)),
        "epochs": epochs,
        "drop": rng.random() < 0.5,
        "extra": rng.random() < 0.7,
    }


def _greedy(rng: random.Random) -> Case:
    count, is_complete = rng.choice((1, 2, 3, 20, 90, 254, 255, 256, 600)), rng.random() < 0.4
    kinds = (
        lambda: 1,
        lambda: rng.choice((1, 2, 3)),
        lambda: 10 ** -rng.uniform(0, 6),
        rng.random,
    )
    weight = rng.choice(kinds)
    most = max(5, 20_000 // count)
    weights = [rng.choice((1, 5, rng.randint(1, most))) if is_complete else weight() for _ in range(count)]
    return {"all": is_complete, "weights": weights, "size": rng.choice((1, 10, 1000, 30_000))}


def _blend(rng: random.Random, number: int, corpora: Sequence[Case]) -> Case:
    split = rng.choice((None, "80,20,0", "7/2/1", "1,0,0", "0.5,0.3,0.2", "60 40"))
    weighed = rng.random() < 0.7
    # of a part without a token theirs makes epochs for ever
    large = [corpus for corpus in corpora if all(_tokens(corpus, split or "1") > 1)]

    def words() -> list[str]:
        result = []
        for corpus in rng.choices(large, k=rng.choice((1, 1, 2, 3, 6))):
            if weighed:
                result.append(str(rng.choice((1, 0.5, round(rng.random(), 4), 0.01, 1e-3))))
            result.append(corpus["prefix"])
        return result

    size = rng.choice((12, 40, 200, 2000))
    sizes: list[int | None] = [rng.randint(1, size), rng.randint(1, size), rng.randint(1, size)]
    if not weighed:
        sizes = [rng.choice((None, wanted)) for wanted in sizes]
    return {
        "words": [words()] if split else [words(), words(), rng.choice(([], words()))],
        "split": split,
        "sizes": sizes,
        "length": rng.choice((4, 8, 16)),
        "seed": rng.randrange(1 << 31),
        "cache": f"blends{number}",
        "shown": [0, 1, 2, 7, rng.randrange(200)],
    }


def _tokens(corpus: Case, split: str) -> np.ndarray:
    """Of each use that has a share."""
    ranges = itertools.compress(split_ranges(split, len(corpus["lengths"])), parse_split(split))
    return np.array([sum(corpus["lengths"][begin:end]) for begin, end in ranges])


def _words(rng: random.Random) -> list[str]:
    choices = ("0.3", "1", "1e-3", "a", "b/c", "2", "d_3", " e ")
    return rng.choices(choices, k=rng.randint(1, 6))


def _split(rng: random.Random) -> Case:
    kinds = (
        lambda: str(rng.randint(0, 1000)),
        lambda: f"{rng.random():.3f}",
        lambda: f"{rng.random():.17f}",
        lambda: rng.choice(("0", "0.0", "1.", ".5", "100")),
    )
    kind = rng.choice(kinds)
    text = rng.choice(SEPARATORS).join(kind() for _ in range(rng.choice((1, 2, 3, 3, 3, 3, 4))))
    sequences = rng.choice((1, 2, 3, 10, rng.randrange(1000), rng.randrange(10**7), rng.randrange(1 << 40)))
    return {"split": text, "sequences": sequences}


def _mask(rng: random.Random) -> Case:
    eod, often = rng.choice((0, 3, 50_256)), rng.choice((0.0, 0.05, 0.5, 1.0))
    return {
        "tokens": [eod if rng.random() < often else rng.randrange(9) for _ in range(rng.randint(1, 40))],
        "eod": eod,
        "reset_positions": rng.random() < 0.5,
        "reset_attention": rng.random() < 0.5,
        "eod_mask_loss": rng.random() < 0.5,
    }


def _course(rng: random.Random) -> Case:
    decay, peak = rng.choice((1, 2, 100, rng.randint(2, 10**9))), rng.uniform(1e-6, 1e-2)
    warmup = rng.choice((0, 0, rng.randrange(decay), rng.uniform(0, decay * 0.99)))
    style = rng.choice(("constant", "linear", "cosine", "inverse-square-root", "WSD", "WSD"))
    growth = rng.choice(("constant", "linear", "cosine"))
    start = rng.choice((0.0, rng.uniform(0, 0.1)))
    anneal = rng.randint(1, max(1, int(decay - warmup)))
    near = [0, 1, int(warmup), int(warmup) + 1, decay - anneal, decay - 1, decay, decay + 1, 2 * decay]
    group = {"max_lr": rng.uniform(1e-5, 1e-2), "min_lr": rng.uniform(0, 1e-5)}
    return {
        "options": {
            "init_lr": rng.choice((0.0, peak * rng.random())),
            "max_lr": peak,
            "min_lr": rng.choice((0.0, peak * rng.random())),
            "lr_warmup_steps": warmup,
            "lr_decay_steps": decay,
            "lr_decay_style": style,
            "start_wd": start,
            "end_wd": start if growth == "constant" else start + rng.random(),
            "wd_incr_steps": rng.randint(1, 10**6),
            "wd_incr_style": growth,
            "wsd_decay_steps": anneal if style == "WSD" else None,
            "lr_wsd_decay_style": rng.choice(("linear", "cosine", "exponential", "minus_sqrt")),
        },
        "group": group | {"wd_mult": rng.choice((0.0, 1.0))},
        "at": [*near, *(rng.randint(0, decay) for _ in range(30)), rng.randrange(2 * 10**6)],
    }


def _batch(rng: random.Random) -> Case:
    micro, dp = rng.choice((1, 2, 3)), rng.choice((1, 2, 5))
    unit = micro * dp if rng.random() < 0.6 else rng.randint(1, 4)
    start, increment = unit * rng.randint(1, 5), unit * rng.randint(1, 5)
    full = start + increment * rng.choice((0, 1, 3, 10, 40))
    ramp = [start, increment, rng.choice((0, 1, 7, rng.randrange(3000)))]
    return {
        "ramp": rng.choice((None, ramp, ramp, ramp)),
        "full": full,
        "micro": micro,
        "dp": dp,
        "decrease": rng.random() < 0.4,
    }


def _scale(rng: random.Random) -> Case:
    initial = rng.choice((2.0**32, 65536.0, 1.0, 1000.0, 12345.678, rng.uniform(1, 1e6)))
    often = rng.choice((0.02, 0.3, 0.9))
    return {
        "initial": initial,
        "least": rng.choice((1.0, 0.1, initial / 2, initial)) if initial > 1 else 1.0,
        "window": rng.choice((1, 2, 10, 50)),
        "hysteresis": rng.choice((1, 2, 3)),
        "overflows": [rng.random() < often for _ in range(250)],
    }
