import random

import numpy as np
import pytest
import torch

import mega_eval.scorer
from mega_eval.scorer import Model
from mega_eval.windows import Window, ids
from mega_model.attend import Packed
from mega_model.build import build, fill
from mega_model.init import initial_values
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.errors import FormatError
from mega_schema.spec import gpt, llama

# 61 tokens are padded to 128 columns, which a score must not see
SPECS = {
    "gpt": gpt(layers=2, hidden=32, heads=4, vocab=61, context=24, init_std=0.3),
    "llama": llama(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=24, init_std=0.3),
}


def decoder_of(spec):
    decoder = build(spec, Runtime.alone(spec))
    fill(decoder, initial_values(table(spec), seed=3))
    return decoder


def some_windows(seed, count=13):
    rng = random.Random(seed)
    windows = []
    for _ in range(count):
        size = rng.randint(2, 25)
        windows.append(Window(ids([rng.randrange(61) for _ in range(size)]), rng.randint(0, size - 1)))
    return windows


@torch.inference_mode()
def naive(decoder, window):
    """ln P and first choice of the targets, from a whole forward pass over the window alone, in float64."""
    n = window.read
    logits = decoder(torch.as_tensor(window.tokens[:-1]), torch.arange(n), Packed(rows=1, length=n))
    log = logits[:, : decoder.spec.vocab].double().log_softmax(-1)
    target = torch.as_tensor(window.tokens[1:])
    kept = slice(n - window.scored, n)
    return log[torch.arange(n), target][kept].numpy(), (log.argmax(-1) == target)[kept].numpy()


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("rows", [1, 4, 32])
def test_scores_are_a_log_softmax_over_the_whole_sequence_whatever_the_batch_size(family, rows):
    decoder, windows = decoder_of(SPECS[family]), some_windows(seed=5)
    answers = Model(decoder, rows=rows).score(windows)
    assert len(answers) == len(windows)
    for window, answer in zip(windows, answers, strict=True):
        log, best = naive(decoder, window)
        assert answer.log == pytest.approx(log, abs=2e-5)
        assert (answer.best == best).all()


def test_first_choices_are_found_where_there_are_some():
    decoder = decoder_of(SPECS["gpt"])
    context = ids([4, 8, 15, 16, 23, 42])
    position = torch.arange(6)
    choice = decoder(torch.as_tensor(context), position, Packed(rows=1, length=6))[-1, :61].argmax().item()
    hit, miss = (Window(ids([*context, token]), 1) for token in (choice, (choice + 1) % 61))
    first, second = Model(decoder).score([hit, miss])
    assert (first.best.tolist(), second.best.tolist()) == ([True], [False])


def test_logits_taken_in_parts_give_the_same_scores(monkeypatch):
    decoder, windows = decoder_of(SPECS["gpt"]), some_windows(seed=6)
    whole = Model(decoder).score(windows)
    monkeypatch.setattr(mega_eval.scorer, "LOGITS", 61 * 3)
    for one, other in zip(whole, Model(decoder).score(windows), strict=True):
        assert one.log == pytest.approx(other.log, abs=2e-5)
        assert (one.best == other.best).all()


def test_only_scored_positions_reach_the_head(monkeypatch):
    decoder, windows = decoder_of(SPECS["gpt"]), some_windows(seed=7)
    seen = []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda x: seen.append(len(x)) or logits(x))
    Model(decoder, rows=4).score(windows)
    assert sum(seen) == sum(window.scored for window in windows)


def test_progress_counts_the_windows_that_score_something():
    windows, seen = some_windows(seed=8), []
    model = Model(decoder_of(SPECS["gpt"]), rows=4, report=lambda *counts: seen.append(counts))
    model.score(windows)
    total = sum(window.scored > 0 for window in windows)
    assert seen == [(min(done, total), total) for done in range(4, total + 4, 4)]


def test_weights_that_are_not_numbers_are_an_error_that_names_the_checkpoint():
    decoder = decoder_of(SPECS["gpt"])
    with torch.no_grad():
        decoder.final_norm.weight[3] = float("nan")
    with pytest.raises(FormatError, match="RUN/iter_0000007: the model's scores are not finite"):
        Model(decoder, where="RUN/iter_0000007").score(some_windows(seed=9))


def test_a_model_that_has_nothing_to_score_answers_with_nothing():
    answers = Model(decoder_of(SPECS["gpt"])).score([Window(ids([1, 2]), 0)])
    assert [np.size(answer.log) for answer in answers] == [0]
