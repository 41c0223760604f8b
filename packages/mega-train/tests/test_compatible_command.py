"""Command lines of other programs' launch scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mega_schema.app.config import add_flags, config_keys, load_config
from mega_train.compat.compatible_command import MegatronCompatibleCommand
from mega_train.compat.flag_translation import translate_flags
from mega_train.config import CurriculumConfig, RunConfig
from mega_train.fault_tolerance.error_reporting import SingleRankErrors
from mega_train.resolve import ResolvedConfig, resolve

# examples/pretrain_gpt_distributed_with_mp.sh of Megatron-LM 23.06, its variables filled in
MEGATRON = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 24
--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
--micro-batch-size 4 --global-batch-size 16 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
--data-path 0.3 P 0.7 Q --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap
--split 949,50,1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl
--log-interval 100 --save C --load C --vocab-size 50257
"""
LLAMA = """
--use-mcore-models --num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8
--group-query-attention --num-query-groups 2 --seq-length 256 --max-position-embeddings 256
--untie-embeddings-and-output-weights --use-rotary-position-embeddings --no-position-embedding --swiglu
--normalization RMSNorm --disable-bias-linear --attention-softmax-in-fp32 --layernorm-epsilon=1e-6
--no-masked-softmax-fusion --tokenizer-type Llama2Tokenizer --tokenizer-model t.model --bf16
--transformer-impl transformer_engine --micro-batch-size 1 --train-iters 10 --lr 1e-4 --vocab-size 32000
--local-rank -1 --profile-backward
"""
FAIRSEQ = """
--memory-efficient-fp16 --num-workers 2 --model-parallel-size 1 --criterion vocab_parallel_cross_entropy
--task language_modeling --sample-break-mode none --tokens-per-sample 1024 --arch transformer_lm_megatron_11b
--share-decoder-input-output-embed --optimizer adam --adam-betas|(0.9, 0.98) --adam-eps 1e-08 --clip-norm 0.0
--lr-scheduler inverse_sqrt --lr 0.00015 --warmup-updates 3000 --weight-decay 0.01 --dropout 0.1
--attention-dropout 0.1 --batch-size 2 --max-update 300000 --update-freq 3
"""


def _parse(*args: str) -> tuple[RunConfig, str]:
    """The configuration that a command line is read as, and what was said."""
    seen: list[RunConfig] = []

    @click.command(cls=MegatronCompatibleCommand)
    @add_flags(RunConfig)
    def command(config: Path | None, sets: Any, **options: Any) -> None:
        seen.append(load_config(RunConfig, config, options, sets))

    result = CliRunner().invoke(command, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0], result.stderr


OURS = {name for key in config_keys(RunConfig) for name in key.declared.split("/")} | {
    "--config",
    "--set",
    "--help",
}


def _words(script: str) -> list[str]:
    return [word for part in script.split("|") for word in ([part] if "(" in part else part.split())]


def _plan(run: RunConfig, world: int = 1) -> ResolvedConfig:
    return resolve(run, "gpt", world, corpus=None, loaded_spec=None, cuda=False)


def test_a_megatron_script_is_read_as_it_is() -> None:
    run, message = _parse(*_words(MEGATRON))
    assert message.count("\n") == 2
    assert message.splitlines()[1].startswith("--hidden-dropout and --attention-dropout are 0 unless given")
    assert message.startswith("left out: ")
    assert "--distributed-backend (" in message
    assert not {"--vocab-file", "--split", "--fp16"} & set(message.replace(",", " ").split()), "what counts"
    assert run.tokenizer.vocab_file == Path("gpt2-vocab.json")
    plan = _plan(run, 4)
    assert (plan.spec.layers, plan.spec.hidden, plan.spec.positions) == (24, 1024, "learned")
    assert (plan.layout.tp, plan.layout.pp, plan.global_batch_size, plan.accumulation_steps) == (2, 2, 16, 4)
    assert run.train.fp16
    assert (run.data.path, run.data.split) == (("0.3", "P", "0.7", "Q"), "949,50,1")


def test_a_llama_script_is_read_as_it_is() -> None:
    run, message = _parse(*_words(LLAMA))
    spec = _plan(run).spec
    assert (spec.positions, spec.kv_heads, spec.norm, spec.norm_eps) == ("rope", 2, "rmsnorm", 1e-6)
    assert (spec.activation, spec.ffn, spec.bias, spec.tied) == ("swiglu", 1024, False, False)
    assert "--transformer-impl" in message
    assert "--local-rank" in message


