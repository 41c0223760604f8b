"""From what a person said to what will be done: every derived number, and every check between two values.

This is the one validator. Past it, a `Plan` is right or the run has not begun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from mega_schema.arch import table
from mega_schema.errors import ConfigError, LayoutError
from mega_schema.layout import Layout
from mega_schema.recompute import Recompute
from mega_schema.spec import Family, ModelSpec, gpt, llama, preset
from mega_schema.tokenizer import TokenizerIdentity
from mega_train.buckets import Sharing
from mega_train.checks import (
    check_dropout,
    check_overlap,
    check_precision,
    check_replicas,
    recomputation,
    zero_stage,
)
from mega_train.config import Model, Run
from mega_train.data.splits import shares
from mega_train.dealing import dealt
from mega_train.rates import LearningRate

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can begin.

    Attributes:
        length: tokens of a sample.
        micro: samples in one forward pass of one rank.
        global_samples: samples per optimizer step.
        iterations: optimizer steps in all.
        eod: the token that ends a document, where the run needs to know it.
        recompute: what backward computes again.
    """

    run: Run
    spec: ModelSpec
    layout: Layout
    length: int
    micro: int
    global_samples: int
    iterations: int
    rate: LearningRate
    eod: int | None
    recompute: Recompute
    device: Literal["cpu", "cuda"]

    @property
    def accumulation(self) -> int:
        """Forward passes of one rank per optimizer step."""
        return self.global_samples // (self.micro * self.layout.dp)

    @property
    def sharing(self) -> Sharing:
        """How the replicas of the model share the work of keeping it."""
        p, replicas = self.run.parallel, self.layout.dp * self.layout.cp
        return Sharing(
            stage=zero_stage(p),
            bucket=p.bucket or max(40_000_000, 1_000_000 * replicas),  # Megatron's
            overlap_reduce=p.overlap_reduce,
            overlap_gather=p.overlap_gather,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, all ranks together."""
        return self.global_samples * self.length

    @property
    def train_samples(self) -> int:
        return self.iterations * self.global_samples

    @property
    def valid_samples(self) -> int:
        """Samples of all validations of the run together, as Megatron counts them."""
        evaluation = self.run.evaluation
        return (self.iterations // evaluation.interval + 1) * evaluation.iterations * self.global_samples


def resolve(
    run: Run,
    family: Family,
    world: int,
    *,
    corpus: TokenizerIdentity | None,
    loaded: ModelSpec | None,
    cuda: bool,
) -> Plan:
    """Check the run against itself, the processes, the corpus and the checkpoint it goes on from.

    Args:
        world: processes of the run.
        corpus: the tokenizer the corpus was made with, where the dataset says so.
        loaded: the model of the checkpoint that is loaded, if one is.
        cuda: whether this machine has a GPU that torch can use.

    Raises:
        ConfigError, LayoutError: two values disagree; the message names both.
    """
    layout = Layout.of(world, tp=run.parallel.tp, pp=run.parallel.pp, cp=run.parallel.cp)
    spec = model_spec(run, family, vocab=corpus.vocab_size if corpus else None, loaded=loaded)
    layout = dealt(run.parallel, spec.layers, layout)
    _check_cut(spec, layout)
    length = spec.context if run.batch.length is None else run.batch.length
    _check_length(run, spec, length, layout)
    micro, global_samples = _batch(run, layout.dp)
    iterations = _wanted(run.train.iterations, "--train-iters", "optimizer steps", "--train-iters 1000")
    shares(run.data.split)
    _check_counts(run)
    _check_optimizer(run)
    check_dropout(run.train)
    check_precision(run.train)
    check_replicas(run.parallel)
    if corpus is not None:
        _check_vocabulary(corpus, spec)
    if run.train.device == "cuda" and not cuda:
        raise ConfigError("--device", "no GPU that torch can use", found="cuda", hint="--device cpu")
    device: Literal["cpu", "cuda"] = "cuda" if cuda and run.train.device != "cpu" else "cpu"
    check_overlap(run.parallel, device)
    return Plan(
        run=run,
        spec=spec,
        layout=layout,
        length=length,
        micro=micro,
        global_samples=global_samples,
        iterations=iterations,
        rate=_rate(run, iterations, global_samples),
        eod=_eod(run, corpus),
        recompute=recomputation(run, layout, micro * length // layout.cp),
        device=device,
    )


def model_spec(run: Run, family: Family, *, vocab: int | None, loaded: ModelSpec | None) -> ModelSpec:
    """The checkpoint's model where nothing is said of it, else what is said; both must be equal."""
    if run.model == Model() and loaded is not None:
        _check_family(family, loaded)
        return loaded
    spec = _said(run, family, loaded.vocab if loaded and run.model.vocab is None else vocab)
    if loaded is not None:
        for name, value in loaded.to_dict().items():
            if name not in ("vocab_multiple", "init_std") and getattr(spec, name) != value:
                raise ConfigError(
                    f"model.{name}",
                    "differs from the checkpoint's",
                    found=getattr(spec, name),
                    wanted=value,
                    hint="leave the model's flags out to take the checkpoint's model",
                )
    return spec


def _said(run: Run, family: Family, vocab: int | None) -> ModelSpec:
    m = run.model
    if m.swiglu and m.activation not in (None, "swiglu"):
        raise ConfigError("--activation", "disagrees with --swiglu", found=m.activation, wanted="swiglu")
    over = {
        "layers": m.layers,
        "hidden": m.hidden,
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_width": m.head_width,
        "ffn": m.ffn,
        "vocab": m.vocab,
        "context": m.context,
        "vocab_multiple": m.vocab_multiple,
        "norm": m.norm.lower() if m.norm else None,
        "norm_eps": m.norm_eps,
        "activation": "swiglu" if m.swiglu else m.activation,
        "positions": "learned" if m.positions == "learned_absolute" else m.positions,
        "rope_base": m.rope_base,
        "init_std": m.init_std,
        "tied": False if m.untied else None,
        "bias": False if m.no_bias else None,
        "qkv_bias": False if m.no_bias else None,
    }
    given: dict[str, Any] = {name: value for name, value in over.items() if value is not None}
    if m.preset is not None:
        base = preset(m.preset)
        _check_family(family, base)
        return ModelSpec.from_dict({**base.to_dict(), **given})
    given.setdefault("context", run.batch.length)
    given.setdefault("vocab", vocab)
    for name, flag in _NEEDED.items():
        _wanted(given.get(name), flag, "a number, or --preset", f"--preset gpt2-124m or {flag} N")
    if given["hidden"] % given["heads"] and "head_width" not in given:
        raise ConfigError(
            "--num-attention-heads",
            "does not divide --hidden-size",
            found=f"{given['heads']} heads, hidden {given['hidden']}",
            wanted=f"a divisor of {given['hidden']}, or --kv-channels",
        )
    if "ffn" not in given and given.get("activation", "swiglu" if family == "llama" else "") == "swiglu":
        given["ffn"] = int(given["hidden"] * 4 * 2 / 3 / 64) * 64 or 64
    return (gpt if family == "gpt" else llama)(**given)


_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "layers": "--num-layers",
        "hidden": "--hidden-size",
        "heads": "--num-attention-heads",
        "context": "--max-position-embeddings",
        "vocab": "--vocab-size",
    }
)


