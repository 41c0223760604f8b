"""Options of fine-tuning on a task."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mega_schema.app.config import WordList, multi_option, option
from mega_schema.tasks.pair_tasks import TaskName
from mega_schema.tasks.span_options import SpanOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Options of `mega-train finetune`, besides those of all runs."""

    name: TaskName | None = option("--task", None, "task to fine-tune on")
    train: WordList = multi_option("--train-data", "training files; of RACE, folders")
    valid: WordList = multi_option(
        "--valid-data", "files of examples to evaluate after every epoch; each has its own metrics"
    )
    epochs: int | None = option("--epochs", None, "passes over the training examples; 0 only evaluates")
    keep_last_batch: bool = option(
        "--keep-last-batch",
        False,
        "train on an epoch's last batch though it is not full (Megatron's --keep-last without a number)",
    )
    labels: WordList = multi_option(
        "--labels", "classes of CLASSIFY in the order of the head's outputs; by default those of the data"
    )
    text_keys: WordList = multi_option(
        "--text-keys", "CLASSIFY: column or JSON key of the text, or of the two texts; by default text"
    )
    label_key: str = option("--label-key", "label", "CLASSIFY: column or JSON key of the label")
    input_key: str = option("--input-key", "input", "TEXT2TEXT: column or JSON key of the input text")
    target_key: str = option("--target-key", "target", "TEXT2TEXT: column or JSON key of the target text")
    class_weights: WordList = multi_option(
        "--class-weights", "weights of the classes in the loss: a number for each, or balanced"
    )
    best_metric: str | None = option(
        "--best-metric",
        None,
        "metric of the first --valid-data file for the best epoch; by default accuracy, f1 or exact_match",
    )
    doc_stride: int = option("--doc-stride", 128, "SQUAD: tokens between the begins of a passage's windows")
    max_query_length: int = option("--max-query-length", 64, "SQUAD: tokens of a question; others are cut")
    max_answer_length: int = option("--max-answer-length", 30, "SQUAD: tokens of a predicted answer")
    n_best_size: int = option(
        "--n-best-size", 20, "SQUAD: best answers of a question in predictions, and begins and ends compared"
    )
    null_score_diff_threshold: float = option(
        "--null-score-diff-threshold",
        0.0,
        "SQUAD 2.0: predict no answer if its score exceeds the best answer's by more",
    )

    @property
    def spans(self) -> SpanOptions:
        """Options of SQUAD."""
        values = {field.name: getattr(self, field.name) for field in fields(SpanOptions)}
        return SpanOptions(**values)
