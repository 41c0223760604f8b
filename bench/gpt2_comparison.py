"""Compare a whole run with Hugging Face's GPT-2: equal initial weights, batches and learning rates.

    python bench/gpt2_comparison.py FOLDER corpus --text bench-corpus.jsonl.zst
    python bench/gpt2_comparison.py FOLDER ours
    python bench/gpt2_comparison.py FOLDER theirs
    python bench/gpt2_comparison.py FOLDER compare --json RESULT --plot PICTURE

A GPT of ten million parameters, float32, AdamW with weight decay on matrices, clipping, cosine decay. `ours`
is `mega-train gpt` as anyone types it. `theirs` is `GPT2LMHeadModel` on `mega-ckpt convert`'s folder of the
very weights that run begins with, and torch's AdamW. Either takes about an hour on one core and goes on where
it was interrupted. `compare` fails where the two losses, each a mean over the last ten steps, differ by more
than 1 % at any 50th step, or the final perplexities on the validation split do.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mega_model.distributed.mesh import Mesh, World
from mega_schema.app.config import load_config
from mega_train.config import RunConfig
from mega_train.data.gpt_dataset import GPTDataset
from mega_train.engine.train import prepare
from mega_train.engine.trainer import Trainer
from mega_train.telemetry.event_log import read_events

STEPS, LOGGED, SAVED, COMPARED, VALIDATED = 2000, 10, 100, 50, 40
MODEL = {"--num-layers": 6, "--hidden-size": 320, "--num-attention-heads": 5, "--activation": "gelu_tanh"}
FLAGS = {
    **MODEL, "--seq-length": 128, "--micro-batch-size": 8, "--train-iters": STEPS, "--split": "98,2,0",
    "--lr": 1e-3, "--min-lr": 1e-4, "--lr-decay-style": "cosine", "--lr-warmup-iters": STEPS // 20,
    "--weight-decay": 0.1, "--adam-beta2": 0.95, "--eval-interval": STEPS, "--eval-iters": VALIDATED,
    "--log-interval": LOGGED, "--save-interval": SAVED,
}  # fmt: skip


def corpus(folder: Path, text: Path) -> None:
    """Train a vocabulary of 8,192 and write the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder / "tokenizer")
    vocabulary = ("--vocab-size", 8192, "--output", folder / "tokenizer")
    _tool("mega_data", "train-tokenizer", "--input", text, *vocabulary)
    _tool(
        "mega_data",
        "preprocess",
        "--input",
        text,
        "--output-prefix",
        folder / "c",
        "--append-eod",
        *tokenizer_flags,
    )


def train_mega(folder: Path) -> None:
    """Train, or resume."""
    flags = [word for pair in FLAGS.items() for word in pair]
    where = ("--data-path", folder / "c_text_document", "--save", folder / "ours", "--load", folder / "ours")
    _tool("mega_train", "gpt", *flags, *where)