def _check_family(family: Family, spec: ModelSpec) -> None:
    if spec.family != family:
        raise ConfigError(
            "command",
            "trains another family",
            found=family,
            wanted=spec.family,
            hint=f"mega-train {spec.family}",
        )


def _check_cut(spec: ModelSpec, layout: Layout) -> None:
    """Cut every parameter as the ranks will, so that no rank finds out while it builds its model."""
    for row in table(spec):
        row.local_shape(layout.tp)


def _check_vocabulary(corpus: TokenizerIdentity, spec: ModelSpec) -> None:
    if corpus.vocab_size > spec.vocab:
        raise ConfigError(
            "--data-path",
            "the corpus is tokenized for a larger vocabulary than the model's",
            found=f"{corpus.vocab_size} tokens ({corpus.type})",
            wanted=f"at most {spec.vocab}",
            hint=f"--vocab-size {corpus.vocab_size}, or the tokenizer of the model",
        )


def _eod(run: Run, corpus: TokenizerIdentity | None) -> int | None:
    if not (run.data.reset_attention or run.data.reset_positions or run.data.eod_mask_loss):
        return None
    if corpus is None or corpus.eod is None:
        raise ConfigError(
            "--data-path",
            "the end-of-document token is not known",
            found="a dataset whose tokenizer has none" if corpus else "a dataset without a .json beside it",
            wanted="a token for --reset-position-ids, --reset-attention-mask and --eod-mask-loss",
            hint="preprocess the corpus with mega-data preprocess --append-eod",
        )
    return corpus.eod


