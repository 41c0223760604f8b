import re
import shlex

import pytest

from mega_eval.cli import cli
from mega_eval.commands import model_source
from mega_eval.megatron_command_line import check_architecture, parse_flags
from mega_eval.models import rank_opening
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError
from mega_schema.spec import gpt, llama

# flags of Megatron's examples/evaluate_zeroshot_gpt.sh, of the sizes of the test's checkpoint
EXAMPLE = shlex.split(
    "--tokenizer-type NullTokenizer --vocab-size 40 --strict-lambada --tensor-model-parallel-size 1 "
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --batch-size 8 --checkpoint-activations "
    "--seq-length 16 --max-position-embeddings 16 --log-interval 10 --fp16 --no-load-optim --no-load-rng"
)


@pytest.fixture
def call(tmp_path, capsys):
    def run(*words):
        argv = [*map(str, words), "--output", str(tmp_path / "r.json"), "--overwrite", "--device", "cpu"]
        with pytest.raises(SystemExit) as exit_info:
            cli_runner.run_command(cli, argv)
        return exit_info.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def passages(tmp_path):
    path = tmp_path / "lambada_test.jsonl"
    path.write_text("\n".join(f'{{"text": "{n} {n + 1} {n + 2}"}}' for n in range(9)))
    return path


def test_the_flags_of_megatrons_example_are_accepted_and_its_line_is_printed(call, run, passages):
    code, out, err = call("main", "--task", "LAMBADA", "--valid-data", passages, "--load", run, *EXAMPLE)
    assert code == 0, err
    assert re.search(
        r"^ validation results on LAMBADA \| number correct: \d\.\d{4}E\+\d\d \| "
        r"total examples: 9\.0000E\+00 \| avg accuracy: \d\.\d{4}E[+-]\d\d$",
        out,
        re.MULTILINE,
    )
    assert out.endswith("done :-)\n")
    ignored = "--checkpoint-activations --fp16 --log-interval --no-load-optim --no-load-rng"
    (line,) = [line for line in err.splitlines() if line.startswith("ignored")]
    assert line.startswith(f"ignored, without effect on an evaluation: {ignored}")


def test_other_ranks_of_torchrun_serve_rank_0_and_print_nothing(call, run, passages, monkeypatch):
    ranks = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(model_source, "run_other_rank", lambda options, world: ranks.append((options, world)))
    flags = ("--tensor-model-parallel-size", 2, "--valid-data", passages, "--load", run)
    code, out, err = call("main", "--task", "LAMBADA", *flags)
    assert (code, out, err) == (0, "", "")
    [(options, world)] = ranks
    assert (options.tp, world.rank, world.size) == (2, 1, 2)


def test_wikitext103_prints_the_loss_and_takes_the_detokenizer_from_the_path(call, run, tmp_path):
    path = tmp_path / "wiki.test.tokens"
    path.write_text(" ".join(str(n * n % 39) for n in range(60)))
    flags = ("--valid-data", path, "--load", run, "--overlapping-eval", 4, "--seq-length", 8)
    code, out, err = call("main", "--task", "WIKITEXT103", *flags)
    assert code == 0, err
    assert re.search(
        r" validation results on WIKITEXT103 \| avg loss: \S+ \| ppl: \S+ \| "
        r"adjusted ppl: \S+ \| token ratio: 1\.0 \|",
        out,
    )
    code, _, err = call("main", "--task", "WIKITEXT103", "--valid-data", "t", *flags[2:])
    assert code == 2
    assert err.splitlines()[-1].startswith("error: --detokenizer: the path names no data set: found t")


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--model-parallel-size"])
def test_the_layout_of_megatrons_flags_is_that_of_the_evaluation(call, run, passages, monkeypatch, flag):
    layouts = []

    def record_layout(settings, world):
        layouts.append((settings.tp, settings.pp, settings.dp))
        raise ConfigError("--tp", "recorded")

    monkeypatch.setattr(rank_opening, "open_ranks", record_layout)
    words = (flag, 2, "--pipeline-model-parallel-size", 3)
    code, _, err = call("main", "--task", "LAMBADA", "--valid-data", passages, "--load", run, *words)
    assert (code, err) == (2, "error: --tp: recorded\n")
    assert layouts == [(2, 3, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "MNLI"), "--task: not supported: found MNLI, .*hint: mega-eval mnli"),
        (("--num-layer", "2"), "--num-layer: is neither a flag .*did you mean --num-layers"),
        (("--hidden-size", "32"), "--hidden-size: describes another model than --load: found 32, wanted 16"),
        (("--swiglu",), "--swiglu: describes another model"),
        (("--num-layers", "many"), "--num-layers: not a count: found many"),
        (("--valid-data", "a", "b"), "--valid-data: not one file: found 2"),
        (("--tokenizer-type", "GPT2BPETokenizer"), "--vocab-file: missing"),
    ],
)
def test_a_wrong_flag_is_one_line(call, run, passages, words, message):
    code, out, err = call("main", "--task", "LAMBADA", "--valid-data", passages, "--load", run, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"error: {message}", err)


def test_megatrons_name_of_a_task_hints_at_the_command(call):
    code, _, err = call("LAMBADA")
    assert code == 2
    assert err.startswith(
        "error: LAMBADA: is the name of one of Megatron's tasks; hint: mega-eval main --task LAMBADA"
    )


def test_a_word_without_a_flag_is_an_error():
    with pytest.raises(ConfigError, match="file: belongs to no flag"):
        parse_flags(["file", "--task", "LAMBADA"], [])
    assert parse_flags(["--seed=5", "--init-method-std", "-1"], []) == {
        "--seed": ["5"],
        "--init-method-std": ["-1"],
    }


def test_flags_of_a_llama_are_compared_with_its_spec():
    spec = llama(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=50, max_seq_len=64)
    words = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --ffn-hidden-size 24 --swiglu --normalization RMSNorm "
        "--position-embedding-type rope "
        "--untie-embeddings-and-output-weights --disable-bias-linear --max-position-embeddings 9"
    )
    flags = parse_flags(words.split(), [])
    assert check_architecture(flags, spec) == flags.keys() - {"--max-position-embeddings"}
    with pytest.raises(ConfigError, match="--num-query-groups: .*found 4, wanted 2"):
        check_architecture(flags | {"--num-query-groups": ["4"]}, spec)
    plain = gpt(layers=2, hidden=16, heads=4, vocab=50, max_seq_len=64)
    with pytest.raises(ConfigError, match="--max-position-embeddings: .*found 9, wanted 64"):
        check_architecture({"--max-position-embeddings": ["9"]}, plain)
    with pytest.raises(ConfigError, match="--normalization: .*found rmsnorm, wanted layernorm"):
        check_architecture({"--normalization": ["RMSNorm"]}, plain)
