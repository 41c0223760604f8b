"""Run the programs of two checkouts on the same inputs, and compare what they write.

    python bench/same_outputs.py OLD_CHECKOUT [NEW_CHECKOUT]

For a refactoring: token ids and index files, losses and gradient norms to the last digit, the bytes of every
tensor of a checkpoint (weights and optimizer), after resharding and in Hugging Face's files, a generated text
and a perplexity. Each checkout runs with its own packages on PYTHONPATH and the interpreter of this script.
Prints one line per output and exits with code 1 if an output differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
STEPS = "--micro-batch-size 4 --train-iters 12 --lr 3e-3 --lr-warmup-iters 3 --log-interval 1 --seed 7"
# name of the output, family, number of ranks, further flags
RUNS: tuple[tuple[str, str, int, str], ...] = (
    ("gpt", "gpt", 1, "--global-batch-size 8"),
    (
        "gpt dropout bf16",
        "gpt",
        1,
        "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1 --global-batch-size 8",
    ),
    ("gpt tp 2", "gpt", 2, "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 8"),
    ("gpt pp 2", "gpt", 2, "--pipeline-model-parallel-size 2 --global-batch-size 8"),
    ("gpt zero 1", "gpt", 2, "--use-distributed-optimizer --global-batch-size 8"),
    ("llama", "llama", 1, "--num-query-groups 2 --ffn-hidden-size 96 --global-batch-size 8"),
    ("llama recompute", "llama", 1, "--recompute-activations --ffn-hidden-size 96 --global-batch-size 4"),
    ("gpt muon", "gpt", 1, "--optimizer muon --global-batch-size 4"),
)
# fields of a record of training, by their names in both checkouts
NUMBERS = ("loss", "lm_loss", "grad_norm", "gradient_norm", "learning_rate", "rate", "consumed_samples")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    arguments = parser.parse_args()
    old, new = (dict(outputs(checkout.resolve())) for checkout in (arguments.old, arguments.new))
    for name in sorted(old.keys() | new.keys()):
        print(
            "same     " if old.get(name) == new.get(name) else "DIFFERENT", name, old.get(name), new.get(name)
        )
    different = sum(old.get(name) != new.get(name) for name in old.keys() | new.keys())
    print(f"{len(new)} outputs, {different} different")
    return int(bool(different))


def outputs(checkout: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each output of a checkout's programs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run(checkout, folder, "mega_data sample --output corpus.jsonl")
        head = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)[:400]
        (folder / "text.jsonl").write_text("".join(head))
        run(
            checkout,
            folder,
            "mega_data train-tokenizer --input text.jsonl --vocab-size 1024 --output tokenizer",
        )
        tokenizer = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
        run(
            checkout,
            folder,
            f"mega_data preprocess --input text.jsonl --output-prefix text {tokenizer} --append-eod",
        )
        for extension in (".bin", ".idx"):
            yield f"dataset{extension}", digest((folder / f"text_text_document{extension}").read_bytes())
        for name, family, ranks, flags in RUNS:
            save = name.replace(" ", "-")
            train(checkout, folder, family, ranks, f"{flags} --save {save}")
            yield f"{name}: record", record(folder / save)
            yield f"{name}: checkpoint", tensors(folder / save)
        run(checkout, folder, "mega_ckpt reshard --load gpt --save resharded --tp 2 --pp 2")
        yield "resharded", tensors(folder / "resharded")
        for name in ("gpt", "llama"):
            to_hf = f"--from mega --to hf --load {name} --save hf-{name} --no-check-logits"
            run(checkout, folder, f"mega_ckpt convert {to_hf}")
            yield f"{name}: Hugging Face's file", tensors(folder / f"hf-{name}")
        resume = "--pipeline-model-parallel-size 2 --load gpt --save resumed --train-iters 16"
        resume += " --override-opt_param-scheduler"
        train(checkout, folder, "gpt", 2, f"{RUNS[0][3]} {resume}")
        yield "resumed: record", record(folder / "resumed")
        run(checkout, folder, "mega_eval perplexity --load llama --data text.jsonl --output perplexity.json")
        yield "perplexity", number((folder / "perplexity.json").read_text(), "perplexity")
        yield "generated text", digest(generate_text(checkout, folder).encode())


def environment(checkout: Path) -> dict[str, str]:
    sources = os.pathsep.join(str(path) for path in sorted(checkout.glob("packages/*/src")))
    return os.environ | {"PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}


def run(checkout: Path, folder: Path, command: str) -> None:
    arguments = [sys.executable, "-m", *command.split()]
    ended = subprocess.run(arguments, cwd=folder, env=environment(checkout), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{checkout}: {command}\n{ended.stdout}{ended.stderr}")


def train(checkout: Path, folder: Path, family: str, ranks: int, flags: str) -> None:
    launch = "" if ranks == 1 else f"torch.distributed.run --standalone --nproc-per-node {ranks} -m "
    run(
        checkout,
        folder,
        f"{launch}mega_train {family} --data-path text_text_document {MODEL} {STEPS} {flags}",
    )


def record(save: Path) -> str:
    """Return a digest of the numbers of every logged step, in the order of `NUMBERS`."""
    events = [json.loads(line) for line in (save / "events.jsonl").read_text().splitlines()]
    rows = [[event[key] for key in NUMBERS if key in event] for event in events]
    steps = [row for row in rows if len(row) > 1]
    assert steps, f"{save}: no step was logged"
    return digest(json.dumps(steps).encode())


def tensors(folder: Path) -> str:
    """Return a digest of the names, types, shapes and bytes in all safetensors files below a folder."""
    entries = []
    for path in sorted(folder.rglob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values = digest(content[start + begin : start + end])
                entries.append(
                    [path.relative_to(folder).as_posix(), name, entry["dtype"], entry["shape"], values]
                )
    assert entries, f"{folder}: no tensors"
    return digest(json.dumps(sorted(entries)).encode())


def number(text: str, key: str) -> str:
    """Return the first number under a key of nested JSON."""
    match = re.search(rf'"{key}": ([-0-9.e]+)', text)
    assert match, text
    return match[1]


def generate_text(checkout: Path, folder: Path) -> str:
    port = 20000 + os.getpid() % 20000
    arguments = [sys.executable, "-m", "mega_serve", "--load", "llama", "--port", str(port)]
    server = subprocess.Popen(
        arguments, cwd=folder, env=environment(checkout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    body = json.dumps({"prompts": ["Return the", "def "], "tokens_to_generate": 24, "top_k": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api", body, {"Content-Type": "application/json"}, method="PUT"
    )
    try:
        for _ in range(120):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.dumps(json.loads(answer.read())["text"])
            except urllib.error.URLError:
                if server.poll() is not None:
                    break
                time.sleep(0.5)
        raise SystemExit(f"{checkout}: the server did not answer")
    finally:
        server.terminate()
        server.wait()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
