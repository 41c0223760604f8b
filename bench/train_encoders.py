"""Compare training steps of BERT and T5 on a CPU with Hugging Face's models in torch.compile.

    python bench/train_encoders.py CORPUS.jsonl.zst VOCAB.txt --folder FOLDER
                                   [--models bert ...] [--threads 1] [--steps 8] [--json RESULT.json]

bert            `BertForPreTraining` with torch's fused attention: norms after the sums
megatron-bert   `MegatronBertForPreTraining`, with norms before the sublayers and no fused attention
t5              `T5ForConditionalGeneration` as T5 1.1: relative positions, gated GELU, untied output

Both programs start from the same weights, which `mega-ckpt convert` reads from transformers' files, and read
the same samples: `mega-data preprocess --split-sentences` encodes the first documents of CORPUS, and
mega-train's reader makes padded samples with masks of them. A step is reading, forward, backward, clipping
and AdamW in float32, without dropout. Hugging Face's model and loss are one compiled function, its optimizer
is torch's fused AdamW. Ours is a run of `mega-train` with --unpad-samples.

One process has both models and alternates their steps. The losses of each step must agree to 1e-4, or
nothing is compared. The ratio is the median over steps of theirs divided by ours, from CPU time (user and
system, all threads) and wall-clock time; its spread is the least and the largest. Memory is the peak of a
process of each program alone, without what its imports took. Both have the allocator settings of mega-train.

`real_tokens` is the share of tokens that are no padding; `longest_row` is the mean length of the longest row
of a micro-batch as a share of the full length, which bounds what cutting each batch to it could save.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train_cpu import peak_mb, processor_name, run_timed

from mega_eval.compressed_file import open_file
from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import RunConfig
from mega_train.data.encoder import bert_reader, t5_reader
from mega_train.engine.train import prepare, tune_malloc
from mega_train.engine.trainer import Trainer

MODELS = ("bert", "megatron-bert", "t5")
LENGTH, DECODER_LENGTH, MICRO = 512, 128, 4
HIDDEN, LAYERS, HEADS = 384, 6, 6
LR, WEIGHT_DECAY = 1e-4, 0.01
WARM_UP = 2  # steps before those that are timed
TOLERANCE = 1e-4  # of a loss, in nats
SENTINELS = 100
MEMORY_STEPS = 3
OURS, PEER = "ours", "hugging-face"

Step = Callable[[], float]


def run_program(words: list[str | Path], threads: int = 1) -> str:
    """Run this interpreter with some arguments, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def prepare_folder(corpus: Path, vocab: Path, documents: int, folder: Path) -> None:
    """Write the samples' text and, for each model, random weights in both programs' files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab]
    tokenizer += ["--vocab-extra-ids", str(SENTINELS)]
    if not (folder / "text_text_sentence.idx").exists():
        with open_file(corpus) as file:
            (folder / "text.jsonl").write_bytes(b"".join(itertools.islice(file, documents)))
        words = ["-m", "mega_data", "preprocess", "--input", folder / "text.jsonl", "--split-sentences"]
        run_program([*words, "--output-prefix", folder / "text", *tokenizer])
    size = open_tokenizer(
        "BertWordPieceLowerCase", vocab_file=vocab, vocab_extra_ids=SENTINELS
    ).identity.vocab_size
    for name in MODELS:
        if not (folder / f"mega-{name}").exists():
            new_peer(name, size).save_pretrained(folder / f"hf-{name}")
            words = ["-m", "mega_ckpt", "convert", "--from", "hf", "--to", "mega", "--no-check-logits"]
            run_program([*words, "--load", folder / f"hf-{name}", "--save", folder / f"mega-{name}"])


def new_peer(name: str, vocab: int) -> Any:
    """Build one of transformers' models with random weights, without dropout."""
    import transformers

    torch.manual_seed(7)
    if name == "t5":
        config: Any = transformers.T5Config(
            vocab_size=vocab, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=1024, num_layers=LAYERS // 2,
            num_heads=HEADS, feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0,
            use_cache=False,
        )  # fmt: skip
        model: Any = transformers.T5ForConditionalGeneration(config)
        # transformers 5 ties the matrices at first, and keeps them apart in a file where they differ
        model.lm_head.weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN) * HIDDEN**-0.5)
        return model
    prefix = "MegatronBert" if name == "megatron-bert" else "Bert"
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=vocab, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return getattr(transformers, f"{prefix}ForPreTraining")(config)


