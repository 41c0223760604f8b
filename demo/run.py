"""Demonstrate all programs from raw text to generated text over HTTP, one command per step.

    python demo/run.py --output demo-run [--keep]

Every command is printed before it runs. A table at the end shows the time and result of each step. The exit
code is 1 if the model does not predict held-out text better than a Kneser-Ney bigram model.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
STEPS, MORE = 1400, 60  # optimizer steps on the first layout, and then on the other

# small, short and quick: larger models, longer sequences and bigger batches learn less in four minutes
MODEL = """
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --seq-length 128
"""
OPTIMIZER = f"""
    --micro-batch-size 12 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-decay-iters {STEPS}
    --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 --split 99,1,0
"""
# this interval makes the last validation before the change of layout and the one after it read the same
VALIDATION = "--eval-iters 10 --eval-interval 350"
PROMPT = "Return the"
MARK = ".made-by-mega-demo"  # the demo may empty a folder with this file
PATIENCE = 10.0  # seconds that an interrupted command has before the next signal


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the final table."""

    step: str
    seconds: float
    result: str
    file: Path | None


class Demo:
    """Runs the steps in a folder and records the table."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, list[Row]()

    @contextmanager
    def step(self, name: str) -> Iterator[list[Any]]:
        """Time a step; the block appends its result and its file to the list."""
        print(f"\n== {name}", flush=True)
        record: list[Any] = []
        began = time.perf_counter()
        yield record
        self.rows.append(Row(name, time.perf_counter() - began, *record))

    def run(self, program: str, *words: object) -> None:
        """Run a command and show its output. A failing command ends the demo."""
        command = command_line(program, *words)
        print("$ " + shlex.join([program, *command[1:]]), flush=True)
        if wait_for_exit(subprocess.Popen(command)):
            sys.exit(f"the step failed: {shlex.join(command)}")

    def format_table(self) -> str:
        """Format the final table as text."""
        cells = [("step", "seconds", "result", "file")]
        for row in self.rows:
            file = str(row.file) if row.file else ""
            cells.append((row.step, f"{row.seconds:.1f}", row.result, file))
        cells.append(("all", f"{sum(row.seconds for row in self.rows):.1f}", "", ""))
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join(
                cell.rjust(width) if column == 1 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main() -> None:
    """Run the demo."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--output", type=Path, default=Path("demo-run"), help="folder for all output")
    options.add_argument("--keep", action="store_true", help="leave the server running at the end")
    options.add_argument("--began", type=float, help="start of the set-up, in seconds since 1970")
    given = options.parse_args()
    create_output_folder(given.output)
    demo = Demo(given.output)
    if given.began is not None:
        demo.rows.append(Row("set-up", time.time() - given.began, "a virtual environment, installed", None))
    prepare_data(demo)
    train(demo)
    scores = evaluate(demo)
    plot_losses(demo)
    server = serve(demo, keep=given.keep)
    table = demo.format_table()
    (demo.folder / "table.txt").write_text(table + "\n", "utf-8")
    print("\n" + table, flush=True)
    perplexity, bigram = scores["perplexity"], scores["kneser_ney_perplexity"]
    print(
        f"\nheld-out perplexity: {perplexity:.1f}, against {bigram:.1f} of a Kneser-Ney bigram model "
        "on the same tokens"
    )
    if server:
        print(server)
    if perplexity >= bigram:
        sys.exit("the model does not beat the bigram")


def prepare_data(demo: Demo) -> None:
    """Sample text, train a tokenizer on it, and encode the text."""
    corpus, held_out, tokenizer = (demo.folder / n for n in ("corpus.jsonl", "held-out.jsonl", "tokenizer"))
    with demo.step("sample") as record:
        demo.run(
            "mega-data", "sample", "--output", corpus, "--held-out", held_out, "--held-out-fraction", 0.03
        )
        record += [
            f"{corpus.stat().st_size / 1e6:.1f} MB of text, {held_out.stat().st_size / 1e6:.2f} MB held out"
        ]
        record += [corpus]
    with demo.step("train-tokenizer") as record:
        demo.run(
            "mega-data", "train-tokenizer", "--input", corpus, "--vocab-size", 4096, "--output", tokenizer
        )
        record += ["byte-level BPE, 4,096 ids", tokenizer]
    with demo.step("preprocess") as record:
        kind = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer)
        prefix = demo.folder / "corpus"
        demo.run(
            "mega-data", "preprocess", "--input", corpus, "--output-prefix", prefix, *kind, "--append-eod"
        )
        data = dataset_prefix(demo)
        info = json.loads(data.with_name(data.name + ".json").read_text("utf-8"))
        record += [f"{info['tokens']:,} tokens in {info['documents']:,} documents", data]