def train_huggingface(folder: Path) -> None:
    """Train Hugging Face's model on the same data, or resume."""
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(1)
    trainer = _start_trainer(folder)
    if not (folder / "start-hf").exists():
        trainer.save()
        trainer.saver.finish()
        _tool(
            "mega_ckpt", "convert", "--from", "mega", "--to", "hf", "--load", folder / "start",
            "--save", folder / "start-hf",
        )  # fmt: skip
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # what our flags say by default
    model: Any = GPT2LMHeadModel.from_pretrained(folder / "start-hf", dtype=torch.float32, **none)
    model.train()
    groups = [
        {"params": list(part), "weight_decay": 0.1 if matrix else 0.0}
        for matrix, part in groupby(
            sorted(model.parameters(), key=lambda p: p.ndim >= 2), lambda p: p.ndim >= 2
        )
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    state, record = folder / "theirs.pt", folder / "theirs.jsonl"
    begin = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        begin = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    lines = record.read_text("utf-8").splitlines()[: begin // LOGGED] if begin else []
    record.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    plan, losses, began = trainer.config, list[float](), time.monotonic()
    for step in range(begin, STEPS):
        consumed = step * plan.global_batch_size
        for group in optimizer.param_groups:
            group["lr"] = plan.schedules.lr.lr_at(consumed)
        loss = _loss(model, trainer, trainer.train, consumed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % LOGGED == 0:
            step_record = {
                "iteration": step + 1,
                "loss": float(np.mean(losses)),
                "seconds": time.monotonic() - began,
            }
            with record.open("a", encoding="utf-8") as out:
                out.write(json.dumps(step_record) + "\n")
            print(step_record, flush=True)
            losses = []
        if (step + 1) % SAVED == 0:
            saved = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, state)
    model.eval()
    (valid,) = trainer.valid.values()
    with torch.no_grad():
        sums = [_loss(model, trainer, valid, i * plan.global_batch_size).item() for i in range(VALIDATED)]
    (folder / "theirs-valid.json").write_text(json.dumps(float(np.mean(sums))), "utf-8")


def compare(folder: Path, result: Path | None, picture: Path | None) -> int:
    """Print both results, and whether they are within 1 % of each other."""
    events = read_events(folder / "ours")
    our_losses = {e["iteration"]: e["loss"] for e in events if e["event"] == "train_log"}
    rows = [json.loads(line) for line in (folder / "theirs.jsonl").read_text("utf-8").splitlines()]
    their_losses = {row["iteration"]: row["loss"] for row in rows}
    iterations = range(COMPARED, STEPS + 1, COMPARED)
    differences = {i: our_losses[i] / their_losses[i] - 1 for i in iterations}
    valid = [e for e in events if e["event"] == "validation"][-1]["loss"]
    theirs_valid = json.loads((folder / "theirs-valid.json").read_text("utf-8"))
    worst = max(differences.values(), key=abs)
    table = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "flags": {name.removeprefix("--"): value for name, value in FLAGS.items()},
        "iteration": list(iterations),
        "ours": [round(our_losses[i], 5) for i in iterations],
        "hugging_face": [round(their_losses[i], 5) for i in iterations],
        "largest_difference_percent": round(100 * worst, 4),
        "validation_perplexity": {
            "ours": round(math.exp(valid), 4),
            "hugging_face": round(math.exp(theirs_valid), 4),
        },
    }
    text = json.dumps(table, indent=1)
    print(text)
    if result:
        result.write_text(text + "\n", "utf-8")
    if picture:
        _draw(picture, our_losses, their_losses)
    return int(abs(worst) > 0.01 or abs(math.exp(valid - theirs_valid) - 1) > 0.01)


def _start_trainer(folder: Path) -> Trainer:
    values = {name.removeprefix("--").replace("-", "_"): value for name, value in FLAGS.items()}
    where = {"data_path": (str(folder / "c_text_document"),), "save": folder / "start"}
    ready = prepare(load_config(RunConfig, None, {**values, **where}), "gpt", World())
    return Trainer(
        ready.config, Mesh.join(ready.config.layout, World()), ready.datasets, tokenizer=ready.tokenizer
    )


def _loss(model: Any, trainer: Trainer, samples: GPTDataset, consumed: int) -> torch.Tensor:
    plan = trainer.config
    (numbers,) = trainer.loader.samplers[samples].micro_batches(consumed, 1)
    tokens = torch.from_numpy(np.stack([samples[number] for number in numbers]))
    logits = model(input_ids=tokens[:, :-1]).logits[..., : plan.spec.vocab]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _tool(module: str, *words: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, words)], check=True)


def _draw(picture: Path, our_losses: dict[int, float], their_losses: dict[int, float]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot(
        list(their_losses), list(their_losses.values()), label="Hugging Face GPT-2", linewidth=4, alpha=0.4
    )
    above.plot(list(our_losses), list(our_losses.values()), label="mega-train gpt", linewidth=1)
    above.set(ylabel="loss (nats per token)", title="The same weights, batches and learning rates")
    above.legend()
    both = sorted(our_losses.keys() & their_losses.keys())
    below.plot(both, [100 * (our_losses[i] / their_losses[i] - 1) for i in both])
    below.set(xlabel="iteration", ylabel="ours / theirs - 1 (%)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(picture)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=["corpus", "ours", "theirs", "compare"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    match args.what:
        case "corpus":
            corpus(args.folder, args.text)
        case "ours":
            train_mega(args.folder)
        case "theirs":
            train_huggingface(args.folder)
        case _:
            return compare(args.folder, args.json, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
