"""Generation against a full forward pass over the whole row for every token."""

from __future__ import annotations

import itertools
import json
import math
import struct

import pytest
import torch
from torch import Tensor

from mega_model.attention_backends import PackedAttention
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.generate import GenerateOutput, StopCriteria, beam_search, generate, score
from mega_model.init import initial_values
from mega_model.runtime import Runtime
from mega_schema.arch import table
from mega_schema.errors import RequestError
from mega_schema.spec import ModelSpec, gpt, llama
from tests.shared_data import SHARED, needs_shared

STORIES = SHARED / "data" / "checkpoints" / "stories260K"
VOCAB, CONTEXT = 37, 48
SPECS = {
    "gpt": gpt(layers=2, hidden=32, heads=4, vocab=VOCAB, max_seq_len=CONTEXT, init_std=0.3),
    "llama": llama(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=VOCAB, max_seq_len=CONTEXT, init_std=0.3
    ),
}
PROMPTS = [[5, 1, 9], [7], [3, 3, 2, 8, 30, 11, 4], [1, 2]]


def model_of(spec: ModelSpec) -> Decoder:
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, initial_values(table(spec), seed=5))
    return model


@pytest.fixture(params=sorted(SPECS))
def model(request: pytest.FixtureRequest) -> Decoder:
    return model_of(SPECS[request.param])


@torch.inference_mode()
def logits_of(model: Decoder, row: list[int]) -> Tensor:
    """(S, V) by one pass without a cache."""
    positions = torch.arange(len(row))
    return model(torch.tensor(row), positions, PackedAttention(1, len(row)))[:, :VOCAB]


def logprobs_of(model: Decoder, row: list[int]) -> list[float]:
    logprob_SV = logits_of(model, row).log_softmax(-1)
    return [logprob_SV[i, token].item() for i, token in enumerate(row[1:])]


def greedy_by_definition(model: Decoder, prompt: list[int], new: int) -> list[int]:
    row = list(prompt)
    for _ in range(new):
        row.append(int(logits_of(model, row)[-1].argmax()))
    return row


def test_greedy_with_the_cache_is_greedy_by_full_recomputation(model: Decoder) -> None:
    for prompt in PROMPTS:
        assert generate(model, [prompt], new_tokens=12, top_k=1).rows == [
            greedy_by_definition(model, prompt, 12)
        ]


def test_a_ragged_batch_gives_every_row_what_it_gets_alone(model: Decoder) -> None:
    longest = max(map(len, PROMPTS))
    together = generate(model, PROMPTS, new_tokens=6, top_k=1, logprobs=True)
    assert together.logprobs is not None
    for prompt, row, logprobs in zip(PROMPTS, together.rows, together.logprobs, strict=True):
        alone = generate(model, [prompt], new_tokens=longest + 6 - len(prompt), top_k=1, logprobs=True)
        assert alone.rows == [row]
        assert alone.logprobs is not None
        assert logprobs == pytest.approx(alone.logprobs[0], abs=2e-5)