def test_a_fairseq_script_is_megatron_11b() -> None:
    head, betas = FAIRSEQ.split("--adam-betas|(0.9, 0.98)")
    run, _ = _parse(*head.split(), "--adam-betas", "(0.9, 0.98)", *betas.split(), "--vocab-size", "51200")
    plan = _plan(run)
    assert (plan.spec.layers, plan.spec.ffn, plan.spec.tied, plan.seq_length) == (72, 18432, True, 1024)
    assert (plan.micro_batch_size, plan.global_batch_size, plan.iterations) == (2, 6, 300000)
    assert (run.optimizer.decay_style, run.optimizer.beta2) == ("inverse-square-root", 0.98)
    assert (run.optimizer.warmup_iterations, run.optimizer.clip) == (3000, 0.0)
    assert (run.train.fp16, run.train.hidden_dropout) == (True, 0.1)
    untied, _ = _parse("--arch", "transformer_lm_megatron_11b")
    assert untied.model.untied


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--no-position-embedding", "--position-embedding-type none"),
        (
            "--no-position-embedding --use-rotary-position-embeddings --rotary-percent 0.5",
            "--position-embedding-type rope --rotary-percent 0.5",
        ),
        (
            "--no-position-embedding --position-embedding-type=alibi",
            "--position-embedding-type alibi",
        ),
        ("--position-embedding-type rotary", "--position-embedding-type rope"),
        ("--position-embedding-type=absolute", "--position-embedding-type learned_absolute"),
        ("--position-embedding-type alibi", "--position-embedding-type alibi"),
        ("--group-query-attention", "--num-query-groups 1"),
        ("--group-query-attention --num-query-groups 4", "--num-query-groups 4"),
        ("--openai-gelu --lr 1", "--activation gelu_tanh --lr 1"),
        ("--activations-checkpoint-method block", "--recompute-granularity full --recompute-method block"),
        ("--DDP-impl FSDP --DDP-impl local", "--zero-stage 3 --DDP-impl local"),
        ("--num-workers 4 --lr 1 --wandb-project x", "--lr 1 --wandb-project x"),
        ("--profile --profile-backward --use-legacy-models=1 --lr=-1", "--profile --lr=-1"),
        ("--eval-only True --lr 1", "--eval-only --lr 1"),
        ("--pp-partition-method type:transformer --lr 1", "--lr 1"),
        (
            "--pp-partition-method=type:transformer|embedding",
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "--zero-stage 3"),
        ("--use-torch-fsdp2", "--zero-stage 3"),
        (
            "--num-key-value-heads 2 --rotary-position-embeddings-theta=5 --kill-switch-file F",
            "--num-query-groups 2 --rotary-base=5 --kill-switch-path F",
        ),
        (
            "--enable-zbh1-pipeline --enable-zbh1-exact-semantics --dataloader-inter-document-masking",
            "--pipeline-schedule zero-bubble --reset-attention-mask",
        ),
        ("--no-pad-vocab-size --disable-fp8-wgrad", "--make-vocab-size-divisible-by 1 --no-fp8-wgrad"),
        ("--task language_modeling --save-interval-updates 5", "--save-interval 5"),
        ("--lr-scheduler fixed", "--lr-decay-style constant"),
    ],
)
def test_flags_of_other_programs_are_translated(theirs: str, ours: str) -> None:
    result = translate_flags(theirs.split(), OURS)
    assert (result.words, result.refused) == (ours.split(), [])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            "--arch transformer_lm_gpt",
            "--arch: not a known value: found transformer_lm_gpt, wanted transformer_lm_megatron_11b",
        ),
        ("--criterion adaptive_loss", "--criterion: not a known value: found adaptive_loss"),
        ("--adam-betas 0.9", '--adam-betas: not two numbers: found 0.9, wanted "(0.9, 0.98)"'),
        ("--eval-only False", "--eval-only: is a switch, and any value enables it: found False; hint: leave"),
        ("--arch", "--arch: needs a value"),
        ("--mlp-type residual", "--mlp-type: not a known value: found residual, wanted standard"),
        ("--deepspeed_config none.json", "--deepspeed_config: no such file: found none.json"),
    ],
)
def test_words_that_mean_nothing_are_told(theirs: str, message: str) -> None:
    (error,) = translate_flags(theirs.split(), OURS).refused
    assert str(error).startswith(message)


DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "tensorboard": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3},
    "bf16": {"enabled": "auto"},
}


