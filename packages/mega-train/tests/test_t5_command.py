"""The command for T5: it learns, resumes, and refuses what does not fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_model.distributed.mesh import Mesh
from mega_schema.app.config import load_config
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import t5
from mega_train.config import ParallelConfig, RunConfig
from mega_train.data.datasets import Datasets
from mega_train.data.encoder.sentence_datasets import SentenceDatasets
from mega_train.data.encoder.t5_reader import LABEL, REAL, SOURCE, SOURCE_REAL, TOKEN
from mega_train.engine.trainer import Trainer
from mega_train.pipeline.stage_assignment import assign_layers
from mega_train.planning.flops import flops_per_token
from mega_train.resolve import resolve
from mega_train.telemetry.event_log import read_events
from tests.encoder_fixture import write_corpus, write_sentences
from tests.train_command import run_mega_train

MODEL = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
MODEL += ["--decoder-seq-length", "24", "--decoder-num-layers", "2"]
TRAINING = ["--global-batch-size", "16", "--micro-batch-size", "16", "--lr", "3e-3", "--lr-decay-style"]
TRAINING += ["constant", "--eval-iters", "2", "--eval-interval", "40", "--log-interval", "40"]
TRAINING += ["--split", "80,20,0", "--train-iters", "80"]
VOCAB = 234  # 202 pieces, [BOS], [EOS] and 30 sentinels


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a dataset of sentences with a tokenizer of 30 sentinels beside it."""
    return write_corpus(tmp_path_factory.mktemp("sentences") / "toy", sentinels=30)


def _t5(corpus: Path, *argv: str, code: int = 0) -> tuple[str, str]:
    return run_mega_train("t5", "--data-path", str(corpus), *MODEL, *TRAINING, *argv, code=code)


