"""`mega-data preprocess` on the pool of mega-data and on the standard library's, in one run.

    python bench/preprocess.py CORPUS.jsonl --make 45
    python bench/process_pool.py CORPUS.jsonl --gpt2 FOLDER [--workers 2] [--rounds 5] [--json RESULT]

The library's pool is `multiprocessing.Pool` of a fork server at its best: the server starts while the caller
still imports, preloads what the workers need, and each worker reads the pickled work once. `imap` keeps the
order; a semaphore limits the items under way, which `imap` alone would all read into memory. Both write the
same dataset, which is checked. The two take turns; medians of the wall of whole processes, start and end
included. Seconds of the processor are not compared: nobody waits for a fork server, so the system does not
count them.

FOLDER holds gpt2-vocab.json and gpt2-merges.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any, Self

_works: dict[str, Any] = {}  # in a worker, by file


def _load_work(path: str) -> Any:
    if path not in _works:
        _works[path] = pickle.loads(Path(path).read_bytes())
    return _works[path]


def _run_item(task: tuple[str, Any]) -> Any:
    path, item = task
    return _load_work(path)(item)


def _answer(path: str, question: Callable[[Any], Any]) -> Any:
    return question(_load_work(path))


class LibraryPool:
    """`mega_data.process_pool.ProcessPool` on `multiprocessing.Pool`."""

    def __init__(self, workers: int, modules: Sequence[str] = ()) -> None:
        os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", OMP_NUM_THREADS="1")
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["process_pool", *modules])
        forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory()
        self._workers = workers
        self._pool: Any = None
        self._paths = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
        self._folder.cleanup()

    def prepare(self, work: object) -> None:
        """Nothing can be built ahead: the workers load the work with their first item."""

    def ask(self, work: Any, question: Callable[[Any], Any]) -> Any:
        return self._start_pool().apply(_answer, (self._write(work), question))

    def map_in_order(self, work: Any, items: Iterable[Any]) -> Iterator[Any]:
        path = self._write(work)
        free = threading.Semaphore(2 * self._workers)

        def take_items() -> Iterator[tuple[str, Any]]:
            for item in items:
                free.acquire()
                yield path, item

        for result in self._start_pool().imap(_run_item, take_items()):
            yield result
            free.release()

    def _start_pool(self) -> Any:
        self._pool = self._pool or self._context.Pool(self._workers)
        return self._pool

    def _write(self, work: object) -> str:
        self._paths += 1
        path = Path(self._folder.name) / str(self._paths)
        path.write_bytes(pickle.dumps(work))
        return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--gpt2", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"mega-data": [], "multiprocessing": []}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(arguments.rounds):
            datasets = []
            for name, measured in seconds.items():
                prefix = Path(temporary) / name
                measured.append(run(name, arguments, prefix))
                files = [Path(f"{prefix}_text_document.{extension}") for extension in ("bin", "idx")]
                datasets.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
                for file in files:
                    file.unlink()
            assert datasets[0] == datasets[1], "the datasets differ"
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "corpus bytes": arguments.corpus.stat().st_size,
        "workers": arguments.workers,
    }
    ours, library = (statistics.median(measured) for measured in seconds.values())
    result |= {"mega-data, s": round(ours, 3), "library, s": round(library, 3)}
    result["library / mega-data"] = round(library / ours, 3)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def run(name: str, arguments: argparse.Namespace, prefix: Path) -> float:
    """Return the seconds of the wall that a whole `preprocess` takes on a pool."""
    words = ["preprocess", "--input", arguments.corpus, "--output-prefix", prefix, "--append-eod"]
    words += ["--workers", arguments.workers, "--tokenizer-type", "GPT2BPETokenizer"]
    words += ["--vocab-file", arguments.gpt2 / "gpt2-vocab.json"]
    words += ["--merge-file", arguments.gpt2 / "gpt2-merges.txt"]
    swap = "import mega_data.process_pool as p, process_pool; p.ProcessPool = process_pool.LibraryPool; "
    # the guard: a worker of multiprocessing imports the main module again
    code = f"import runpy; {swap if name == 'multiprocessing' else ''}"
    code += "runpy.run_module('mega_data', run_name='__main__', alter_sys=True)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    start = time.perf_counter()
    command = [sys.executable, "-c", code, *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
