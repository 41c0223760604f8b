"""Benchmark whole servers on a CPU over HTTP: mega-serve, vLLM and `transformers serve`, on the same weights.

    MEGA_VLLM=PYTHON MEGA_TRANSFORMERS=PYTHON MEGA_GUIDELLM=PYTHON \\
        python bench/serve_http.py --tokenizer tokenizer.json --text corpus.txt [--rounds 2] [--json RESULT]

The model has the shape of GPT-2 124M and random weights, bfloat16. Prompts are pieces of the text, of 16 to
256 tokens; every answer has 64 tokens, streamed. 32 requests are in flight at a time. The load comes from
`mega-serve bench`. Servers take turns; each turn starts a server, sends a few other prompts to warm it up,
sends the load once, and stops it. Of a server's rounds the one with the highest throughput counts.

ours          mega-serve
engine        the same prompts in our engine, in one process without HTTP: what HTTP costs
guidellm      mega-serve again, with the load from guidellm: whether our client measures what others measure
vllm          vLLM's server, compiled as it is by default
transformers  `transformers serve` with continuous batching

Every server computes with --threads threads; the rest of the machine has the client. `tokens_per_cpu_second`
counts user and system time of the server's processes during the load. Before every turn the script measures
how busy the machine is, and the result keeps it. The environment variables name the Pythons of environments
that have the peers; a peer without one is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from serve import SPECS, make_model, measure_busy
from tokenizers import Tokenizer

CONCURRENCY = 32
OUTPUT_TOKENS = 64
WARM_UPS = 4
START_SECONDS = 600.0
LATENCIES = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms", "mean_tpot_ms")
PEER_PYTHONS = {"vllm": "MEGA_VLLM", "transformers": "MEGA_TRANSFORMERS", "guidellm": "MEGA_GUIDELLM"}
WAYS = ("ours", "engine", "guidellm", "vllm", "transformers")


def make_prompts(tokenizer: Tokenizer, text: str, count: int) -> list[str]:
    """Return consecutive pieces of the text, of 16 to 256 tokens."""
    rng = random.Random(0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts, start = [], 0
    for _ in range(count):
        length = rng.randint(16, 256)
        if start + length > len(ids):
            sys.exit(f"error: --text: too short: found {len(ids)} tokens, wanted {128 * count} or more")
        prompts.append(tokenizer.decode(ids[start : start + length]))
        start += length
    return prompts


def write_prompts(path: Path, prompts: list[str]) -> Path:
    """Write the prompts as `mega-serve bench` and guidellm read them."""
    lines = [json.dumps({"prompt": prompt, "output_tokens": OUTPUT_TOKENS}) + "\n" for prompt in prompts]
    path.write_text("".join(lines))
    return path


def server_command(way: str, folder: Path, port: int, threads: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server, and what it needs in its environment."""
    environment = {"OMP_NUM_THREADS": str(threads)}
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if way == "vllm":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "hf"), *address]
        words += ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(CONCURRENCY)]
        return [os.environ["MEGA_VLLM"], *words, "--disable-uvicorn-access-log"], environment
    if way == "transformers":
        program = str(Path(os.environ["MEGA_TRANSFORMERS"]).with_name("transformers"))
        words = ["serve", str(folder / "hf"), *address, "--device", "cpu", "--dtype", "bfloat16"]
        return [program, *words, "--continuous-batching", "--log-level", "error"], environment
    words = ["-m", "mega_serve", "--load", str(folder / "mega"), *address, "--dtype", "bfloat16"]
    words += ["--device", "cpu", "--threads", str(threads), "--max-num-seqs", str(CONCURRENCY)]
    return [sys.executable, *words], environment


