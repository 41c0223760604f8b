"""The command `tasks`: lists the tasks, their metrics and files. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass

import click

from mega_eval.canonical_files import find_canonical_files
from mega_eval.presets.choice_presets import CHOICE_PRESETS

_CHOICE_METRICS = "accuracy, accuracy_norm, accuracy_bytes, bits_per_byte, calibration_error, brier"
_ANSWER_METRICS = "exact_match, f1, exact_match_harness"
_OWN_FILE = "JSON lines, CSV or TSV of your own"
_OWN_TASKS = (
    ("choice", _CHOICE_METRICS, _OWN_FILE, "your own"),
    ("classify", "accuracy, macro_f1, loss", f"{_OWN_FILE}, for a fine-tuned encoder", "your own"),
)


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """What `mega-eval tasks` says of a task.

    Attributes:
        name: of its command.
        metrics: their names, the most important first.
        wants: its file, in a few words.
        conventions: which published definitions it follows.
        files: name, sha256 (uncompressed) and description of published files; none if no hash is known.
    """

    name: str
    metrics: str
    wants: str
    conventions: str
    files: tuple[dict[str, str], ...] = ()


def list_tasks() -> list[TaskDescription]:
    """Return the tasks in the order of their names."""
    rows = [
        (
            "lambada",
            "accuracy, target_perplexity",
            'JSON lines like {"text": "..."}',
            "Megatron-LM (last-token, strict); lm-evaluation-harness 0.4.13 (openai, standard)",
        ),
        (
            "megatron11b",
            "renormalized_perplexity, perplexity, loss",
            "word-level text, such as wiki.test.tokens",
            "fairseq's examples/megatron_11b",
        ),
        (
            "perplexity",
            "bits_per_byte, perplexity, loss, last_word_accuracy",
            "text files, JSON lines, or the prefix of an indexed dataset",
            "mega-eval",
        ),
        *(
            (
                corpus,
                "adjusted_perplexity, perplexity, byte_perplexity, bits_per_byte, loss",
                "word-level text, such as wiki.test.tokens",
                "Megatron-LM (overlapping); lm-evaluation-harness 0.4.13 wikitext (lm-eval)",
            )
            for corpus in ("wikitext103", "wikitext2", "ptb")
        ),
        (
            "nq",
            _ANSWER_METRICS,
            "JSON lines with question and answer, a list of texts",
            "lm-evaluation-harness 0.4.13 nq_open",
        ),
        (
            "squad",
            _ANSWER_METRICS,
            "JSON in the layout of SQuAD or XQuAD",
            "lm-evaluation-harness 0.4.13 xquad_en; of a fine-tuned encoder SQuAD's scripts (spans)",
        ),
        (
            "core",
            "core, centered_TASK, accuracy_TASK",
            "folder with core.yaml, eval_data/ and eval_meta_data.csv",
            "nanochat",
        ),
        *_OWN_TASKS,
    ]
    rows += [
        (
            preset.name,
            _CHOICE_METRICS,
            preset.wants,
            "; ".join(f"{source} ({formulation})" for formulation, source in preset.sources.items()),
        )
        for preset in CHOICE_PRESETS
    ]
    return [
        TaskDescription(
            *row,
            files=tuple(
                {"name": file.name, "sha256": file.sha256, "description": file.description}
                for file in find_canonical_files(row[0])
            ),
        )
        for row in sorted(rows)
    ]


@click.command("tasks")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tasks(as_json: bool) -> None:
    """List the tasks with their metrics, the files they read, and the sha256 of published files."""
    descriptions = list_tasks()
    if as_json:
        click.echo(json.dumps([asdict(description) for description in descriptions], indent=2))
        return
    for description in descriptions:
        click.echo(description.name)
        for label, text in (
            ("metrics", description.metrics),
            ("data", description.wants),
            ("convention", description.conventions),
        ):
            click.echo(
                textwrap.fill(f"{label:<10}  {text}", 100, initial_indent="  ", subsequent_indent=" " * 14)
            )
        for file in description.files:
            click.echo(f"  sha256      {file['sha256']}")
            click.echo(f"              {file['name']}: {file['description']}")
        if not description.files:
            click.echo("  sha256      any: no hash of a published file is known")
