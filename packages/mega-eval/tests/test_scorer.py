import random
from contextlib import nullcontext

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
from mega_model.build import load_model
from mega_model.init import initial_values
from mega_schema.arch import table
from mega_schema.errors import FormatError
from mega_schema.spec import gpt, llama

# 61 tokens are padded to 128 columns, which a score must not see
SPECS = {
    "gpt": gpt(layers=2, hidden=32, heads=4, vocab=61, max_seq_len=24, init_std=0.3),
    "llama": llama(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, max_seq_len=24, init_std=0.3),
}


def build_decoder(spec):
    return load_model(spec, initial_values(table(spec), seed=3))


def open_session(decoder, *, batch_size=16, **options):
    identity = ModelIdentity(
        source="RUN/iter_0000007", sha256="", tokenizer_sha256="", iteration=7, dtype="float32", device="cpu"
    )
    model = DecoderModel(decoder, None, identity, ModelScorer(decoder, batch_size=batch_size))
    return EvaluationSession(model, **options)


def random_windows(seed, count=13):
    rng = random.Random(seed)
    windows = []
    for _ in range(count):
        size = rng.randint(2, 25)
        windows.append(Window(as_tokens([rng.randrange(61) for _ in range(size)]), rng.randint(0, size - 1)))
    return windows


@torch.inference_mode()
def score_in_float64(decoder, window):
    """Return ln P and greedy choice of the targets, from a forward pass over the window alone."""
    n = window.input_length
    logits = decoder(torch.as_tensor(window.tokens[:-1]), torch.arange(n), PackedAttention(rows=1, length=n))
    logprobs = logits[:, : decoder.spec.vocab].double().log_softmax(-1)
    target = torch.as_tensor(window.tokens[1:])
    scored = slice(n - window.target_length, n)
    is_greedy = logprobs.argmax(-1) == target
    return logprobs[torch.arange(n), target][scored].numpy(), is_greedy[scored].numpy()


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_scores_are_a_log_softmax_over_the_whole_sequence_whatever_the_batch_size(family, batch_size):
    decoder = build_decoder(SPECS[family])
    windows = random_windows(seed=5)
    scores = open_session(decoder, batch_size=batch_size).score(windows)
    assert len(scores) == len(windows)
    for window, score in zip(windows, scores, strict=True):
        logprobs, is_greedy = score_in_float64(decoder, window)
        assert score.logprobs == pytest.approx(logprobs, abs=2e-5)
        assert (score.is_greedy == is_greedy).all()


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