def test_a_deepspeed_configuration_says_batch_zero_and_fp16(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    run, _ = _parse("--deepspeed", "--deepspeed_config", str(file), "--train-iters", "3", "--zero-stage", "2")
    assert (run.batch.global_samples, run.batch.micro, run.optimizer.clip) == (64, 2, 0.5)
    assert (run.parallel.zero_stage, run.parallel.overlap_reduce, run.parallel.bucket) == (2, True, 5 * 10**8)
    assert (run.train.fp16, run.train.initial_loss_scale, run.train.hysteresis) == (True, 4096.0, 3)
    assert (run.train.loss_scale, run.train.bf16) == (None, False)


# the shape of BigScience's
CURRICULUM = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": 2048,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 36000, "difficulty_step": 8, "root_degree": 2},
}


def test_a_deepspeed_configuration_says_a_curriculum_over_lengths(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"curriculum_learning": CURRICULUM}))
    run, _ = _parse("--deepspeed_config", str(file), "--seq-length", "2048")
    c = run.curriculum
    assert (c.start, c.steps, c.multiple, c.root, run.batch.length) == (64, 36000, 8, 2.0, 2048)
    file.write_text(json.dumps({"curriculum_learning": CURRICULUM | {"enabled": False}}))
    assert _parse("--deepspeed_config", str(file))[0].curriculum == CurriculumConfig()


@pytest.mark.parametrize(
    ("config_flag", "content", "message"),
    [
        (
            {"curriculum_learning": CURRICULUM},
            "--seq-length 1024",
            "curriculum_learning.max_difficulty: disagrees with --seq-length: found 2048, wanted 1024",
        ),
        (
            {"curriculum_learning": CURRICULUM | {"schedule_type": "fixed_discrete"}},
            "",
            "curriculum_learning: no such curriculum: found seqlen, fixed_discrete, wanted seqlen,",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            "--zero-stage 1",
            "zero_optimization.stage: disagrees with --zero-stage: found 2, wanted 1, or no --zero-stage",
        ),
        (
            {"fp16": {"enabled": False}},
            "--fp16",
            "fp16.enabled: disagrees with --fp16: found false, wanted true",
        ),
        (
            {"optimizer": {"type": "Lamb"}},
            "",
            "optimizer.type: is not read: wanted bf16, bfloat16, curriculum_learning,",
        ),
        (
            {"train_batch_size": "many"},
            "",
            'train_batch_size: not a number: found "many", wanted what --global-batch-size takes',
        ),
        ([], "", "ds.json: is not a DeepSpeed configuration: wanted a JSON object"),
    ],
)
def test_what_a_deepspeed_configuration_cannot_say_is_told(
    tmp_path: Path, config_flag: Any, content: str, message: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config_flag))
    config = f"--deepspeed_config={file}"
    for line in ([*content.split(), config], [config, *content.split()]):
        assert message in str(translate_flags(line, OURS).refused[0])
    file.write_text("{")
    (error,) = translate_flags([config], OURS).refused
    assert "ds.json: is not JSON" in str(error)


@pytest.mark.parametrize(
    ("config_flag", "content", "message"),
    [
        ({"train_batch_size": 512}, "--global-batch-size 1_024", "found 512, wanted 1024"),
        (
            {"train_micro_batch_size_per_gpu": 2},
            "--batch-size 4",
            "disagrees with --micro-batch-size: found 2",
        ),
        ({"gradient_clipping": 0.5}, "--clip-grad 1e0", "disagrees with --clip-grad: found 0.5, wanted 1"),
        ({"gradient_clipping": 0.5}, "--clip-norm=1", "disagrees with --clip-grad: found 0.5, wanted 1"),
        ({"zero_optimization": {"stage": 2}}, "--use-torch-fsdp2", "disagrees with --zero-stage: found 2"),
        ({"fp16": {"enabled": False}}, "--memory-efficient-fp16", "disagrees with --fp16"),
    ],
)
def test_a_deepspeed_configuration_disagrees_with_a_flag_in_any_spelling_and_order(
    tmp_path: Path, config_flag: Any, content: str, message: str
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config_flag))
    for line in (
        ["--deepspeed_config", str(file), *content.split()],
        [*content.split(), f"--deepspeed_config={file}"],
    ):
        (error,) = translate_flags(line, OURS).refused
        assert message in str(error)