def open_run(name: str, folder: Path) -> Trainer:
    """Open mega-train's run of a model, which starts from the converted weights."""
    settings: dict[str, Any] = {
        "data.data_path": folder / "text_text_sentence", "data.split": '"100,0,0"',
        "checkpoint.load": folder / f"mega-{name}", "checkpoint.finetune": "true",
        "batch.seq_length": LENGTH, "batch.micro_batch_size": MICRO, "batch.global_batch_size": MICRO,
        "train.train_iters": 100, "evaluation.eval_iters": 0, "optimizer.lr": LR,
        "optimizer.weight_decay": WEIGHT_DECAY,
    }  # fmt: skip
    is_t5 = name == "t5"
    settings["encoder_data.unpad_samples"] = "true"
    if is_t5:
        settings["encoder_data.decoder_seq_length"] = DECODER_LENGTH
    run = load_config(RunConfig, None, {}, [f"{key}={value}" for key, value in settings.items()])
    ready = prepare(run, "t5" if is_t5 else "bert", World())
    mesh = Mesh.join(ready.config.layout, World())
    return Trainer(ready.config, mesh, ready.datasets, checkpoint=ready.checkpoint)


def peer_inputs(name: str, batch: np.ndarray) -> dict[str, Tensor]:
    """Return transformers' arguments for a micro-batch."""
    values = torch.from_numpy(batch)
    if name == "t5":
        decoder = values[:, :, :DECODER_LENGTH]
        return {
            "input_ids": values[:, t5_reader.SOURCE],
            "attention_mask": values[:, t5_reader.SOURCE_REAL],
            "decoder_input_ids": decoder[:, t5_reader.TOKEN],
            "labels": decoder[:, t5_reader.LABEL],
        }
    return {
        "input_ids": values[:, bert_reader.TOKEN],
        "attention_mask": values[:, bert_reader.REAL],
        "token_type_ids": values[:, bert_reader.TYPE],
        "labels": values[:, bert_reader.LABEL],
        "next_sentence_label": values[:, bert_reader.ORDER, 0],
    }


