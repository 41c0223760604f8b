import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import mega_eval.models.batch_generator
from mega_eval.generation_plan import plan_batches
from mega_eval.models.batch_generator import BatchGenerator
from mega_eval.models.greedy_continuation import GreedyContinuation, cut_at_stop
from mega_eval.models.interface import GenerationRequest
from mega_eval.scorer import ModelScorer
from mega_model.build import load_model
from mega_model.generate import generate
from mega_model.init import initial_values
from mega_model.token_tree import TokenTree
from mega_schema.arch import table
from mega_schema.errors import ConfigError, RequestError
from mega_schema.spec import gpt, llama
from mega_schema.tokenizer.tokenizer import open_tokenizer

EOD = 40
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "max_seq_len": 40, "init_std": 0.3}
SPECS = {
    "gpt": gpt(**SIZES),
    "llama": llama(**SIZES, kv_heads=2, ffn=48),
    "mistral": llama(**SIZES, kv_heads=2, ffn=48, sliding_window=7),
    "bloom": replace(gpt(**SIZES), positions="alibi", embed_norm=True),
}


@pytest.fixture(scope="module")
def tokenizer():
    """Texts of its tokens are their numbers; the model has ids that it lacks."""
    return open_tokenizer("NullTokenizer", vocab_size=EOD)


def build_generator(name, tokenizer, **options):
    decoder = load_model(SPECS[name], initial_values(table(SPECS[name]), seed=3))
    return decoder, BatchGenerator(decoder, tokenizer, ModelScorer(decoder), **options)


def random_requests(seed, count=30):
    """Return requests of which many begin alike, one is cut, and stop strings lie across tokens."""
    rng = random.Random(seed)
    stems = [[rng.randrange(EOD) for _ in range(30)] for _ in range(3)]
    requests = [GenerationRequest(tuple(rng.randrange(EOD) for _ in range(50)), 12)]
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randint(1, 20)]
        prompt = (*stem, *(rng.randrange(EOD) for _ in range(rng.randint(0, 5))))
        stop = tuple(f"{rng.randrange(10)} {rng.randrange(4)}" for _ in range(rng.randint(0, 6)))
        requests.append(GenerationRequest(prompt, rng.randint(1, 18), stop))
    return [*requests, requests[-1]]


def continue_alone(decoder, tokenizer, request):
    """Continue one prompt to its last token, and cut the text afterwards."""
    prompt = list(request.prompt[-(SIZES["max_seq_len"] - request.max_tokens) :])
    [row] = generate(decoder, [prompt], new_tokens=request.max_tokens, top_k=1, vocab_limit=EOD + 1).rows
    ids = row[len(prompt) :]
    text = tokenizer.decode(ids[: ids.index(EOD)] if EOD in ids else ids)
    return cut_at_stop(text, request.stop)


@pytest.mark.parametrize("name", SPECS)
def test_continuations_of_a_batch_are_those_of_each_prompt_alone(name, tokenizer):
    decoder, generator = build_generator(name, tokenizer)
    lengths = set()
    for seed in range(3):
        requests = random_requests(seed)
        [batch] = generator.generate_batches(requests)
        texts = dict(batch)
        for number, request in enumerate(requests):
            expected = continue_alone(decoder, tokenizer, request)
            assert texts[number] == expected
            lengths.add(len(expected.split()) - request.max_tokens)
    assert min(lengths) < 0 == max(lengths)  # some are stopped and some are not


def test_rows_leave_as_they_finish_and_shared_tokens_are_computed_once(tokenizer, monkeypatch):
    decoder, generator = build_generator("gpt", tokenizer)
    passes = []
    hidden_states = decoder.hidden_states

    def record_pass(x, *args, **options):
        passes.append(len(x))
        return hidden_states(x, *args, **options)

    monkeypatch.setattr(decoder, "hidden_states", record_pass)
    stem = tuple(range(1, 21))
    requests = [GenerationRequest((*stem, n), most) for n, most in [(21, 2), (22, 5), (23, 9)]]
    ends = []
    for request in requests:
        [[(_, text)]] = generator.generate_batches([request])
        tokens = len(text.split())
        ends.append(tokens + (tokens < request.max_tokens))  # EOD ends a row too
    passes.clear()
    list(generator.generate_batches(requests))
    assert passes == [23, *(sum(end > step for end in ends) for step in range(1, max(ends)))]
    assert passes[1] > passes[-1]