def test_equal_values_of_a_deepspeed_configuration_are_none_that_disagree(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"train_batch_size": 1024, "gradient_clipping": 1.0, "bf16": {"enabled": True}})
    )
    line = ["--global-batch-size", "1_024", "--clip-norm", "1e0", "--bf16", f"--deepspeed_config={file}"]
    result = translate_flags(line, OURS)
    assert (result.refused, result.words) == (
        [],
        ["--global-batch-size", "1_024", "--clip-grad", "1e0", "--bf16"],
    )


def test_deepspeeds_own_scaler_replaces_a_flags_loss_scale(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}))
    run, message = _parse("--loss-scale", "12", "--fp16", "--deepspeed_config", str(file))
    assert (run.train.loss_scale, run.train.initial_loss_scale) == (None, 4096.0)
    assert (
        "--loss-scale (fp16.loss_scale 0 in a DeepSpeed configuration selects dynamic loss scaling)"
        in message
    )


def _refused_flags(*args: str) -> tuple[list[str], str]:
    """What a command prints that refuses its flags, and the error it ends with."""

    group = SingleRankErrors("group")

    @group.command("start", cls=MegatronCompatibleCommand)
    @add_flags(RunConfig)
    def command(config: Path | None, sets: Any, **options: Any) -> None:
        raise AssertionError("it must not begin")

    result = CliRunner().invoke(group, ["start", *args], standalone_mode=False)
    return result.stderr.splitlines(), str(result.exception)


def test_everything_that_cannot_be_read_is_told_at_once() -> None:
    line = "--num-experts 8 --lr high --mixed 3 --moe-router-topk 2 --arch other --lr-decay-style cosin"
    table, error = _refused_flags(*line.split())
    assert [row.split()[0] for row in table] == [
        "flag",
        "--num-experts",
        "--mixed",
        "--moe-router-topk",
        "--arch",
        "--lr",
        "--lr-decay-style",
    ]
    assert table[2].split() == ["--mixed", "no", "such", "option"]
    assert error == (
        "command line: 6 arguments are refused, listed above: found --num-experts, --mixed, "
        "--moe-router-topk, --arch, --lr, --lr-decay-style; hint: mega-train explain FLAG"
    )


def test_one_flag_that_cannot_be_read_is_one_line() -> None:
    assert _refused_flags("--num-experts", "8") == (
        [],
        "--num-experts: mixture-of-experts layers are not supported",
    )
    assert _refused_flags("--lr", "high")[0] == []


def test_help_is_shown_beside_flags_that_cannot_be_read() -> None:
    @click.command(cls=MegatronCompatibleCommand)
    @add_flags(RunConfig)
    def command(**options: Any) -> None:
        raise AssertionError("it must not begin")

    result = CliRunner().invoke(command, ["--num-experts", "8", "--help"])
    assert "--megatron-defaults" in result.stdout


def test_a_script_that_leaves_dropout_to_megatrons_default_is_told() -> None:
    note = "--hidden-dropout and --attention-dropout are 0 unless given, 0.1 in Megatron"
    assert note in _parse("--use-flash-attn")[1]
    assert note in _parse("--max-position-embeddings", "8")[1]
    assert "--attention-dropout is 0 unless given" in _parse("--use-flash-attn", "--hidden-dropout", "0")[1]
    assert _parse("--num-layers", "2")[1] == ""
    run, output = _parse("--megatron-defaults", "--max-position-embeddings", "8", "--attention-dropout", "0")
    assert (run.train.hidden_dropout, run.train.attention_dropout) == (0.1, 0.0)
    assert not run.checkpoint.exit_signal_handler
    assert not run.checkpoint.async_save
    assert output == ""
    assert "would override the file" in _refused_flags("--megatron-defaults", "--config", "f.toml")[1]


def test_fairseqs_world_size_is_checked_against_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--distributed-world-size"
    assert translate_flags([flag, "1"], OURS).words == []
    (error,) = translate_flags([flag, "8"], OURS).refused
    assert str(error) == (
        f"{flag}: is not the number of processes: found 8, wanted 1; "
        "hint: torchrun --nproc-per-node 8 -m mega_train ..."
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert translate_flags([flag, "8"], OURS).refused == []
    assert translate_flags([flag, "8"], OURS | {"--world"}).words == ["--world", "8"]


def test_fairseqs_folder_of_data_is_what_is_read(tmp_path: Path) -> None:
    for name in ("train.idx", "valid.idx"):
        (tmp_path / name).touch()
    words = translate_flags([str(tmp_path), "--task", "language_modeling"], OURS).words
    assert words == ["--train-data-path", f"{tmp_path}/train", "--valid-data-path", f"{tmp_path}/valid"]