def test_a_seed_reproduces_a_batch_and_another_seed_does_not(model: Decoder) -> None:
    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, PROMPTS, new_tokens=10, top_p=0.9, temperature=1.3, generator=generator).rows

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_drawing_leaves_the_generator_of_the_process_alone(model: Decoder) -> None:
    before = torch.get_rng_state()
    generate(model, PROMPTS, new_tokens=3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(before, torch.get_rng_state())


def test_logprobs_are_those_of_a_full_forward_whatever_the_filters(model: Decoder) -> None:
    generator = torch.Generator().manual_seed(4)
    never = (PROMPTS[0][-1], 6)
    drawn = generate(
        model,
        PROMPTS,
        new_tokens=5,
        temperature=3.0,
        top_k=4,
        banned_bigram=never,
        logprobs=True,
        generator=generator,
    )
    assert drawn.logprobs is not None
    for row, logprobs in zip(drawn.rows, drawn.logprobs, strict=True):
        assert len(logprobs) == len(row) - 1
        assert logprobs == pytest.approx(logprobs_of(model, row), abs=2e-5)


def test_score_gives_the_logprobs_of_a_full_forward(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    # two tokens a chunk, so that the seams are crossed
    monkeypatch.setattr("mega_model.generate._CHUNK_LOGITS", 2 * VOCAB)
    scored = score(model, PROMPTS)
    assert scored.rows == PROMPTS
    assert scored.logprobs is not None
    for row, logprobs in zip(PROMPTS, scored.logprobs, strict=True):
        assert logprobs == pytest.approx(logprobs_of(model, row), abs=2e-5)


def test_score_of_single_tokens_is_empty(model: Decoder) -> None:
    assert score(model, [[4], [5]]) == GenerateOutput([[4], [5]], [[], []])


def test_a_row_ends_with_its_stop_token_and_the_others_go_on(model: Decoder) -> None:
    whole = generate(model, PROMPTS, new_tokens=8, top_k=1).rows
    stop = whole[1][len(PROMPTS[1]) + 2]
    stopped = generate(model, PROMPTS, new_tokens=8, top_k=1, stop=StopCriteria(frozenset({stop})))
    for prompt, row, full in zip(PROMPTS, stopped.rows, whole, strict=True):
        generated = full[len(prompt) :]
        cut = generated.index(stop) + 1 if stop in generated else len(generated)
        assert row == prompt + generated[:cut]


def test_a_stop_token_inside_a_prompt_ends_nothing(model: Decoder) -> None:
    stop = PROMPTS[2][3]
    rows = generate(model, PROMPTS[1:3], new_tokens=1, top_k=1, stop=StopCriteria(frozenset({stop}))).rows
    assert rows[1][:7] == PROMPTS[2]
    assert len(rows[1]) == 8


def test_the_batch_ends_with_its_last_row(model: Decoder) -> None:
    first = greedy_by_definition(model, PROMPTS[0], 1)[-1]
    steps: list[int] = []
    stop = StopCriteria(frozenset({first}))
    row = generate(model, PROMPTS[:1], new_tokens=30, top_k=1, stop=stop, before_step=steps.append).rows[0]
    assert steps == [len(PROMPTS[0])]
    assert row == [*PROMPTS[0], first]


@pytest.mark.parametrize(
    ("stop", "met"),
    [
        (StopCriteria(frozenset({9})), [False, True, False, False]),
        (StopCriteria(frozenset({9}), repeated_id=4), [False, True, True, False]),
        (StopCriteria(), [False, False, False, False]),
    ],
)
def test_a_stop_is_one_of_its_ids_or_the_doubled_one(stop: StopCriteria, met: list[bool]) -> None:
    new_B, before_B = torch.tensor([4, 9, 4, 3]), torch.tensor([5, 4, 4, 4])
    assert stop.is_met(new_B, before_B).tolist() == met


def test_a_word_never_follows_the_one_it_must_not(model: Decoder) -> None:
    prompt = PROMPTS[0]
    likeliest = greedy_by_definition(model, prompt, 1)[-1]
    row = generate(model, [prompt], new_tokens=1, top_k=1, banned_bigram=(prompt[-1], likeliest)).rows[0]
    assert row[-1] == int(logits_of(model, prompt)[-1].topk(2).indices[1])


def test_no_word_past_the_tokenizers_vocabulary_is_chosen(model: Decoder) -> None:
    rows = generate(
        model, PROMPTS, new_tokens=20, vocab_limit=3, generator=torch.Generator().manual_seed(0)
    ).rows
    assert all(token < 3 for prompt, row in zip(PROMPTS, rows, strict=True) for token in row[len(prompt) :])


def test_top_p_decays_for_the_whole_batch_down_to_its_bound(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def choose(logits_BV: Tensor, *, top_p: float, **_: object) -> Tensor:
        seen.append(top_p)
        return logits_BV.argmax(-1)

    monkeypatch.setattr("mega_model.generate.sample_token", choose)
    prompts = [[1], [2, 3, 4]]
    generate(model, prompts, new_tokens=3, top_p=0.8, top_p_decay=0.5, top_p_bound=0.15)
    assert seen == pytest.approx([0.8, 0.4, 0.2, 0.15, 0.15])


def test_top_p_never_decays_to_no_filter(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def choose(logits_BV: Tensor, *, top_p: float, **_: object) -> Tensor:
        seen.append(top_p)
        return logits_BV.argmax(-1)

    monkeypatch.setattr("mega_model.generate.sample_token", choose)
    generate(model, [[1]], new_tokens=4, top_p=0.8, top_p_decay=1e-200)
    assert min(seen) > 0.0


def test_rows_past_the_context_are_refused_with_both_numbers(model: Decoder) -> None:
    with pytest.raises(RequestError, match=r"exceed the model's context: found 7 \+ 42, wanted at most 48"):
        generate(model, PROMPTS, new_tokens=42)
    with pytest.raises(RequestError, match="exceed the model's context"):
        score(model, [[1] * 49])
    assert len(generate(model, PROMPTS, new_tokens=41, top_k=1).rows[0]) == CONTEXT


def test_a_prompt_without_tokens_is_refused(model: Decoder) -> None:
    with pytest.raises(RequestError, match="a prompt has no tokens"):
        generate(model, [[1], []], new_tokens=2)


def test_a_beam_of_width_one_is_greedy(model: Decoder) -> None:
    for prompt in PROMPTS:
        (beam,) = beam_search(model, prompt, new_tokens=9, width=1, stop=None)
        assert beam.row == greedy_by_definition(model, prompt, 9)


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
def test_a_beams_score_is_its_rescored_sum_over_its_length(model: Decoder, penalty: float) -> None:
    prompt = PROMPTS[2]
    ended_early = 0
    for stop in range(8):
        beams = beam_search(model, prompt, new_tokens=7, width=4, stop=stop, length_penalty=penalty)
        assert [b.score for b in beams] == sorted((b.score for b in beams), reverse=True)
        assert len({tuple(b.row) for b in beams}) == len(beams) == 4
        for beam in beams:
            new = len(beam.row) - len(prompt)
            total = sum(logprobs_of(model, beam.row)[-new:])
            assert beam.score == pytest.approx(total / new**penalty, abs=5e-5)
            assert stop not in beam.row[len(prompt) : -1]
            assert new == 7 or beam.row[-1] == stop
            ended_early += beam.row[-1] == stop
    assert ended_early > 0


def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_continuations(model: Decoder) -> None:
    prompt = PROMPTS[0]
    rows = [[*prompt, *tail] for tail in itertools.product(range(VOCAB), repeat=2)]
    totals = [sum(logprobs[-2:]) for logprobs in score(model, rows).logprobs or []]
    best = max(range(len(rows)), key=totals.__getitem__)
    beams = beam_search(model, prompt, new_tokens=2, width=VOCAB, stop=None)
    assert beams[0].row == rows[best]
    assert beams[0].score == pytest.approx(totals[best] / 2, abs=2e-5)


def test_a_beam_wider_than_the_vocabulary_gives_what_there_is(model: Decoder) -> None:
    beams = beam_search(model, PROMPTS[0], new_tokens=1, width=VOCAB + 20, stop=None)
    assert sorted(b.row[-1] for b in beams) == list(range(VOCAB))


def test_a_beam_never_takes_the_word_it_must_not(model: Decoder) -> None:
    prompt = PROMPTS[0]
    likeliest = greedy_by_definition(model, prompt, 1)[-1]
    beams = beam_search(
        model, prompt, new_tokens=1, width=5, stop=None, banned_bigram=(prompt[-1], likeliest)
    )
    assert likeliest not in [b.row[-1] for b in beams]


def test_what_before_step_raises_ends_the_work(model: Decoder) -> None:
    def leave(step: int) -> None:
        if step == 5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        generate(model, [[1]], new_tokens=20, before_step=leave)
    with pytest.raises(InterruptedError):
        beam_search(model, [1], new_tokens=20, width=2, stop=None, before_step=leave)


def stories() -> Decoder:
    """A small trained model in llama2.c's file: seven numbers, then the weights, one kind after another."""
    raw = (STORIES / "stories260K.bin").read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, max_seq_len = struct.unpack_from("<7i", raw)
    spec = llama(
        layers=layers,
        hidden=dim,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        max_seq_len=max_seq_len,
        tied=True,
    )
    values, offset = torch.frombuffer(bytearray(raw[28:]), dtype=torch.float32), 0

    def take(*shape: int) -> Tensor:
        nonlocal offset
        offset += math.prod(shape)
        return values[offset - math.prod(shape) : offset].view(shape)

    def halves(weight_LRD: Tensor) -> Tensor:
        """Rotary pairs lie side by side in the file, and in the two halves of a head with us."""
        heads_LNHD = weight_LRD.unflatten(1, (-1, spec.head_dim))
        return torch.cat([heads_LNHD[:, :, 0::2], heads_LNHD[:, :, 1::2]], 2).flatten(1, 2)

    weights = {"embed.weight": take(vocab, dim)}
    attn_norm, q, k = take(layers, dim), take(layers, dim, dim), take(layers, spec.kv_rows, dim)
    v, out, ffn_norm = take(layers, spec.kv_rows, dim), take(layers, dim, dim), take(layers, dim)
    gate, down, up = take(layers, ffn, dim), take(layers, dim, ffn), take(layers, ffn, dim)
    weights["final_norm.weight"] = take(dim)
    of_layers = {
        "attn_norm": attn_norm,
        "qkv": torch.cat([halves(q), halves(k), v], 1),
        "out": out,
        "ffn_norm": ffn_norm,
        "gate_up": torch.cat([gate, up], 1),
        "down": down,
    }
    for layer in range(layers):
        weights |= {f"layers.{layer}.{name}.weight": value[layer] for name, value in of_layers.items()}
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, lambda name, slab: weights[name][slab.in_global])
    return model


@needs_shared
def test_a_trained_model_tells_the_story_it_is_known_to_tell() -> None:
    model = stories()
    known = json.loads((STORIES / "expected.json").read_text("utf-8"))
    assert len(known["greedy"]) == 3
    for story in known["greedy"]:
        new = len(story["ids"]) - len(story["prompt_ids"])
        assert generate(model, [story["prompt_ids"]], new_tokens=new, top_k=1).rows == [story["ids"]]
    # and all of them as one ragged batch
    prompts = [story["prompt_ids"] for story in known["greedy"]]
    together = generate(model, prompts, new_tokens=50, top_k=1).rows
    for row, story in zip(together, known["greedy"], strict=True):
        assert row == story["ids"][: len(row)]


@needs_shared
def test_a_trained_models_loss_is_the_known_one() -> None:
    scored = json.loads((STORIES / "expected.json").read_text("utf-8"))["scored"]
    logprobs = (score(stories(), [scored["ids"]]).logprobs or [[]])[0]
    assert -sum(logprobs) / len(logprobs) == pytest.approx(scored["mean_nll"], rel=1e-5)