def test_a_stop_string_across_tokens_ends_a_row_at_once(tokenizer):
    continuation = GreedyContinuation(GenerationRequest((1,), 9, ("2 3", "4")), tokenizer)
    for token in (1, 2, 35):
        assert not continuation.is_finished
        continuation.add(token)
    assert continuation.is_finished
    assert (continuation.ids, continuation.text) == ([1, 2, 35], "1 ")
    at_end = GreedyContinuation(GenerationRequest((1,), 9), tokenizer)
    at_end.add(EOD)
    assert (at_end.is_finished, at_end.text) == (True, "")


def test_batches_do_not_depend_on_what_is_answered(tokenizer, monkeypatch):
    monkeypatch.setattr(mega_eval.models.batch_generator, "MAX_ROWS", 4)
    _, generator = build_generator("gpt", tokenizer)
    requests = random_requests(5)
    batches = list(generator.generate_batches(requests))
    assert max(len(batch) for batch in batches) == 4
    answered = {number for number, _ in [*batches[1], batches[2][0]]}
    assert list(generator.generate_batches(requests, answered)) == [batches[0], *batches[2:]]


def test_a_batch_that_does_not_fit_in_memory_is_cut_into_halves(tokenizer, monkeypatch):
    decoder, generator = build_generator("gpt", tokenizer)
    requests = random_requests(5)
    expected = dict(answer for batch in generator.generate_batches(requests) for answer in batch)
    hidden_states = decoder.hidden_states

    def fail_above(most, x, *args, **options):
        if len(x) > most:
            raise torch.OutOfMemoryError
        return hidden_states(x, *args, **options)

    monkeypatch.setattr(decoder, "hidden_states", partial(fail_above, 60))
    batches = list(generator.generate_batches(requests))
    assert len(batches) > 3
    assert dict(answer for batch in batches for answer in batch) == expected
    monkeypatch.setattr(decoder, "hidden_states", partial(fail_above, 2))
    with pytest.raises(ConfigError, match="does not fit in memory"):
        list(generator.generate_batches(requests))


def test_a_prompt_without_tokens_is_an_error(tokenizer):
    _, generator = build_generator("gpt", tokenizer)
    with pytest.raises(RequestError, match="prompts: a prompt has no tokens"):
        list(generator.generate_batches([GenerationRequest((), 3)]))


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_has_each_prompt_once_and_keeps_its_limits(seed):
    rng = random.Random(seed)
    stems = [[rng.randrange(9) for _ in range(30)] for _ in range(3)]
    prompts = [
        [*rng.choice(stems)[: rng.randint(0, 30)], *(rng.randrange(9) for _ in range(rng.randint(1, 20)))]
        for _ in range(60)
    ]
    new = [rng.randint(1, 20) for _ in prompts]
    batches = plan_batches(prompts, new, max_tokens=90, max_cached=300, max_rows=7)
    assert sorted(number for batch in batches for number in batch) == list(range(60))
    for batch in batches:
        assert len(batch) <= 7
        assert len(batch) * max(len(prompts[number]) + new[number] for number in batch) <= 300
        beginnings = {tuple(prompts[number][:end]) for number in batch for end in range(1, 51)}
        assert len(batch) == 1 or len(beginnings) <= 90
    assert len(batches) < 30


def test_questions_about_a_passage_are_in_one_batch():
    passages = [[n] * 20 for n in range(3)]
    prompts = [[*passages[n % 3], 9, *range(n)] for n in range(12)]
    batches = plan_batches(prompts, [4] * 12, max_tokens=100, max_cached=1000, max_rows=4)
    assert sorted([number % 3 for number in batch] for batch in batches) == [[n] * 4 for n in range(3)]
    short = [[n] * (n % 4 + 2) for n in range(12)]
    [*_, last] = plan_batches(short, [4] * 12, max_tokens=100, max_cached=1000, max_rows=3)
    assert [len(short[number]) for number in last] == [2, 2, 2]


def test_a_path_of_a_tree_is_the_tokens_of_a_sequence():
    tree = TokenTree(np.array([-1, 0, 1, 0]), np.array([2, 3, 1, 2]))
    assert tree.path(5).tolist() == [0, 1, 2, 3, 4, 5]
    assert tree.path(6).tolist() == [0, 1, 6]
    assert tree.path(1).tolist() == [0, 1]