def peer_step(name: str, folder: Path) -> Step:
    """Build a step of transformers' model, which returns its loss; reading is not part of it."""
    import transformers

    kind = "T5ForConditionalGeneration" if name == "t5" else None
    kind = kind or ("MegatronBert" if name == "megatron-bert" else "Bert") + "ForPreTraining"
    model = getattr(transformers, kind).from_pretrained(folder / f"hf-{name}", dtype=torch.float32).train()
    batches = iter(np.load(folder / f"batches-{name}.npy"))
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip

    @torch.compile(dynamic=False)
    def loss_of(inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss

    def step() -> float:
        inputs = peer_inputs(name, next(batches))
        loss = loss_of({key: values.contiguous() for key, values in inputs.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def own_step(trainer: Trainer) -> Step:
    """Build a step of mega-train, which returns its loss."""
    return lambda: trainer.step(LR)[0]


def write_batches(name: str, folder: Path, trainer: Trainer, steps: int) -> dict[str, float]:
    """Write the padded micro-batches for the peer; return the shares of their real tokens."""
    load = trainer.loader.load
    batches = np.stack([load(trainer.train, step * MICRO, 1, None).batches[0] for step in range(steps)])
    np.save(folder / f"batches-{name}.npy", batches)
    real = {"": batches[:, :, bert_reader.REAL]}
    if name == "t5":
        decoder = batches[:, :, t5_reader.REAL, :DECODER_LENGTH]
        real = {"encoder_": batches[:, :, t5_reader.SOURCE_REAL], "decoder_": decoder}
    shares: dict[str, float] = {}
    for side, is_real in real.items():
        share = is_real.mean(-1)  # of each row
        shares[f"{side}real_tokens"] = round(float(share.mean()), 3)
        shares[f"{side}longest_row"] = round(float(share.max(-1).mean()), 3)
    return shares


def measure_memory(name: str, program: str, folder: Path, steps: int) -> dict[str, float]:
    """Measure the peak memory of one program in this process, in MB."""
    tune_malloc()
    if program == OURS:
        before = peak_mb()
        step = own_step(open_run(name, folder))
    else:
        # what importing takes is not the model's memory
        import torch._inductor.compile_fx  # noqa: F401
        import transformers  # noqa: F401

        before = peak_mb()
        step = peer_step(name, folder)
    for _ in range(steps):
        step()
    return {"peak_mb": round(peak_mb()), "memory_mb": round(peak_mb() - before)}


def compare(name: str, folder: Path, steps: int, threads: int) -> dict[str, Any]:
    """Alternate the steps of both programs in this process.

    Raises:
        SystemExit: their losses differ.
    """
    tune_malloc()
    trainer = open_run(name, folder)
    result: dict[str, Any] = {
        "parameters": sum(weight.numel() for model in trainer.models for weight in model.parameters()),
        "samples": write_batches(name, folder, trainer, WARM_UP + steps),
    }
    programs = {OURS: own_step(trainer), PEER: peer_step(name, folder)}
    losses: dict[str, list[float]] = {program: [] for program in programs}
    times: dict[str, list[tuple[float, float]]] = {program: [] for program in programs}
    for number in range(WARM_UP + steps):
        for program, step in programs.items():
            seconds = run_timed(lambda step=step, program=program: losses[program].append(step()))
            if number >= WARM_UP:
                times[program].append(seconds)
        ours, theirs = losses[OURS][-1], losses[PEER][-1]
        if abs(ours - theirs) > TOLERANCE:
            raise SystemExit(f"{name}: step {number + 1}: loss {ours:.6f} of ours, {theirs:.6f} of the peer")
    result["loss"] = {"first": round(losses[OURS][0], 4), "last": round(losses[OURS][-1], 4)}
    differences = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    result["largest_difference_of_losses"] = float(f"{max(differences):.1e}")
    for clock, kind in enumerate(("cpu", "wall")):
        for program in programs:
            values = [seconds[clock] for seconds in times[program]]
            result.setdefault(program, {})[f"{kind}_s_per_step"] = round(statistics.median(values), 3)
        pairs = zip(times[PEER], times[OURS], strict=True)
        ratios = sorted(theirs[clock] / ours[clock] for theirs, ours in pairs)
        spread = [round(ratios[0], 2), round(ratios[-1], 2)]
        result[f"ratio_{kind}"] = {"median": round(statistics.median(ratios), 2), "spread": spread}
    for program in programs:
        words = [__file__, "--child", name, program, "--folder", folder, "--threads", str(threads)]
        result[program] |= json.loads(run_program(words, threads).splitlines()[-1])
    for key in ("peak_mb", "memory_mb"):
        result[f"ratio_{key.removesuffix('_mb')}"] = round(result[OURS][key] / result[PEER][key], 2)
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="JSON lines with text; .zst and .gz are read")
    parser.add_argument("vocab", type=Path, nargs="?", help="BERT's vocabulary")
    parser.add_argument("--folder", type=Path, required=True, help="for text and weights")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--documents", type=int, default=400, help="of the corpus")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(measure_memory(*args.child, args.folder, MEMORY_STEPS)))
        return
    if args.corpus is None or args.vocab is None:
        parser.error("CORPUS and VOCAB are required")
    prepare_folder(args.corpus, args.vocab, args.documents, args.folder)
    table: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "threads": args.threads,
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "tokens_of_a_step": MICRO * LENGTH,
    }
    for name in args.models:
        table[name] = compare(name, args.folder, args.steps, args.threads)
    table["load_after"] = [round(load, 2) for load in os.getloadavg()]
    text = json.dumps(table, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