@contextmanager
def run_server(way: str, folder: Path, threads: int) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server in a session of its own; yield its URL and process once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, environment = server_command(way, folder, port, threads)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(f"{url}/{'ready' if way in ('ours', 'guidellm') else 'health'}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{way} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            yield url, psutil.Process(process.pid)
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_seconds(process: psutil.Process) -> float:
    """Return user and system time of a process and its children so far."""
    times = [member.cpu_times() for member in [process, *process.children(recursive=True)]]
    return sum(used.user + used.system for used in times)


def send_load(way: str, url: str, prompts: Path, count: int, folder: Path) -> dict[str, Any]:
    """Send prompts by `mega-serve bench` and return its figures."""
    result = folder / "load.json"
    result.unlink(missing_ok=True)
    words = ["bench", "--base-url", url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    words += ["--num-prompts", str(count), "--max-concurrency", str(CONCURRENCY), "--disable-shuffle"]
    words += ["--custom-output-len", str(OUTPUT_TOKENS), "--temperature", "0", "--disable-tqdm"]
    words += ["--metric-percentiles", "50,99", "--save-result", "--result-filename", str(result)]
    if way == "transformers":  # it names no model, and refuses ignore_eos; random weights hardly ever end
        words += ["--model", str(folder / "hf")]
    else:
        words += ["--ignore-eos"]
    subprocess.run([sys.executable, "-m", "mega_serve", *words], check=True, stdout=subprocess.DEVNULL)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def measure_server(way: str, folder: Path, prompts: Path, warm_up: Path, options: Any) -> dict[str, Any]:
    """Start a server, warm it up, and measure the load."""
    with run_server(way, folder, options.threads) as (url, process):
        send_load(way, url, warm_up, WARM_UPS, folder)
        before = cpu_seconds(process)
        if way == "guidellm":
            figures = run_guidellm(url, folder, prompts, options)
        else:
            figures = send_load(way, url, prompts, options.num_prompts, folder)
        cpu = cpu_seconds(process) - before
    failed = options.num_prompts - figures["completed"]
    if failed and way in ("ours", "guidellm"):
        raise RuntimeError(f"{way}: {failed} of {options.num_prompts} requests were not answered")
    tokens = figures["total_output_tokens"]
    return {
        "failed_requests": failed,
        "tokens_per_second": round(figures["output_throughput"], 1),
        "tokens_per_cpu_second": round(tokens / cpu, 1),
        "output_tokens": tokens,
        **{name: round(figures[name], 1) for name in LATENCIES if name in figures},
    }


def run_guidellm(url: str, folder: Path, prompts: Path, options: Any) -> dict[str, Any]:
    """Send the load by guidellm; return its figures under the names of ours."""
    result = folder / "guidellm.json"
    body = {"ignore_eos": True, "temperature": 0}
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions"}
    columns = {"text_column": "prompt", "output_tokens_count_column": "output_tokens"}
    arguments = {
        "backend": {**backend, "extras": {"body": body}},
        "profile": {"kind": "concurrent", "streams": [CONCURRENCY]},
        "constraint": {"kind": "max_requests", "count": options.num_prompts},
        "tokenizer": {"kind": "huggingface_auto", "model": str(folder / "hf")},
        "data": {"kind": "json_file", "path": str(prompts)},
        "data-column-mapper": {"kind": "generative_column_mapper", "column_mappings": columns},
        "output": {"kind": "json", "path": str(result)},
    }
    words = ["run", "--disable-console"]
    words += [word for name, value in arguments.items() for word in (f"--{name}", json.dumps(value))]
    program = str(Path(os.environ["MEGA_GUIDELLM"]).with_name("guidellm"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    process = subprocess.run([program, *words], capture_output=True, text=True, env=environment)
    if process.returncode:
        raise RuntimeError(f"guidellm failed:\n{process.stdout[-1500:]}\n{process.stderr[-1500:]}")
    benchmark = json.loads(result.read_text())["benchmarks"][0]
    metrics = benchmark["metrics"]

    def read_metric(name: str) -> dict[str, Any]:
        values: dict[str, Any] = metrics[name]["successful"]
        return values

    requests = benchmark["requests"]["successful"]
    start = min(request["request_start_time"] for request in requests)
    end = max(request["request_end_time"] for request in requests)
    tokens = round(read_metric("output_token_count")["total_sum"])
    return {
        "completed": len(requests),
        "total_output_tokens": tokens,
        "output_throughput": tokens / (end - start),
        "mean_ttft_ms": read_metric("time_to_first_token_ms")["mean"],
        "p99_ttft_ms": read_metric("time_to_first_token_ms")["percentiles"]["p99"],
        "mean_itl_ms": read_metric("inter_token_latency_ms")["mean"],
    }


def measure_engine(folder: Path, prompts: list[list[int]], threads: int) -> dict[str, Any]:
    """Run the prompts in our engine, in a process of its own."""
    work = folder / "engine.json"
    work.write_text(json.dumps(prompts))
    command = [sys.executable, __file__, "--run-engine", str(folder / "mega"), str(work), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def run_engine(load: str, work: str, threads: str) -> None:
    """Answer the prompts of a file in this process, 32 at a time, and print the speed."""
    from mega_serve.engine.requests import EngineRequest, SamplingParams
    from mega_serve.execution.engine_factory import build_engine

    values = {"load": load, "dtype": "bfloat16", "device": "cpu", "threads": int(threads)}
    core: Any = build_engine({**values, "max_num_seqs": CONCURRENCY}).core
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = json.loads(Path(work).read_text())
    for measured, batch in ((False, prompts[:WARM_UPS]), (True, prompts[WARM_UPS:])):
        cpu, wall = time.process_time(), time.perf_counter()
        waiting = list(enumerate(batch))
        running, tokens = 0, 0
        while waiting or core.has_work:
            while waiting and running < CONCURRENCY:
                number, prompt = waiting.pop(0)
                name = f"{measured}-{number}"
                core.add(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params))
                running += 1
            for output in core.step():
                tokens += len(output.token_ids)
                running -= output.finish_reason is not None
        seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = {"tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / cpu}
    print(json.dumps({name: round(value, 1) for name, value in figures.items()} | {"output_tokens": tokens}))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways by turns and return the table."""
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "threads": options.threads,
        "num_prompts": options.num_prompts,
        "concurrency": CONCURRENCY,
        "busy_before": round(measure_busy(), 3),
    }
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    texts = make_prompts(tokenizer, options.text.read_text("utf-8"), WARM_UPS + options.num_prompts)
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder, SPECS["gpt2"], tokenizer=options.tokenizer)
        warm_up = write_prompts(folder / "warm-up.jsonl", texts[:WARM_UPS])
        prompts = write_prompts(folder / "prompts.jsonl", texts[WARM_UPS:])
        ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
        for _ in range(options.rounds):
            for way in options.ways:
                if way in PEER_PYTHONS and not os.environ.get(PEER_PYTHONS[way]):
                    continue
                busy = round(measure_busy(), 3)
                if way == "engine":
                    row = measure_engine(folder, ids, options.threads)
                else:
                    row = measure_server(way, folder, prompts, warm_up, options)
                rows.setdefault(way, []).append({**row, "busy_before": busy})
                print(f"{way}: {json.dumps(rows[way][-1])}", flush=True)
    report["ways"] = {
        way: max(turns, key=lambda row: row["tokens_per_second"]) for way, turns in rows.items()
    }
    report["versions"] = _versions(options.ways)
    return report | {"ratios": _ratios(report["ways"])}


def _ratios(ways: dict[str, Any]) -> dict[str, float]:
    """Return how many times a peer's throughput, or what part of the engine's, ours is."""
    if "ours" not in ways:
        return {}
    ours = ways["ours"]
    return {
        f"{field}_to_{way}": round(ours[field] / row[field], 3)
        for way, row in ways.items()
        for field in ("tokens_per_second", "tokens_per_cpu_second")
        if way != "ours"
    }


def _versions(ways: list[str]) -> dict[str, str]:
    versions = {"torch": version("torch"), "numba": version("numba")}
    names = {"vllm": "vllm-cpu", "transformers": "transformers", "guidellm": "guidellm"}
    for way in ways:
        python = os.environ.get(PEER_PYTHONS.get(way, ""), "")
        if python:
            program = f"from importlib.metadata import version; print(version({names[way]!r}))"
            process = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
            versions[names[way]] = process.stdout.strip()
    return versions


def main() -> None:
    if sys.argv[1:2] == ["--run-engine"]:
        run_engine(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json of 50,257 ids")
    parser.add_argument("--text", type=Path, required=True, help="a text from which prompts are cut")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = compare(options)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