def train(demo: Demo) -> None:
    """Train with tensor parallelism 2, reshard, and continue with pipeline parallelism 2."""
    first, other, resumed = (demo.folder / name for name in ("train", "resharded", "resumed"))
    torchrun = ("--nproc-per-node", 2, "-m", "mega_train", "gpt", "--data-path", dataset_prefix(demo))
    common = [*OPTIMIZER.split(), *(["--bf16"] if has_bfloat16_instructions() else [])]
    with demo.step("train, tp 2") as record:
        words = ["--tensor-model-parallel-size", 2, *MODEL.split(), *common]
        words += ["--train-iters", STEPS, "--log-interval", 50, *VALIDATION.split()]
        demo.run("torchrun", *torchrun, *words, "--save", first)
        last, before = read_last_event(first, "train_log"), read_last_event(first, "validation")["loss"]
        speed = f"{last['tokens_per_second']:,.0f} tokens/s"
        record += [f"{STEPS} steps, loss {last['loss']:.3f}, validation {before:.3f}, {speed}", first]
    with demo.step("reshard") as record:
        demo.run("mega-ckpt", "reshard", "--load", first, "--save", other, "--tp", 1, "--pp", 2)
        size = sum(file.stat().st_size for file in other.rglob("*.safetensors"))
        record += [f"tp 2 to pp 2, {size / 1e6:.1f} MB with the optimizer", other]
    with demo.step("resume, pp 2") as record:
        words = ["--pipeline-model-parallel-size", 2, *common, "--load", other, "--save", resumed]
        words += ["--train-iters", STEPS + MORE, "--log-interval", 20, *VALIDATION.split()]
        demo.run("torchrun", *torchrun, *words)
        last, after = read_last_event(resumed, "train_log"), read_last_event(resumed, "validation")["loss"]
        result = f"{MORE} steps more, loss {last['loss']:.3f}, validation {before:.3f} -> {after:.3f}"
        record += [result, resumed]


def evaluate(demo: Demo) -> dict[str, float]:
    """Compute perplexity and last-word accuracy on held-out documents, and those of n-gram models."""
    result = demo.folder / "perplexity.json"
    with demo.step("evaluate") as record:
        data = ("--data", demo.folder / "held-out.jsonl", "--baseline-data", dataset_prefix(demo))
        output = ("--output", result, "--overwrite")
        demo.run("mega-eval", "perplexity", "--load", demo.folder / "resumed", *data, *output)
        metrics = json.loads(result.read_text("utf-8"))["metrics"]
        scores: dict[str, float] = {name: metric["value"] for name, metric in metrics.items()}
        numbers = ("unigram_perplexity", "kneser_ney_perplexity", "perplexity")
        unigram, bigram, perplexity = (f"{scores[number]:.1f}" for number in numbers)
        words = f"last word {100 * scores['last_word_accuracy']:.1f} %"
        record += [f"perplexity: unigram {unigram}, bigram {bigram}, ours {perplexity}; {words}", result]
    return scores


def plot_losses(demo: Demo) -> None:
    """Plot the loss of both runs."""
    picture = demo.folder / "loss.png"
    with demo.step("curve") as record:
        demo.run("mega-train", "curve", demo.folder / "train", demo.folder / "resumed", "--output", picture)
        record += ["training and validation loss", picture]


def serve(demo: Demo, *, keep: bool) -> str:
    """Generate text over HTTP.

    Returns:
        the command of another request if the server is kept; otherwise "".
    """
    port, answer = find_free_port(), demo.folder / "answer.json"
    words = ("--load", demo.folder / "resumed", "--port", port)
    body = json.dumps({"prompts": [PROMPT], "tokens_to_generate": 48, "top_k": 20, "random_seed": 7})
    with demo.step("serve") as record:
        command = command_line("mega-serve", *words)
        print("$ " + shlex.join(["mega-serve", *command[1:]]) + " &", flush=True)
        log = demo.folder / "server.log"
        with log.open("wb") as out:
            server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=keep)
        is_kept = False
        try:
            wait_for_server(f"http://127.0.0.1:{port}/ready", server, log)
            url = f"http://127.0.0.1:{port}/api"
            line = f"curl -X PUT {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
            print(f"$ {line}", flush=True)
            request = urllib.request.Request(
                url, body.encode(), {"Content-Type": "application/json"}, method="PUT"
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                answer.write_bytes(response.read())
            text = json.loads(answer.read_text("utf-8"))["text"][0]
            print(text, flush=True)
            record += [f"{len(text)} characters for {PROMPT!r}", answer]
            is_kept = keep
            if keep:
                return f"\nthe server runs on (stop it with: kill {server.pid}); ask it:\n{line}"
        finally:
            if not is_kept:
                server.send_signal(signal.SIGTERM)
                server.wait(30)
        return ""


def create_output_folder(folder: Path) -> None:
    """Create an empty output folder; existing content is removed only if a demo wrote it."""
    mark = folder / MARK
    if folder.exists() and not mark.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(
            f"error: --output: contains files that a demo did not write: found {folder}; hint: name a "
            "new folder"
        )
    if mark.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


def wait_for_exit(command: subprocess.Popen[bytes]) -> int:
    """Wait for a command and return its exit code; after an interruption, let it terminate cleanly."""
    try:
        return command.wait()
    except KeyboardInterrupt:
        # a terminal has interrupted it as well. Killed at once, torchrun would leave its ranks training on
        try:
            command.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            command.terminate()
            command.wait()
        raise


def command_line(program: str, *words: object) -> list[str]:
    """Return the command line of a program of this environment."""
    return [str(BIN / program), *map(str, words)]


def dataset_prefix(demo: Demo) -> Path:
    """Return the prefix of the indexed dataset, for --data-path."""
    return demo.folder / "corpus_text_document"


def read_last_event(run: Path, kind: str) -> dict[str, Any]:
    """Return the last event of this kind in a run's event log."""
    events: Sequence[dict[str, Any]] = [
        json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()
    ]
    return [event for event in events if event["event"] == kind][-1]


def has_bfloat16_instructions() -> bool:
    """Whether the CPU has bfloat16 instructions; without them bfloat16 is slower than float32."""
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and any(name in flags.read_text() for name in ("avx512_bf16", "amx_bf16"))


def find_free_port() -> int:
    """Return a free port: 5000, or any other."""
    for port in (5000, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("port 0 is always free")


def wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the model is loaded: the port is open before, and answers with status 503."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.1)
    sys.exit(f"the server did not start; {log} says:\n{log.read_text('utf-8', 'replace')}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
