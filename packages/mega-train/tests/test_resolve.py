"""Derived values of a run, and pairs of options that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from mega_schema.errors import ConfigError, LayoutError, MegaError
from mega_schema.params import Init, Param
from mega_schema.presets import PRESETS, preset
from mega_schema.recompute_policy import KEEP_ALL, RecomputePolicy
from mega_schema.sharding import Split
from mega_schema.spec import gpt
from mega_schema.tokenizer.identity import TokenizerIdentity
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.resolve import ResolvedConfig

CORPUS = open_tokenizer("NullTokenizer", vocab_size=32).identity
NO_EOD = TokenizerIdentity("HuggingFaceTokenizer", 33, None, None, None, "0" * 64)
NO_MODEL: dict[str, Any] = dict.fromkeys(
    (
        "model__num_layers",
        "model__hidden_size",
        "model__num_attention_heads",
        "model__vocab_size",
        "model__make_vocab_size_divisible_by",
    )
)


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _refusal(resolve_config: ResolveConfig, kind: type[MegaError] = ConfigError, **values: Any) -> str:
    with pytest.raises(kind) as caught:
        resolve_config(**values)
    return str(caught.value)


def test_defaults_follow_from_the_five_numbers_of_a_model(resolve_config: ResolveConfig) -> None:
    plan = resolve_config(batch__global_batch_size=None)
    assert plan.spec == gpt(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=8, vocab_multiple=8)
    assert (plan.seq_length, plan.micro_batch_size, plan.global_batch_size, plan.accumulation_steps) == (
        8,
        1,
        1,
        1,
    )
    assert (plan.tokens_per_step, plan.train_samples) == (8, 10)
    assert (plan.device, plan.eod) == ("cpu", None)
    assert plan.lr_schedule.lr_at(0) == 0.01


def test_accumulation_and_samples_are_counted_over_all_ranks(resolve_config: ResolveConfig) -> None:
    plan = resolve_config(
        world=8,
        parallel__tensor_model_parallel_size=2,
        batch__micro_batch_size=2,
        batch__global_batch_size=32,
        evaluation__eval_iters=3,
    )
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (2, 1, 4)
    assert plan.accumulation_steps == 4
    assert plan.tokens_per_step == 32 * 8
    assert plan.train_samples == 320
    assert plan.valid_samples == (10 // 1000 + 1) * 3 * 32


@pytest.mark.parametrize("name", [name for name, spec in PRESETS.items() if spec.causal])
def test_a_preset_is_the_model_and_flags_change_it(resolve_config: ResolveConfig, name: str) -> None:
    family = preset(name).family
    plan = resolve_config(family=family, model__preset=name, **NO_MODEL)
    assert plan.spec == preset(name)
    changed = resolve_config(family=family, **(NO_MODEL | {"model__preset": name, "model__num_layers": 3}))
    sides = 1 if plan.spec.is_decoder_only else 2  # --num-layers is the depth of each
    assert changed.spec.layers == 3 * sides
    assert changed.spec.hidden == plan.spec.hidden


def test_the_vocabulary_is_the_corpuss_where_nothing_is_said(resolve_config: ResolveConfig) -> None:
    assert resolve_config(model__vocab_size=None, corpus=CORPUS).spec.vocab == 33


def test_the_context_is_the_sequence_length_where_nothing_is_said(resolve_config: ResolveConfig) -> None:
    assert resolve_config(batch__seq_length=24).spec.max_seq_len == 24
    assert resolve_config(batch__seq_length=None, model__max_position_embeddings=40).seq_length == 40


def test_a_llamas_feed_forward_is_eight_thirds_to_a_multiple_of_64(resolve_config: ResolveConfig) -> None:
    assert (
        resolve_config(family="llama", model__hidden_size=512, model__num_attention_heads=8).spec.ffn == 1344
    )
    assert resolve_config(family="llama").spec.ffn == 64
    assert (
        resolve_config(model__swiglu=True, model__hidden_size=512, model__num_attention_heads=8).spec.ffn
        == 1344
    )
    assert resolve_config(family="llama", model__ffn_hidden_size=100).spec.ffn == 100


def test_heads_may_have_a_width_of_their_own(resolve_config: ResolveConfig) -> None:
    spec = resolve_config(model__num_attention_heads=3, model__kv_channels=10).spec
    assert (spec.q_rows, spec.hidden) == (30, 16)


def test_megatrons_words_become_the_specs(resolve_config: ResolveConfig) -> None:
    spec = resolve_config(
        model__normalization="RMSNorm",
        model__position_embedding_type="rope",
        model__untie_embeddings_and_output_weights=True,
        model__disable_bias_linear=True,
        model__rotary_base=5e5,
        model__init_method_std=0.01,
        model__norm_epsilon=1e-6,
    ).spec
    assert (spec.norm, spec.positions, spec.tied, spec.bias, spec.qkv_bias) == (
        "rmsnorm",
        "rope",
        False,
        False,
        False,
    )
    assert (spec.rope_theta, spec.init_std, spec.norm_eps) == (5e5, 0.01, 1e-6)


def test_a_checkpoint_is_the_model_where_nothing_is_said(resolve_config: ResolveConfig) -> None:
    loaded = gpt(layers=3, hidden=24, heads=3, vocab=40, max_seq_len=16)
    assert resolve_config(loaded=loaded, corpus=CORPUS, **NO_MODEL).spec == loaded
    # with flags its vocabulary is still taken from it, and padding and initial values may differ
    flags = {
        "model__num_layers": 3,
        "model__hidden_size": 24,
        "model__num_attention_heads": 3,
        "model__max_position_embeddings": 16,
    }
    resumed = resolve_config(
        loaded=loaded, corpus=CORPUS, **(NO_MODEL | flags | {"model__make_vocab_size_divisible_by": 4})
    )
    assert resumed.spec.vocab == 40
    assert resumed.spec.vocab_multiple == 4


def test_the_device_is_a_gpu_where_there_is_one_and_nothing_else_is_said(
    resolve_config: ResolveConfig,
) -> None:
    assert resolve_config(cuda=True).device == "cuda"
    assert resolve_config(cuda=True, train__device="cpu").device == "cpu"
    assert resolve_config(cuda=False).device == "cpu"


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_the_end_of_a_document_is_known_where_it_is_needed(resolve_config: ResolveConfig, flag: str) -> None:
    assert resolve_config(corpus=CORPUS, **{f"data__{flag}": True}).eod == 32
    assert resolve_config(corpus=CORPUS).eod is None


def test_warm_up_is_counted_in_samples_or_as_a_share(resolve_config: ResolveConfig) -> None:
    assert resolve_config(optimizer__lr_warmup_iters=3).lr_schedule.warmup == 12
    share = resolve_config(optimizer__lr_warmup_fraction=0.25, optimizer__lr_decay_iters=8).lr_schedule
    assert (share.warmup, share.decay) == (8.0, 32)


# what is said -> what the line begins with
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"train__train_iters": None},
        "--train-iters: missing: wanted optimizer steps; hint: --train-iters 1000",
    ),
    ({"train__train_iters": 0}, "--train-iters: not above 0: found 0, wanted optimizer steps"),
    ({"train__seed": -1}, "--seed: is not a seed of numpy: found -1, wanted 0 to 2^32 - 1"),
    ({"train__seed": 1 << 32}, "--seed: is not a seed of numpy: found 4294967296"),
    ({"train__device": "cuda"}, "--device: no GPU that torch can use: found cuda; hint: --device cpu"),
    ({"train__exit_interval": 0}, "--exit-interval: not an interval: found 0, wanted 1 or more"),
    ({"log__log_interval": 0}, "--log-interval: not an interval: found 0"),
    ({"evaluation__eval_interval": -5}, "--eval-interval: not an interval: found -5"),
    ({"evaluation__eval_iters": -1}, "--eval-iters: not a count: found -1, wanted 0 or more"),
    (
        {"checkpoint__save_interval": 0, "checkpoint__save": "run"},
        "--save-interval: not an interval: found 0",
    ),
    ({"checkpoint__save_interval": 5}, "--save-interval: needs --save: wanted --save DIR"),
    ({"checkpoint__keep_last": 2}, "--keep-last: needs --save: wanted --save DIR"),
    ({"checkpoint__keep_last": 0, "checkpoint__save": "run"}, "--keep-last: not a count: found 0"),
    ({"checkpoint__keep_every": 0, "checkpoint__save": "run"}, "--keep-every: not an interval: found 0"),
    (
        {"checkpoint__keep_every": 250, "checkpoint__save_interval": 100, "checkpoint__save": "run"},
        "--keep-every: few saved iterations are multiples of it: found 250, wanted a multiple of "
        "--save-interval 100; hint: --keep-every 200",
    ),
    (
        {"parallel__distributed_timeout_minutes": 0},
        "--distributed-timeout-minutes: not a time: found 0.0, wanted more than 0",
    ),
    ({"data__split": "all"}, "--split: is not three shares: found 'all', wanted such as 969,30,1"),
    ({"optimizer__lr": None}, "--lr: missing: wanted a learning rate; hint: --lr 3e-4"),
    ({"optimizer__lr": -0.1}, "--lr: not above 0: found -0.1"),
    ({"optimizer__lr": "nan"}, "--lr: not above 0: found nan"),
    ({"optimizer__lr": "inf"}, "--lr: not above 0: found inf"),
    ({"optimizer__min_lr": 0.5}, "--min-lr: is not between 0 and --lr: found 0.5, wanted 0 to 0.01"),
    ({"optimizer__min_lr": -1.0}, "--min-lr: is not between 0 and --lr: found -1.0"),
    ({"optimizer__lr_decay_iters": 0}, "--lr-decay-iters: not above 0: found 0"),
    (
        {"optimizer__lr_warmup_iters": 10},
        "--lr-warmup-iters: the warm-up does not end before the decay does: found 10 of 10 steps, "
        "wanted 0 or more, and fewer than --lr-decay-iters (by default --train-iters)",
    ),
    ({"optimizer__lr_warmup_iters": -1}, "--lr-warmup-iters: the warm-up does not end"),
    ({"optimizer__lr_warmup_fraction": 1.0}, "--lr-warmup-fraction: the warm-up does not end"),
    ({"optimizer__lr_warmup_fraction": "nan"}, "--lr-warmup-fraction: the warm-up does not end"),
    (
        {"optimizer__lr_warmup_fraction": 0.1, "optimizer__lr_warmup_iters": 1},
        "--lr-warmup-fraction: excludes --lr-warmup-iters: found both, wanted one of them",
    ),
    (
        {"optimizer__adam_beta1": 1.0},
        "--adam-beta1: does not decay: found 1.0, wanted 0 or more, and less than 1",
    ),
    ({"optimizer__adam_beta2": -0.1}, "--adam-beta2: does not decay: found -0.1"),
    ({"optimizer__adam_eps": 0.0}, "--adam-eps: not above 0: found 0.0, wanted a small number, such as 1e-8"),
    ({"optimizer__weight_decay": -0.1}, "--weight-decay: not a finite number of 0 or more: found -0.1"),
    (
        {"optimizer__clip_grad": -1.0},
        "--clip-grad: not a finite number of 0 or more: found -1.0, wanted 0 or more",
    ),
    ({"batch__micro_batch_size": 0}, "--micro-batch-size: not a size: found 0, wanted 1 or more"),
    (
        {"world": 2, "batch__micro_batch_size": 3, "batch__global_batch_size": 10},
        "--global-batch-size: is not a multiple of micro-batch size x data-parallel size: found 10, "
        "wanted a multiple of 3 x 2 = 6; hint: --global-batch-size 12",
    ),
    ({"batch__global_batch_size": 0}, "--global-batch-size: is not a multiple"),
    (
        {"batch__seq_length": 0, "model__max_position_embeddings": 8},
        "--seq-length: does not fit the model: found 0 tokens",
    ),
    (
        {"batch__seq_length": 9, "model__max_position_embeddings": 8},
        "--seq-length: does not fit the model: found 9 tokens, wanted 1 to 8 (--max-position-embeddings)",
    ),
    ({"batch__seq_length": None}, "--max-position-embeddings: missing: wanted a number, or --preset"),
    (
        {"model__num_layers": None},
        "--num-layers: missing: wanted a number, or --preset; hint: --preset gpt2-124m or --num-layers N",
    ),
    ({"model__num_attention_heads": 0}, "--num-attention-heads: not above 0: found 0"),
    ({"model__vocab_size": None}, "--vocab-size: missing"),
    (
        {"model__num_attention_heads": 3},
        "--num-attention-heads: does not divide --hidden-size: found 3 heads, hidden 16, wanted "
        "a divisor of 16, or --kv-channels",
    ),
    (
        {"model__num_query_groups": 3, "model__num_attention_heads": 4},
        "--num-query-groups: query heads must share key heads evenly",
    ),
    ({"model__swiglu": True, "model__activation": "gelu_tanh"}, "--activation: disagrees with --swiglu"),
    ({"model__preset": "gpt2-125m"}, "--preset: unknown model: found gpt2-125m"),
    (
        {"model__preset": "llama2-7b"},
        "command: trains another family: found gpt, wanted llama; hint: mega-train llama",
    ),
    (
        {"corpus": CORPUS, "model__vocab_size": 20},
        "--data-path: the corpus is tokenized for a larger vocabulary than the model's: found 33 tokens "
        "(NullTokenizer), wanted at most 20; hint: --vocab-size 33, or the tokenizer of the model",
    ),
    (
        {"data__eod_mask_loss": True},
        "--data-path: the end-of-document token is not known: found a dataset without a .json beside it",
    ),
    (
        {"data__reset_attention_mask": True, "corpus": NO_EOD},
        "--data-path: the end-of-document token is not known: found a dataset whose tokenizer has none",
    ),
]


@pytest.mark.parametrize(("values", "line"), CASES)
def test_a_run_that_cannot_begin_is_refused_by_name(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    assert _refusal(resolve_config, **values).startswith(line)


PIPELINES: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel__zero_stage": 3, "parallel__pipeline_schedule": "zero-bubble"},
        "--pipeline-schedule: weight gradients of ZeRO stage 3 cannot be deferred: found zero-bubble, "
        "wanted 1f1b or gpipe; hint: --zero-stage 2, or --pipeline-schedule 1f1b",
    ),
    (
        {"parallel__num_virtual_stages_per_pipeline_rank": 2},
        "--num-virtual-stages-per-pipeline-rank: needs pipeline parallelism: found pp=1, wanted 2 or more; "
        "hint: leave it out, or --pipeline-model-parallel-size 2",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__num_layers_per_virtual_pipeline_stage": 0,
        },
        "--num-layers-per-virtual-pipeline-stage: not a count: found 0, wanted 1 or more",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__num_layers_per_virtual_pipeline_stage": 1,
            "parallel__num_virtual_stages_per_pipeline_rank": 2,
        },
        "--num-virtual-stages-per-pipeline-rank: excludes --num-layers-per-virtual-pipeline-stage: found",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__num_layers_per_virtual_pipeline_stage": 1,
            "parallel__decoder_first_pipeline_num_layers": 1,
        },
        "--num-layers-per-virtual-pipeline-stage: excludes --decoder-first-pipeline-num-layers: found both; "
        "hint: --num-virtual-stages-per-pipeline-rank N, with --decoder-first-pipeline-num-layers 1",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__account_for_loss_in_pipeline_split": True,
            "parallel__decoder_last_pipeline_num_layers": 1,
        },
        "--account-for-loss-in-pipeline-split: excludes --decoder-last-pipeline-num-layers: found both",
    ),
]


@pytest.mark.parametrize(("values", "line"), PIPELINES)
def test_pipeline_flags_that_disagree_are_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    assert _refusal(resolve_config, **values).startswith(line)


def test_layers_are_assigned_as_the_flags_say(resolve_config: ResolveConfig) -> None:
    def assigned_layers(**values: Any) -> tuple[int, tuple[int, ...]]:
        layout = resolve_config(
            world=4, parallel__pipeline_model_parallel_size=4, batch__global_batch_size=None, **values
        ).layout
        return layout.vp, layout.layers_per_stage

    assert assigned_layers(model__num_layers=8) == (1, ())
    assert assigned_layers(model__num_layers=8, parallel__num_layers_per_virtual_pipeline_stage=1) == (2, ())
    assert assigned_layers(model__num_layers=9, parallel__num_virtual_stages_per_pipeline_rank=2) == (2, ())
    assert assigned_layers(
        model__num_layers=14,
        parallel__account_for_embedding_in_pipeline_split=True,
        parallel__account_for_loss_in_pipeline_split=True,
    ) == (
        1,
        (),
    )
    assert assigned_layers(
        model__num_layers=2,
        parallel__account_for_embedding_in_pipeline_split=True,
        parallel__account_for_loss_in_pipeline_split=True,
    ) == (
        1,
        (0, 1, 1, 0),
    )
    ends = {
        "parallel__account_for_embedding_in_pipeline_split": True,
        "parallel__account_for_loss_in_pipeline_split": True,
    }
    assert assigned_layers(
        model__num_layers=14, parallel__num_layers_per_virtual_pipeline_stage=2, **ends
    ) == (2, ())
    assert assigned_layers(
        model__num_layers=8,
        parallel__decoder_first_pipeline_num_layers=1,
        parallel__decoder_last_pipeline_num_layers=3,
    ) == (
        1,
        (1, 2, 2, 3),
    )


LAYOUTS: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel__tensor_model_parallel_size": 0},
        "--tensor-model-parallel-size: not a degree: found 0, wanted 1 or more",
    ),
    (
        {"world": 3, "parallel__tensor_model_parallel_size": 2},
        "world size: is not a multiple of tp x pp: found 3 processes, tp=2 x pp=1 = 2, wanted "
        "a multiple of 2 processes; hint: torchrun --nproc-per-node 2",
    ),
    (
        {"world": 4, "parallel__pipeline_model_parallel_size": 4},
        "--pipeline-model-parallel-size: a stage would have no layer: found 4 stages for 2 layers",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "model__num_layers": 12,
            "parallel__num_layers_per_virtual_pipeline_stage": 4,
        },
        "--num-layers-per-virtual-pipeline-stage: does not split the layers evenly: found 4 for 12 layers "
        "over pp=2, wanted a number that divides 12 / 2: 1, 2, 3, 6; "
        "hint: --num-layers-per-virtual-pipeline-stage 3",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "model__num_layers": 7,
            "parallel__num_layers_per_virtual_pipeline_stage": 1,
        },
        "--num-layers-per-virtual-pipeline-stage: does not split the layers evenly: found 1 for 7 "
        "layers "
        "over pp=2, wanted a number of layers that pp=2 divides; "
        "hint: --num-virtual-stages-per-pipeline-rank 2 splits unevenly",
    ),
    (
        {
            "world": 2,
            "parallel__pipeline_model_parallel_size": 2,
            "parallel__num_virtual_stages_per_pipeline_rank": 3,
        },
        "--num-virtual-stages-per-pipeline-rank: a stage would have no layer: found 2 x 3 stages for 2 "
        "layers, wanted at most 1; hint: --num-virtual-stages-per-pipeline-rank 1",
    ),
    (
        {"world": 4, "parallel__tensor_model_parallel_size": 4},
        "layers.0.qkv.weight: 2 heads cannot be split evenly over tp: found tp=4, wanted a divisor of 2; "
        "hint: --tensor-model-parallel-size 2",
    ),
    (
        {
            "world": 2,
            "parallel__tensor_model_parallel_size": 2,
            "family": "llama",
            "model__ffn_hidden_size": 65,
        },
        "layers.0.gate_up.weight: 65 rows cannot be split evenly over tp",
    ),
    (
        {
            "world": 2,
            "parallel__tensor_model_parallel_size": 2,
            "parallel__sequence_parallel": True,
            "batch__seq_length": 7,
        },
        "--sequence-parallel: the tokens of a micro-batch cannot be split evenly: found 7 tokens over tp=2, "
        "wanted micro-batch size x sequence length a multiple of 2",
    ),
    (
        {"world": 2, "parallel__context_parallel_size": 2, "batch__seq_length": 10},
        "--context-parallel-size: a sequence cannot be split into two chunks for each rank: found 10 tokens, "
        "cp=2, wanted a sequence length that is a multiple of 2 x 2 = 4; hint: --seq-length 8",
    ),
    (
        {
            "world": 8,
            "parallel__context_parallel_size": 2,
            "parallel__tensor_model_parallel_size": 4,
            "parallel__sequence_parallel": True,
            "batch__seq_length": 4,
        }
        | {"model__num_attention_heads": 4, "model__hidden_size": 32},
        "--sequence-parallel: the tokens of a micro-batch cannot be split evenly: found 2 tokens over tp=4, "
        "wanted micro-batch size x sequence length / 2 a multiple of 4",
    ),
    (
        {"world": 3, "parallel__context_parallel_size": 2},
        "world size: is not a multiple of tp x pp x cp: found 3 processes, tp=1 x pp=1 x cp=2 = 2",
    ),
]


@pytest.mark.parametrize(("values", "line"), LAYOUTS)
def test_a_layout_that_does_not_divide_is_refused_by_name(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    assert _refusal(resolve_config, LayoutError, **values).startswith(line)


@pytest.mark.parametrize("flag", ["--hidden-dropout", "--attention-dropout"])
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5])
def test_a_dropout_that_leaves_nothing_is_refused(
    resolve_config: ResolveConfig, flag: str, value: float
) -> None:
    refusal = _refusal(resolve_config, **{"train__" + flag[2:].replace("-", "_"): value})
    assert refusal == f"{flag}: not a dropout probability: found {value}, wanted 0 or more, and less than 1"


def test_flags_that_differ_from_the_checkpoint_are_refused(resolve_config: ResolveConfig) -> None:
    loaded = gpt(layers=2, hidden=16, heads=2, vocab=33, max_seq_len=8)
    assert _refusal(resolve_config, loaded=loaded, model__num_attention_heads=4) == (
        "--num-attention-heads: differs from the checkpoint's: found 4, wanted 2; "
        "hint: omit the model's flags to use the checkpoint's model"
    )
    assert _refusal(resolve_config, family="llama", loaded=loaded, **NO_MODEL).startswith(
        "command: trains another family: found llama, wanted gpt"
    )


def test_padded_vocabularies_are_megatrons(oracle: Callable[[str], Any]) -> None:
    cases = oracle("vocab_padding_orig_div_tp_padded.json")
    assert len(cases) > 20
    for vocab, multiple, tp, padded in cases:
        embed = Param("embed.weight", (vocab, 4), "first", Init("zeros"), Split("tp", 0, pad=multiple))
        assert embed.local_shape(tp)[0] * tp == padded, (vocab, multiple, tp)


@pytest.mark.parametrize(
    ("values", "recompute"),
    [
        ({}, KEEP_ALL),
        ({"recompute_activations": True}, RecomputePolicy("selective")),
        ({"recompute_granularity": "selective", "recompute_activations": True}, RecomputePolicy("selective")),
        ({"checkpoint_activations": True, "recompute_num_layers": 2}, RecomputePolicy("full", "uniform", 2)),
        ({"recompute_granularity": "full"}, RecomputePolicy("full", "uniform", 1)),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            RecomputePolicy("full", "block", 3),
        ),
        (
            {"checkpoint_activations": True, "distribute_saved_activations": True},
            RecomputePolicy("full", distribute_saved=True),
        ),
        (
            {"recompute_activations": True, "recompute_modules": "mlp_act layernorm"},
            RecomputePolicy("selective", modules=("layernorm", "mlp_act")),
        ),
    ],
)
def test_flags_of_recomputation_say_one_thing(
    resolve_config: ResolveConfig, values: dict[str, Any], recompute: RecomputePolicy
) -> None:
    flags = {f"recompute__{name}": value for name, value in values.items()}
    assert resolve_config(world=2, parallel__tensor_model_parallel_size=2, **flags).recompute == recompute


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"recompute__recompute_activations": True, "recompute__recompute_granularity": "full"},
            "--recompute-activations: means selective: found full, wanted selective; "
            "hint: leave --recompute-activations out",
        ),
        (
            {"recompute__recompute_activations": True, "recompute__checkpoint_activations": True},
            "--checkpoint-activations: means full: found selective, wanted full; "
            "hint: leave --checkpoint-activations out",
        ),
        (
            {"recompute__recompute_method": "block"},
            "--recompute-method: applies to full recomputation only: found no recomputation; "
            "hint: --recompute-granularity full",
        ),
        (
            {"recompute__recompute_num_layers": 2, "recompute__recompute_activations": True},
            "--recompute-num-layers: applies to full recomputation only: found selective; "
            "hint: --recompute-granularity full",
        ),
        (
            {"recompute__recompute_modules": "layernorm"},
            "--recompute-modules: applies to selective recomputation only: found no recomputation; "
            "hint: --recompute-granularity selective",
        ),
        (
            {"recompute__recompute_modules": "layernorm moe", "recompute__recompute_activations": True},
            "--recompute-modules: not a module of selective recomputation: found moe, "
            "wanted core_attn or layernorm or mlp_act",
        ),
        (
            {"recompute__recompute_num_layers": 0, "recompute__checkpoint_activations": True},
            "--recompute-num-layers: not a count: found 0, wanted 1 or more",
        ),
        (
            {"recompute__checkpoint_activations": True, "recompute__distribute_saved_activations": True},
            "--distribute-saved-activations: the saved inputs cannot be split evenly: found 8 tokens "
            "over tp=1, "
            "wanted tp of 2 or more, and tokens of a micro-batch that are a multiple of it",
        ),
        (
            {
                "recompute__checkpoint_activations": True,
                "recompute__distribute_saved_activations": True,
                "parallel__sequence_parallel": True,
            }
            | {"world": 2, "parallel__tensor_model_parallel_size": 2},
            "--distribute-saved-activations: each rank already saves only its shard: found "
            "--sequence-parallel; "
            "hint: leave --distribute-saved-activations out",
        ),
    ],
)
def test_flags_of_recomputation_that_disagree_are_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    assert _refusal(resolve_config, MegaError, **values) == line


def test_the_overlap_of_tensor_parallel_exchanges_is_for_shared_tokens_on_gpus(
    resolve_config: ResolveConfig,
) -> None:
    two: dict[str, Any] = {
        "world": 2,
        "parallel__tensor_model_parallel_size": 2,
        "parallel__tp_comm_overlap": True,
    }
    assert _refusal(resolve_config, **two) == (
        "--tp-comm-overlap: has no tokens to exchange: wanted --sequence-parallel, whose exchanges "
        "it overlaps"
    )
    two["parallel__sequence_parallel"] = True
    line = "--tp-comm-overlap: needs GPUs: found cpu; hint: leave it out on a CPU"
    assert _refusal(resolve_config, **two) == line
    assert _refusal(resolve_config, cuda=True, train__device="cpu", **two) == line
    assert resolve_config(cuda=True, **two).run.parallel.tp_overlap
