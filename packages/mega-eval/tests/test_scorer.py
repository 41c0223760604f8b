import copy
import random
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

import mega_eval.scorer
from mega_eval.models.decoder_model import DecoderModel
from mega_eval.models.interface import ModelIdentity
from mega_eval.models.session import EvaluationSession
from mega_eval.scorer import ModelScorer
from mega_eval.windows import Window, as_tokens
from mega_model.attention_backends import PackedAttention
from mega_model.batch_invariant_attention import BatchInvariantAttention
from mega_model.build import load_model
from mega_model.init import initial_values
from mega_model.kernels import REFERENCE
from mega_model.kernels.batch_invariant import build_kernels
from mega_model.kernels.numba import load_kernels
from mega_schema.arch import table
from mega_schema.errors import ConfigError, FormatError
from mega_schema.spec import gpt, llama

# 61 tokens are padded to 128 columns, which a score must not see
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "max_seq_len": 24, "init_std": 0.3}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=48),
    "mistral": llama(**SIZES, kv_heads=2, ffn=48, sliding_window=7),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True),
}


def build_decoder(spec, **options):
    return load_model(spec, initial_values(table(spec), seed=3), **options)


def open_session(decoder, *, progress=lambda total: nullcontext(lambda scored: None), **options):
    identity = ModelIdentity(
        source="RUN/iter_0000007", sha256="", tokenizer_sha256="", iteration=7, dtype="float32", device="cpu"
    )
    model = DecoderModel(ModelScorer(decoder, **options), None, None, identity)
    return EvaluationSession(model, progress=progress)


def random_windows(seed, count=13):
    rng = random.Random(seed)
    windows = []
    for _ in range(count):
        size = rng.randint(2, 25)
        windows.append(Window(as_tokens([rng.randrange(61) for _ in range(size)]), rng.randint(0, size - 1)))
    return windows


def branching_windows(seed, count=40):
    """Return windows of which many begin alike, some are equal, and some are prefixes of others."""
    rng = random.Random(seed)
    stems = [[rng.randrange(61) for _ in range(24)] for _ in range(3)]
    windows = []
    for _ in range(count):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, 20)] + [rng.randrange(61) for _ in range(rng.randint(1, 5))]
        windows.append(Window(as_tokens(tokens), rng.randint(1, len(tokens) - 1)))
    return windows


@torch.inference_mode()
def score_in_float64(decoder, window):
    """Return ln P and greedy choice of the targets, from a forward pass in float64 over the window alone."""
    decoder = copy.deepcopy(decoder).double()
    n = window.input_length
    logits = decoder(torch.as_tensor(window.tokens[:-1]), torch.arange(n), PackedAttention(rows=1, length=n))
    logprobs = logits[:, : decoder.spec.vocab].log_softmax(-1)
    target = torch.as_tensor(window.tokens[1:])
    scored = slice(n - window.target_length, n)
    is_greedy = logprobs.argmax(-1) == target
    return logprobs[torch.arange(n), target][scored].numpy(), is_greedy[scored].numpy()


BATCHES = [
    {"batch_size": 1},
    {"batch_size": 4},
    {"max_tokens": 30},
    {"max_tokens": 70, "share_prefixes": False},
    {},
]


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("options", BATCHES, ids=str)
def test_scores_are_a_log_softmax_over_the_whole_sequence_whatever_the_batches(family, options):
    decoder = build_decoder(SPECS[family])
    windows = random_windows(seed=5) + branching_windows(seed=5)
    scores = open_session(decoder, **options).score(windows)
    assert len(scores) == len(windows)
    for window, score in zip(windows, scores, strict=True):
        logprobs, is_greedy = score_in_float64(decoder, window)
        assert score.logprobs == pytest.approx(logprobs, abs=2e-5)
        assert (score.is_greedy == is_greedy).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SPECS)
def test_batch_invariant_scores_have_the_bits_of_a_training_forward_pass(family, dtype):
    """In any order, in batches of any size, and whether or not prefixes are shared."""
    kernels = build_kernels(REFERENCE, load_kernels())
    decoder = build_decoder(SPECS[family], dtype=dtype, kernels=kernels)
    windows = branching_windows(seed=11)
    rng = random.Random(12)
    wanted = [score_by_training(decoder, window).tolist() for window in windows]
    for options in BATCHES:
        order = rng.sample(range(len(windows)), len(windows))
        scores = open_session(decoder, **options).score([windows[number] for number in order])
        assert [score.logprobs.tolist() for score in scores] == [wanted[number] for number in order]


