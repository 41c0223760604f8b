"""Attention backends: visible keys of a query, and equality of cached and full attention."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from mega_model.attention_backends import KVCacheAttention, PackedAttention, document_positions
from mega_model.attention_mask import AttentionMask, alibi_slopes
from mega_model.build import build_model, fill_weights
from mega_model.decoder import Decoder
from mega_model.distributed.mesh import Axis
from mega_model.dropout import Dropout, token_keys
from mega_model.init import initial_values
from mega_model.kernels import Visible
from mega_model.kernels.reference import attention
from mega_model.runtime import Runtime
from mega_model.unpadded_attention import UnpaddedAttention
from mega_schema.arch import table
from mega_schema.spec import ModelSpec, gpt, llama

SPECS: dict[str, ModelSpec] = {
    "gpt": gpt(layers=2, hidden=16, heads=4, vocab=19, max_seq_len=12, init_std=0.3),
    "llama": llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=12, vocab=19, max_seq_len=12, init_std=0.3),
    "alibi": gpt(layers=2, hidden=18, heads=6, vocab=19, max_seq_len=12, init_std=0.3, positions="alibi"),
    "window": llama(
        layers=2, hidden=16, heads=4, ffn=12, vocab=19, max_seq_len=12, init_std=0.3, sliding_window=5
    ),
    "alibi and window": gpt(
        layers=2,
        hidden=16,
        heads=4,
        vocab=19,
        max_seq_len=12,
        init_std=0.3,
        positions="alibi",
        sliding_window=4,
    ),
}
TOKENS = torch.randint(1, 19, (3, 12), generator=torch.Generator().manual_seed(3))


def _model(spec: ModelSpec) -> Decoder:
    model = build_model(Runtime.single_process(spec))
    fill_weights(model, initial_values(table(spec), 1))
    return model.requires_grad_(False)


def _packed_logits(
    model: Decoder, token_BS: Tensor, document_BS: Tensor | None = None, place_BS: Tensor | None = None
) -> Tensor:
    rows, length = token_BS.shape
    place_BS = torch.arange(length).repeat(rows, 1) if place_BS is None else place_BS
    logits: Tensor = model(token_BS.flatten(), place_BS.flatten(), PackedAttention(rows, length, document_BS))
    return logits.unflatten(0, (rows, length))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("steps", [[12], [5, 7], [1] * 12, [3, 1, 1, 7]])
def test_a_cache_gives_the_logits_of_one_pass(name: str, steps: list[int]) -> None:
    model = _model(SPECS[name])
    cache, offset, parts = KVCacheAttention(SPECS[name], rows=3, capacity=12), 0, []
    for step in steps:
        assert cache.length == offset
        place = torch.arange(offset, offset + step).repeat(3)
        parts.append(model(TOKENS[:, offset : offset + step].flatten(), place, cache).unflatten(0, (3, step)))
        offset += step
    torch.testing.assert_close(torch.cat(parts, 1), _packed_logits(model, TOKENS), atol=1e-5, rtol=1e-5)


def test_selected_rows_go_on_from_what_they_were() -> None:
    spec = SPECS["llama"]
    model, cache = _model(spec), KVCacheAttention(spec, rows=3, capacity=12)
    model(TOKENS[:, :8].flatten(), torch.arange(8).repeat(3), cache)
    rows = torch.tensor([2, 2, 0, 1])
    cache.select(rows)
    logits = model(TOKENS[rows, 8], torch.full((4,), 8), cache)
    torch.testing.assert_close(logits, _packed_logits(model, TOKENS[rows, :9])[:, -1], atol=1e-5, rtol=1e-5)


def test_more_tokens_than_the_cache_holds_are_a_bug() -> None:
    model, cache = _model(SPECS["gpt"]), KVCacheAttention(SPECS["gpt"], rows=1, capacity=4)
    with pytest.raises(AssertionError, match="0 \\+ 5 tokens in a cache of 4"):
        model(TOKENS[0, :5], torch.arange(5), cache)


@pytest.mark.parametrize("name", SPECS)
def test_rows_do_not_see_each_other(name: str) -> None:
    model = _model(SPECS[name])
    together = _packed_logits(model, TOKENS)
    for row in range(3):
        torch.testing.assert_close(
            _packed_logits(model, TOKENS[row : row + 1])[0], together[row], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(5))
def test_packed_documents_are_as_if_each_were_alone(name: str, seed: int) -> None:
    model, generator = _model(SPECS[name]), torch.Generator().manual_seed(seed)
    token_BS = torch.where(torch.rand(TOKENS.shape, generator=generator) < 0.3, 0, TOKENS)
    number_BS, place_BS = document_positions(token_BS, 0)
    packed = _packed_logits(model, token_BS, number_BS, place_BS)
    for row in range(3):
        for number in number_BS[row].unique():
            in_document = number_BS[row] == number
            alone = _packed_logits(model, token_BS[row, in_document][None])[0]
            torch.testing.assert_close(packed[row, in_document], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_documents_end_with_their_eod(seed: int) -> None:
    token_BS = torch.randint(0, 3, (4, 15), generator=torch.Generator().manual_seed(seed))
    number_BS, place_BS = document_positions(token_BS, 0)
    for tokens, numbers, places in zip(token_BS.tolist(), number_BS.tolist(), place_BS.tolist(), strict=True):
        number = place = 0
        for token, location in zip(tokens, zip(numbers, places, strict=True), strict=True):
            assert location == (number, place)
            number, place = (number + 1, 0) if token == 0 else (number, place + 1)


@pytest.mark.parametrize("documents_apart", [False, True])
def test_without_an_order_a_token_sees_the_tokens_after_it(documents_apart: bool) -> None:
    document_BS = torch.tensor([[0, 0, 1, 1, 1]]) if documents_apart else None
    attend = PackedAttention(1, 5, document_BS, causal=False)
    # scores all alike and one-hot values: what comes out says which keys were seen
    seen = attend(0, torch.zeros(5, 1, 5), torch.zeros(5, 1, 5), torch.eye(5)[:, None])[:, 0] > 0
    wanted = torch.ones(5, 5) if document_BS is None else document_BS == document_BS.T
    assert torch.equal(seen, wanted.bool())


def _seen(attend: PackedAttention, length: int, reach: AttentionMask) -> Tensor:
    even = torch.zeros(length, 1, length)
    return attend(0, even, even, torch.eye(length)[:, None], reach)[:, 0] > 0


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
def test_a_window_counts_the_token_itself(window: int) -> None:
    place = torch.arange(5)
    distance = place[:, None] - place
    wanted = (distance >= 0) & (distance < window)
    assert torch.equal(_seen(PackedAttention(1, 5), 5, AttentionMask(window)), wanted)
    apart = torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.equal(
        _seen(PackedAttention(1, 5, apart), 5, AttentionMask(window)), wanted & (apart == apart.T)
    )


@pytest.mark.parametrize(
    "reach", [AttentionMask(3), AttentionMask(None, (0.5, 0.25)), AttentionMask(4, (0.5, 0.25))], ids=str
)
@pytest.mark.parametrize("documents_apart", [False, True])
def test_dropping_next_to_nothing_attends_as_without_dropout(
    reach: AttentionMask, documents_apart: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2 * 7, 2, 6, generator=generator).unbind()
    document_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 2]] * 2) if documents_apart else None
    drop = Dropout(0.0, 1e-9, token_keys(1, [0, 1], torch.arange(7)), Axis("tp"))
    undropped, dropped = (
        PackedAttention(2, 7, document_BS, dropout=d)(0, q, k, v, reach) for d in (None, drop)
    )
    torch.testing.assert_close(dropped, undropped)


@pytest.mark.parametrize(
    ("heads", "wanted"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),  # then of eight heads the first and the third
        (12, [2**-i for i in range(1, 9)] + [2 ** -(i + 0.5) for i in range(4)]),
    ],
)
def test_slopes_fall_by_one_ratio_and_fill_up_from_twice_as_many_heads(
    heads: int, wanted: list[float]
) -> None:
    assert alibi_slopes(heads) == pytest.approx(wanted)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_rank_has_the_slopes_of_its_heads(tp: int) -> None:
    parts = [AttentionMask.from_spec(SPECS["alibi"], Axis("tp", tp, rank), 0).slopes for rank in range(tp)]
    assert sum(parts, ()) == alibi_slopes(6)


@pytest.mark.parametrize(("queries", "keys"), [(2, 9), (3, 7)])
def test_the_last_queries_see_on_a_cpu_what_torchs_own_mask_shows_them(queries: int, keys: int) -> None:
    q, k, v = (torch.randn(2, 2, tokens, 4) for tokens in (queries, keys, keys))
    bias = causal_lower_right(queries, keys)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert torch.equal(attention(q, k, v, "before"), wanted)


@pytest.mark.parametrize("window", [2, 33, 65])
@pytest.mark.parametrize("documents_apart", [False, True])
@pytest.mark.parametrize(("length", "kv_heads"), [(200, 4), (331, 2)])
def test_a_window_in_blocks_has_the_values_and_gradients_of_a_whole_mask(
    length: int, kv_heads: int, documents_apart: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(length)
    heads = (4, kv_heads, kv_heads)
    inputs = [torch.randn(2 * length, n, 8, generator=rng, requires_grad=True) for n in heads]
    document_BS = torch.randint(0, 2, (2, length), generator=rng).cumsum(1) // 50 if documents_apart else None
    grad_TNH = torch.randn(2 * length, 4, 8, generator=rng)

    def attend() -> tuple[Tensor, ...]:
        backend = PackedAttention(2, length, document_BS, causal=False)
        out = backend(0, *inputs, AttentionMask(window))
        return out, *torch.autograd.grad(out, inputs, grad_TNH)

    in_blocks = attend()
    with monkeypatch.context() as patch:
        patch.setattr(PackedAttention, "attends_in_blocks", lambda *_: False)
        whole = attend()
    for values, wanted in zip(in_blocks, whole, strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)


def test_a_window_in_blocks_needs_no_mask_of_whole_rows() -> None:
    sizes = list[int]()

    def attention_of_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
        assert isinstance(visible, Tensor)
        sizes.append(visible.numel())
        return attention(q, k, v, visible)

    length, window = 4096, 65
    x = torch.randn(length, 1, 4)
    PackedAttention(1, length, causal=False, attention=attention_of_blocks)(0, x, x, x, AttentionMask(window))
    assert sizes == [3 * (window - 1) * length]


def test_the_model_does_not_import_the_compiler() -> None:
    code = "import sys, mega_model.build, mega_model.generate; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3, 9])
def test_rows_without_padding_attend_as_padded_rows_do(causal: bool, window: int | None) -> None:
    lengths = [7, 300, 2, 1, 8]  # three groups: the row of 300 is longer than a group
    q, k, v = torch.randn(3, sum(lengths), 4, 8, generator=torch.Generator().manual_seed(3))
    mask = AttentionMask(window)
    output = UnpaddedAttention.from_lengths(lengths, causal=causal)(0, q, k, v, mask)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    rows = [PackedAttention(1, len(part[0]), causal=causal)(0, *part, mask) for part in parts]
    torch.testing.assert_close(output, torch.cat(rows), atol=1e-5, rtol=1e-5)