def _check_length(run: Run, spec: ModelSpec, length: int, layout: Layout) -> None:
    if length < 1 or length > spec.context:
        raise ConfigError(
            "--seq-length",
            "does not fit the model",
            found=f"{length} tokens",
            wanted=f"1 to {spec.context} (--max-position-embeddings)",
        )
    if layout.cp > 1 and length % (chunks := 2 * layout.cp):
        near = max(chunks, length // chunks * chunks)
        raise LayoutError(
            "--context-parallel-size",
            "a sequence cannot be cut into two chunks for each rank",
            found=f"{length} tokens, cp={layout.cp}",
            wanted=f"a sequence length that is a multiple of 2 x {layout.cp} = {chunks}",
            hint=f"--seq-length {near}",
        )
    tp, tokens = layout.tp, run.batch.micro * length // layout.cp
    if run.parallel.sequence and tokens % tp:
        raise LayoutError(
            "--sequence-parallel",
            "the tokens of a micro-batch cannot be shared evenly",
            found=f"{tokens} tokens over tp={tp}",
            wanted="micro-batch size x sequence length"
            + (f" / {layout.cp}" if layout.cp > 1 else "")
            + f" a multiple of {tp}",
        )


def _batch(run: Run, dp: int) -> tuple[int, int]:
    micro = run.batch.micro
    if micro < 1:
        raise ConfigError("--micro-batch-size", "not a size", found=micro, wanted="1 or more")
    whole = micro * dp if run.batch.global_samples is None else run.batch.global_samples
    if whole < 1 or whole % (micro * dp):
        near = max(1, round(whole / (micro * dp))) * micro * dp
        raise ConfigError(
            "--global-batch-size",
            "is not a multiple of micro-batch size x data-parallel size",
            found=whole,
            wanted=f"a multiple of {micro} x {dp} = {micro * dp}",
            hint=f"--global-batch-size {near}",
        )
    return micro, whole


def _check_counts(run: Run) -> None:
    counts = {
        "--eval-interval": run.evaluation.interval,
        "--log-interval": run.log.interval,
        "--save-interval": run.checkpoint.interval,
        "--exit-interval": run.train.exit_interval,
    }
    for flag, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(flag, "not an interval", found=value, wanted="1 or more")
    if not 0 < run.parallel.timeout_minutes < math.inf:
        flag = "--distributed-timeout-minutes"
        raise ConfigError(flag, "not a time", found=run.parallel.timeout_minutes, wanted="more than 0")
    if not 0 <= run.train.seed < 1 << 32:
        raise ConfigError("--seed", "is not a seed of numpy", found=run.train.seed, wanted="0 to 2^32 - 1")
    if run.evaluation.iterations < 0:
        raise ConfigError("--eval-iters", "not a count", found=run.evaluation.iterations, wanted="0 or more")
    if run.checkpoint.interval is not None and run.checkpoint.save is None:
        raise ConfigError(
            "--save-interval", "there is no place to save to", wanted="--save DIR", hint="--save RUN"
        )


def _check_optimizer(run: Run) -> None:
    o = run.optimizer
    for flag, beta in (("--adam-beta1", o.beta1), ("--adam-beta2", o.beta2)):
        if not 0 <= beta < 1:
            raise ConfigError(flag, "does not decay", found=beta, wanted="0 or more, and less than 1")
    if not 0 < o.eps < math.inf:
        # with 0, a weight that had no gradient yet would become 0 / 0
        raise ConfigError("--adam-eps", "not above 0", found=o.eps, wanted="a small number, such as 1e-8")
    for flag, value in (("--weight-decay", o.weight_decay), ("--clip-grad", o.clip)):
        if not 0 <= value < math.inf:
            raise ConfigError(flag, "not a number that can be used", found=value, wanted="0 or more")


def _rate(run: Run, iterations: int, global_samples: int) -> LearningRate:
    o = run.optimizer
    peak = _wanted(o.lr, "--lr", "a learning rate", "--lr 3e-4")
    steps = iterations
    if o.decay_iterations is not None:
        steps = _wanted(o.decay_iterations, "--lr-decay-iters", "optimizer steps", "--lr-decay-iters 1000")
    decay = steps * global_samples
    if o.warmup_fraction is not None and o.warmup_iterations:
        raise ConfigError(
            "--lr-warmup-fraction", "excludes --lr-warmup-iters", found="both", wanted="one of them"
        )
    if o.warmup_fraction is not None:
        warmup = o.warmup_fraction * decay
    else:
        warmup = float(o.warmup_iterations * global_samples)
    if not 0 <= warmup < decay:
        raise ConfigError(
            "--lr-warmup-iters" if o.warmup_fraction is None else "--lr-warmup-fraction",
            "the warm-up does not end before the decay does",
            found=f"{warmup / global_samples:g} of {steps} steps",
            wanted="0 or more, and fewer than --lr-decay-iters (by default --train-iters)",
        )
    if not 0 <= o.min_lr <= peak:
        raise ConfigError("--min-lr", "is not between 0 and --lr", found=o.min_lr, wanted=f"0 to {peak}")
    return LearningRate(peak=peak, least=o.min_lr, warmup=warmup, decay=decay, style=o.decay_style)


def _wanted(value: N | None, flag: str, what: str, hint: str) -> N:
    if value is None:
        raise ConfigError(flag, "missing", wanted=what, hint=hint)
    if not 0 < value < math.inf:
        raise ConfigError(flag, "not above 0", found=value, wanted=what, hint=hint)
    return value