@torch.inference_mode()
def score_by_training(decoder, window):
    """Return ln P of the targets as mega-train --batch-invariant computes it."""
    n = window.input_length
    token, target = (torch.as_tensor(x) for x in (window.tokens[:-1], window.tokens[1:]))
    attend = BatchInvariantAttention(load_kernels(), 1, n)
    losses = decoder.token_losses(token, torch.arange(n), attend, target)
    return -losses[n - window.target_length :].double().numpy()


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_pass_that_does_not_fit_in_memory_is_halved_until_it_does(monkeypatch, kind):
    decoder = build_decoder(SPECS["gpt"])
    windows = branching_windows(seed=13)
    expected = open_session(decoder).score(windows)
    hidden_states, sizes = decoder.hidden_states, []

    def refuse_many(token_T, *arguments, **keywords):
        sizes.append(len(token_T))
        if len(token_T) > 50:
            raise kind
        return hidden_states(token_T, *arguments, **keywords)

    monkeypatch.setattr(decoder, "hidden_states", refuse_many)
    scores = open_session(decoder, max_tokens=300).score(windows)
    assert max(sizes) > 150
    assert sum(size > 50 for size in sizes) < 5
    for score, reference in zip(scores, expected, strict=True):
        assert score.logprobs == pytest.approx(reference.logprobs, abs=2e-5)


def test_a_window_that_does_not_fit_in_memory_is_an_error(monkeypatch):
    decoder = build_decoder(SPECS["gpt"])

    def refuse(*arguments, **keywords):
        raise MemoryError

    monkeypatch.setattr(decoder, "hidden_states", refuse)
    with pytest.raises(ConfigError, match="a window of 3 tokens does not fit in memory"):
        open_session(decoder).score([Window(as_tokens([1, 2, 3, 4]), 1)])


def test_an_error_that_is_not_about_memory_is_not_retried(monkeypatch):
    decoder = build_decoder(SPECS["gpt"])

    def fail(*arguments, **keywords):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(decoder, "hidden_states", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        open_session(decoder).score(random_windows(seed=5))


def test_the_last_layer_feeds_forward_only_the_tokens_that_predict_a_target(monkeypatch):
    decoder = build_decoder(SPECS["gpt"])
    windows = [Window(as_tokens([n, *range(20)]), 2) for n in range(30)]
    counts = {"0": [], "1": []}
    for layer, block in decoder.layers.items():
        block.down.register_forward_hook(lambda module, x, y, layer=layer: counts[layer].append(len(y)))
    open_session(decoder).score(windows)
    assert (counts["0"], counts["1"]) == ([600], [60])


def test_the_greedy_choice_is_recognised():
    decoder = build_decoder(SPECS["gpt"])
    context = as_tokens([4, 8, 15, 16, 23, 42])
    position = torch.arange(6)
    greedy = (
        decoder(torch.as_tensor(context), position, PackedAttention(rows=1, length=6))[-1, :61]
        .argmax()
        .item()
    )
    hit, miss = (Window(as_tokens([*context, token]), 1) for token in (greedy, (greedy + 1) % 61))
    first, second = open_session(decoder).score([hit, miss])
    assert (first.is_greedy.tolist(), second.is_greedy.tolist()) == ([True], [False])


def test_logits_in_chunks_give_the_same_scores(monkeypatch):
    decoder = build_decoder(SPECS["gpt"])
    windows = random_windows(seed=6)
    expected = open_session(decoder).score(windows)
    monkeypatch.setattr(mega_eval.scorer, "MAX_LOGITS", 61 * 3)
    for score, reference in zip(open_session(decoder).score(windows), expected, strict=True):
        assert score.logprobs == pytest.approx(reference.logprobs, abs=2e-5)
        assert (score.is_greedy == reference.is_greedy).all()


def test_only_scored_positions_reach_the_head(monkeypatch):
    decoder = build_decoder(SPECS["gpt"])
    windows = random_windows(seed=7)
    positions = []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda x: positions.append(len(x)) or logits(x))
    open_session(decoder, batch_size=4).score(windows)
    assert sum(positions) == sum(window.target_length for window in windows)


def test_progress_counts_the_windows_that_score_something():
    windows = random_windows(seed=8)
    totals, batches = [], []

    def progress(total):
        totals.append(total)
        return nullcontext(batches.append)

    open_session(build_decoder(SPECS["gpt"]), batch_size=4, progress=progress).score(windows)
    total = sum(window.target_length > 0 for window in windows)
    assert (totals, sum(batches)) == ([total], total)
    assert batches == [min(4, total - scored) for scored in range(0, total, 4)]


def test_weights_that_are_not_numbers_are_an_error_that_names_the_checkpoint():
    decoder = build_decoder(SPECS["gpt"])
    with torch.no_grad():
        decoder.final_norm.weight[3] = float("nan")
    with pytest.raises(FormatError, match="RUN/iter_0000007: the model's scores are not finite"):
        open_session(decoder).score(random_windows(seed=9))


def test_a_window_without_targets_has_empty_scores():
    [scores] = open_session(build_decoder(SPECS["gpt"])).score([Window(as_tokens([1, 2]), 0)])
    assert (np.size(scores.logprobs), np.size(scores.is_greedy)) == (0, 0)
