"""The tags that a model predicts for the words of a file, and their metrics: accuracy, and F1 of entities.

Entities are runs of words, by the rules of conlleval and seqeval for the schemes IOB1, IOB2 and BIOES.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mega_schema.tasks.tag_features import EncodedTags

_ENTITY_TAG = re.compile(r"O|[BIES]-.+")
Entity = tuple[str, int, int]  # type, first and last word


def are_entity_tags(tags: Sequence[str]) -> bool:
    """Whether the tags are those of entities: O, and types after B-, I-, E- or S-."""
    return all(map(_ENTITY_TAG.fullmatch, tags))


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of a sentence.

    An entity begins at B or S, where the type changes, and at I or E after O, E or S; it ends before the next
    one, before O, and at E or S. An I without a B therefore begins an entity.
    """
    entities = set[Entity]()
    begin = 0
    last_prefix, last_type = "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        is_new = prefix in "BS" or kind != last_type or last_prefix in "OES"
        if last_prefix != "O" and (prefix == "O" or is_new):
            entities.add((last_type, begin, i - 1))
        if prefix != "O" and is_new:
            begin = i
        last_prefix, last_type = prefix, kind
    return entities


class TagPredictions:
    """The tags of the words of a file.

    Attributes:
        tags: in the order of the logits.
    """

    def __init__(self, samples: EncodedTags, logits: NDArray[np.floating], tags: Sequence[str]) -> None:
        """Store the logits (N, L, K) of every token."""
        self.examples = samples.examples
        self.tags = tags
        self._logits = [
            logits[i, positions].astype(np.float64) for i, positions in enumerate(samples.positions)
        ]

    @property
    def has_labels(self) -> bool:
        """Whether the file has the right tags."""
        return self.examples[0].tags is not None

    @cached_property
    def guesses(self) -> list[list[str]]:
        """The most probable tag of every word that its sample has."""
        return [[self.tags[number] for number in logits.argmax(1)] for logits in self._logits]

    @cached_property
    def labels(self) -> list[list[str]]:
        """The right tag of every word that its sample has."""
        return [
            list((example.tags or ())[: len(row)])
            for example, row in zip(self.examples, self._logits, strict=True)
        ]

    @property
    def loss(self) -> float:
        """Mean of -ln P of the right tags of the words."""
        logits = np.concatenate(self._logits)
        numbers = {tag: number for number, tag in enumerate(self.tags)}
        label_T = np.array([numbers[tag] for row in self.labels for tag in row])
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(label_T)), label_T]
        return float(losses.mean())

    def metrics(self) -> dict[str, float]:
        """Return the accuracy of words, and for tags of entities precision, recall and F1."""
        pairs = list(zip(self.labels, self.guesses, strict=True))
        equal = [tag == guess for row, guesses in pairs for tag, guess in zip(row, guesses, strict=True)]
        values = {"accuracy": float(np.mean(equal))}
        if not are_entity_tags(self.tags):
            return values
        counts = np.zeros(3, np.int64)  # right, predicted and expected entities
        for row, guesses in pairs:
            gold, guess = find_entities(row), find_entities(guesses)
            counts += len(gold & guess), len(guess), len(gold)
        right, guess_count, gold_count = counts.tolist()
        return {
            "f1": 2 * right / max(1, guess_count + gold_count),
            "precision": right / max(1, guess_count),
            "recall": right / max(1, gold_count),
            **values,
        }

    def rows(self) -> Iterator[dict[str, object]]:
        """Yield the content of a line of a file of predictions: words, their tags and the predicted ones."""
        for example, guesses in zip(self.examples, self.guesses, strict=True):
            yield {
                "id": example.id,
                "tokens": list(example.words),
                "tags": None if example.tags is None else list(example.tags),
                "prediction": guesses,
            }