def test_a_run_learns_and_resumes(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out, _ = _t5(corpus, "--save", str(run), "--save-interval", "40")
    lines = [line for line in out.splitlines() if " | loss " in line]
    losses = [event["loss"] for event in read_events(run) if event["event"] == "validation"]
    # a number follows the one before it: the text around a span tells which are missing
    assert losses[1] < losses[0] < 0.8 * np.log(VOCAB)
    checkpoint = Checkpoint.open(run)
    spec = checkpoint.spec
    assert (spec.family, spec.vocab, spec.layers, spec.encoder_layers) == ("t5", VOCAB, 3, 1)
    recorded = (run / "iter_0000080/run.toml").read_text("utf-8")
    assert 'family = "t5"' in recorded
    assert "decoder_num_layers = 2" in recorded
    assert "decoder_seq_length = 24" in recorded
    shutil.rmtree(run / "iter_0000080")
    (run / "latest_checkpointed_iteration.txt").write_text("40")
    _, err = _t5(corpus, "--load", str(run), "--decoder-seq-length", "20", code=2)
    assert "--override-data reads these from here on" in err
    resumed = [*TRAINING, "--seq-length", "32", "--decoder-seq-length", "24", "--load", str(run)]
    out, _ = run_mega_train("t5", "--data-path", str(corpus), *resumed, "--save", str(run))
    assert out.splitlines()[-1] == lines[-1]
    # without flags the checkpoint's model is recorded, in keys that describe it
    assert "num_layers = 1\n" in (run / "iter_0000080/run.toml").read_text("utf-8")


def _trainer(corpus: Path, *words: str) -> Trainer:
    sets = [
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "batch.seq_length=32",
        "encoder_data.decoder_seq_length=24",
    ]
    sets += ["train.train_iters=9", "optimizer.lr=0.01", "optimizer.adam_eps=1e-3", "evaluation.eval_iters=0"]
    sets += ["batch.global_batch_size=4", "train.seed=5", *words]
    run = load_config(RunConfig, None, {"data_path": (str(corpus),)}, sets)
    datasets = Datasets.open(run.data)
    config = resolve(run, "t5", 1, corpus=datasets.identity, loaded_spec=None, cuda=False)
    sentences = SentenceDatasets.from_tokenizer("t5", datasets, datasets.tokenizer, run.encoder_data)
    return Trainer(config, Mesh(), sentences)


def _steps(trainer: Trainer, count: int = 3) -> list[tuple[float, ...]]:
    return [trainer.step(trainer.state.lr) for _ in range(count)]


@pytest.mark.parametrize(
    "change",
    [
        ["recompute.recompute_granularity=full"],
        ["recompute.recompute_granularity=selective"],
        ["train.gradient_accumulation_fusion=false"],
        ["encoder_data.sample_rule=legacy"],
        ["encoder_data.unpad_samples=true"],
        ["encoder_data.unpad_samples=true", "recompute.recompute_granularity=selective"],
    ],
    ids=["full", "selective", "unfused", "masks of matrices", "unpadded", "unpadded, selective"],
)
def test_recomputation_fusion_masks_and_padding_change_no_step(corpus: Path, change: Sequence[str]) -> None:
    drops = ["train.hidden_dropout=0.1", "train.attention_dropout=0.1"]
    expected = _steps(_trainer(corpus, *drops))
    np.testing.assert_allclose(_steps(_trainer(corpus, *drops, *change)), expected, rtol=1e-5)


def test_a_decoder_longer_than_the_encoder_is_not_shortened(corpus: Path) -> None:
    """The samples of the two lengths are the same but for padding, and so are the losses."""
    expected = _steps(_trainer(corpus, "model.max_position_embeddings=40"))
    longer = _trainer(corpus, "encoder_data.decoder_seq_length=40", "model.max_position_embeddings=40")
    assert longer.train[0].shape == (5, 40)
    np.testing.assert_allclose(_steps(longer), expected, rtol=1e-5)


def test_the_loss_of_a_micro_batch_is_a_mean_over_the_tokens_of_its_decoder(corpus: Path) -> None:
    """A step's loss is the mean over micro-batches, which have different numbers of tokens."""
    single = _trainer(corpus, "batch.micro_batch_size=1")
    means = [
        float(single.forward_backward.mean_losses(single.train, number, 1, 32, train=False).total)
        for number in range(4)
    ]
    batch = single.forward_backward.mean_losses(single.train, 0, 4, 32, train=False)
    np.testing.assert_allclose(float(batch.total), np.mean(means), rtol=1e-5)
    assert means[0] == pytest.approx(np.log(VOCAB), abs=0.2)


def test_a_sample_has_the_text_and_the_spans(corpus: Path) -> None:
    sample = _trainer(corpus).train[3]
    count = int((sample[LABEL] != -100).sum())
    np.testing.assert_array_equal(sample[TOKEN, 1:count], sample[LABEL, : count - 1])
    assert sample[REAL].sum() == count
    sentinels = sample[LABEL, :count][sample[LABEL, :count] >= 204]
    assert len(sentinels)
    assert set(sentinels.tolist()) == set(sample[SOURCE][sample[SOURCE] >= 204].tolist())
    assert (sample[SOURCE][sample[SOURCE_REAL] == 0] == 0).all()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no bfloat16 products")
def test_bfloat16_is_close_to_float32(corpus: Path) -> None:
    exact, half = (_steps(_trainer(corpus, f"train.bf16={bf16}")) for bf16 in ("false", "true"))
    np.testing.assert_allclose(half, exact, rtol=0.05)


def test_megatrons_vocab_file_and_extra_ids_are_a_tokenizer(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy", described=False)
    words = ["--vocab-file", str(corpus.with_name("vocab.txt")), "--vocab-extra-ids", "100"]
    run = str(tmp_path / "run")
    _t5(corpus, *words, "--train-iters", "1", "--eval-iters", "0", "--save", run)
    assert Checkpoint.open(Path(run)).spec.vocab == 202 + 2 + 100


REFUSED = {
    "--context-parallel-size 2": "--context-parallel-size: is not supported for T5: ",
    "--pipeline-model-parallel-split-rank 1": "--pipeline-model-parallel-split-rank: leaves a stage without ",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 2": (
        "--pipeline-model-parallel-split-rank: leaves a stage without layers: found 2 of 2 ranks, for 1 "
        "and 2 layers, wanted 1 to 1"
    ),
    "--encoder-pipeline-model-parallel-size 1": "--encoder-pipeline-model-parallel-size: ranks of their own ",
    "--bert-no-binary-head": "--bert-no-binary-head: applies to BERT only: found given; hint: ",
    "--mask-type pieces": "--mask-type: applies to BERT only: found pieces; hint: mega-train bert",
    "--mask-prob 0": "--mask-prob: out of range: found 0.0, wanted between 0 and 1",
    "--decoder-seq-length 33": "--decoder-seq-length: does not fit the model: found 33 tokens, wanted 1 ",
    "--decoder-seq-length 4": "--decoder-seq-length: too short for sample ",
    "--decoder-num-layers 0": "--decoder-num-layers: not a count: found 0, wanted 1 or more",
    "--reset-position-ids": "--reset-position-ids: does not apply to T5: a sample of T5 has one document",
    "--calculate-per-token-loss": "--calculate-per-token-loss: does not apply to T5: T5's loss is a mean ",
    "--curriculum-start-length 8 --curriculum-steps 5": "--curriculum-start-length: does not apply to T5: ",
    "--batch-invariant": "--batch-invariant: does not apply to T5: its attention kernel is causal",
    "--preset gpt2-124m": "command: trains another family: found t5, wanted gpt; hint: mega-train gpt",
    "--window-size 8,0": "--window-size: is not supported in an encoder with a decoder",
    "--qk-layernorm": "--qk-layernorm: is not supported in an encoder with a decoder",
    "--position-embedding-type alibi": "--position-embedding-type: is not supported in an encoder: ",
    "--seq-length 3 --max-position-embeddings 32": "--seq-length: too short for 2 special tokens and text: ",
    "--noise-density 0.15": "--noise-density: applies to decoders only: found t5, wanted gpt | llama",
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_t5_does_not_have_are_one_line(corpus: Path, tmp_path: Path, words: str) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        if "pipeline-model-parallel-size" in words:
            patch.setenv("WORLD_SIZE", "2")
        out, err = _t5(corpus, "--save", str(run), *words.split(), code=2)
    assert err.splitlines()[-1].startswith(f"error: {REFUSED[words]}"), err
    assert list(tmp_path.glob("run/iter_*")) == []
    assert " | loss " not in out


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt", "--pipeline-model-parallel-split-rank 1"),
        ("gpt", "--decoder-seq-length 64"),
        ("llama", "--decoder-num-layers 2"),
        ("bert", "--decoder-num-layers 2"),
    ],
)
def test_other_families_refuse_the_options_of_t5(corpus: Path, family: str, words: str) -> None:
    sizes = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    _, err = run_mega_train(
        family, "--data-path", str(corpus), *sizes.split(), *TRAINING, *words.split(), code=2
    )
    flag, value = words.split()
    hint = "mega-train t5, or leave it out"
    assert err.splitlines()[-1] == f"error: {flag}: applies to T5 only: found {value}; hint: {hint}"


