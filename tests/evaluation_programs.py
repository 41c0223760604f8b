"""Programs for the tests of mega-eval: the command, and the command killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

IMPORTS = (
    "mega_eval.commands.evaluate",
    "mega_eval.models.rank_opening",
    "mega_eval.tasks.lambada",
    "mega_eval.tasks.wikitext",
)


def run() -> None:
    """Run mega-eval."""
    from mega_eval.cli import main

    main()


def run_until_killed() -> None:
    """Run mega-eval until it has kept a number of batches, the first argument; then SIGKILL."""
    from mega_eval.models.answer_cache import AnswerCache

    limit = int(sys.argv.pop(1))
    append = AnswerCache._append
    batches = 0

    def count(*words: Any) -> None:
        nonlocal batches
        append(*words)
        batches += 1
        if batches == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    AnswerCache._append = count  # type: ignore[method-assign]
    run()


def run_rank() -> None:
    """Be a rank: score windows and continue prompts of a file, and write the answers.

    The arguments are the rank, the settings, the folder of the files and the rendezvous, and the rank that
    kills itself before the second round, if any.
    """
    from mega_eval.models import rank_model
    from mega_eval.models.interface import GenerationRequest
    from mega_eval.models.rank_opening import open_ranks
    from mega_eval.models.rank_processes import run_worker
    from mega_eval.models.rank_setup import RankSettings
    from mega_eval.models.session import EvaluationSession
    from mega_eval.windows import Window, as_tokens
    from mega_model.distributed.mesh import World
    from mega_schema.app.cli_runner import run_command

    rank, victim = int(sys.argv[1]), int(sys.argv[4])
    settings = RankSettings(**json.loads(sys.argv[2]))
    folder = Path(sys.argv[3])
    world = World(settings.layout.world, rank, rank)
    init_method = f"file://{folder / 'rendezvous'}"
    rank_model.ROUND_TOKENS = 100
    if rank == victim:
        score = rank_model.RankEngine.score
        rounds = []

        def score_once(engine: Any, windows: Any) -> Any:
            if rounds:
                os.kill(os.getpid(), signal.SIGKILL)
            rounds.append(windows)
            return score(engine, windows)

        rank_model.RankEngine.score = score_once  # type: ignore[method-assign]

    @click.command()
    def run_task() -> None:
        if rank:
            run_worker(world, settings, init_method)
            return
        requests = json.loads((folder / "requests.json").read_bytes())
        session = EvaluationSession(open_ranks(settings, world, init_method))
        windows = [Window(as_tokens(tokens), count) for tokens, count in requests["windows"]]
        prompts = [GenerationRequest(tuple(ids), 6, tuple(stop)) for ids, stop in requests["prompts"]]
        scores = session.score(windows)
        answers = {
            "logprobs": [score.logprobs.tolist() for score in scores],
            "greedy": [score.greedy_ids.tolist() for score in scores],
            "texts": session.generate(prompts),
            "layout": session.identity.layout,
        }
        session.close()
        (folder / "answers.json").write_text(json.dumps(answers))

    run_command(run_task, [])