def test_a_tokenizer_without_sentinels_is_one_line(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy")
    _, err = _t5(corpus, "--save", str(tmp_path / "run"), code=2)
    assert err.splitlines()[-1] == (
        "error: --vocab-extra-ids: the tokenizer has no sentinels for T5: found 0, wanted [BOS], [EOS], "
        "<extra_id_0> and so on; hint: mega-data preprocess --vocab-extra-ids 100"
    )
    assert not (tmp_path / "run").exists()


def test_too_few_sentinels_for_a_sample_are_one_line(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "toy", sentinels=1)
    _, err = _t5(corpus, code=2)
    assert err.splitlines()[-1].startswith("error: --vocab-extra-ids: too few sentinels for sample ")


def test_data_without_sentences_is_one_line(tmp_path: Path) -> None:
    vocab = write_corpus(tmp_path / "toy").with_name("vocab.txt")
    write_sentences(tmp_path / "whole", [[60]] * 40)
    words = ["--vocab-file", str(vocab), "--vocab-extra-ids", "30"]
    _, err = _t5(tmp_path / "whole", *words, code=2)
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'whole'}: is not split into sentences")


def test_a_checkpoint_of_another_kind_is_one_line(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _t5(corpus, "--save", str(run), "--train-iters", "1", "--eval-iters", "0")
    more = ["--data-path", str(corpus), "--load", str(run), "--finetune", *TRAINING]
    for family in ("gpt", "bert"):
        _, err = run_mega_train(family, *more, code=2)
        assert err.splitlines()[-1].endswith(f"found {family}, wanted t5; hint: mega-train t5")
    _, err = run_mega_train("plan", "--family", "t5", *MODEL, "--vocab-size", "99", code=2)
    assert err.splitlines()[-1].startswith("error: model.family: cannot be estimated yet: found t5")


def test_the_layers_of_encoder_and_decoder_come_from_the_flags() -> None:
    sets = ["train.train_iters=1", "optimizer.lr=1.0", "model.vocab_size=99", "batch.seq_length=128"]
    sets += ["model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4"]
    for words, layers in (([], (4, 2)), (["model.decoder_num_layers=5"], (7, 2))):
        run = load_config(RunConfig, None, {}, [*sets, *words])
        spec = resolve(run, "t5", 1, corpus=None, loaded_spec=None, cuda=False).spec
        assert (spec.layers, spec.encoder_layers) == layers
        # the keys in run.toml describe the same model
        bare = RunConfig(train=run.train, optimizer=run.optimizer)
        recorded = resolve(bare, "t5", 1, corpus=None, loaded_spec=spec, cuda=False).run
        assert resolve(recorded, "t5", 1, corpus=None, loaded_spec=None, cuda=False).spec == spec
        deeper = load_config(RunConfig, None, {}, [*sets, "model.decoder_num_layers=3"])
        with pytest.raises(ConfigError, match="differs from the checkpoint's"):
            resolve(deeper, "t5", 1, corpus=None, loaded_spec=spec, cuda=False)


@pytest.mark.parametrize(
    ("layers", "pp", "split", "stages"),
    [
        ((12, 12), 4, None, (6, 6, 6, 6)),
        ((12, 12), 4, 1, (12, 4, 4, 4)),
        ((12, 6), 4, 3, (4, 4, 4, 6)),
        ((4, 1), 2, None, (3, 2)),
    ],
)
def test_the_split_rank_is_the_first_stage_of_the_decoder(
    layers: tuple[int, int], pp: int, split: int | None, stages: tuple[int, ...]
) -> None:
    spec = t5(encoder_layers=layers[0], decoder_layers=layers[1], hidden=8, heads=2, vocab=9, max_seq_len=8)
    layout = assign_layers(ParallelConfig(split_rank=split), spec, Layout(pp=pp))
    assert tuple(len(layout.stage(rank, spec.layers).layers) for rank in range(pp)) == stages
    with pytest.raises(ConfigError, match="excludes --num-virtual-stages-per-pipeline-rank"):
        assign_layers(ParallelConfig(split_rank=1, virtual=2), spec, Layout(pp=pp))


def test_flops_count_the_tokens_of_both_sides() -> None:
    """6 per element and token, and 12 per head component and score; keys of the memory are the encoder's."""
    spec = t5(encoder_layers=2, decoder_layers=3, hidden=16, heads=2, vocab=50, max_seq_len=64)
    h, source, target = 16, 60, 20
    encoder = 2 * 12 * h * h + 3 * 2 * h * h
    decoder = 3 * (12 * h * h + 2 * h * h) + 50 * h
    scores = 2 * source**2 + 3 * (target**2 + target * source)
    wanted = 6 * (encoder * source + decoder * target) + 12 * h * scores
    assert flops_per_token(spec, source, target) * source == pytest.approx(wanted)
