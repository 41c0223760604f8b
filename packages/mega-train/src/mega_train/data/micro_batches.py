"""Load a rank's micro-batches of samples, and check their tokens against the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mega_schema.errors import FormatError
from mega_train.data.dataloaders import SampleReader
from mega_train.data.sampler import Sampler
from mega_train.data.sft import TOKEN

_STEPS_AHEAD = 4  # of which samples of remote datasets are requested, this one included


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of one rank.

    Attributes:
        sample_numbers: of each micro-batch.
        batches: (samples, length + 1) token ids each, or (samples, 4, length + 1) of `data.sft`.
    """

    sample_numbers: list[list[int]]
    batches: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class MicroBatchLoader:
    """Loads the micro-batches of a rank.

    Attributes:
        samplers: the order in which the samples of each reader are read.
        vocab: size of the model's vocabulary.
    """

    samplers: Mapping[SampleReader, Sampler]
    vocab: int

    def load(
        self, reader: SampleReader, first_sample: int, num_micro_batches: int, seq_length: int | None
    ) -> MicroBatches:
        """Load the micro-batches from sample `first_sample` on.

        Args:
            first_sample: number of samples read before, by all ranks.
            seq_length: tokens to keep of each sample; None keeps whole samples.

        Raises:
            FormatError: a token is outside the vocabulary.
        """
        numbers = list(self.samplers[reader].micro_batches(first_sample, num_micro_batches))
        ahead = self.samplers[reader].micro_batches(first_sample, num_micro_batches * _STEPS_AHEAD)
        reader.prefetch(number for batch in ahead for number in batch)
        stop = None if seq_length is None else seq_length + 1
        return MicroBatches(numbers, [self._load_batch(reader, n)[..., :stop] for n in numbers])

    def _load_batch(self, reader: SampleReader, numbers: list[int]) -> np.ndarray:
        batch = np.stack([reader[number] for number in numbers])
        token_BS1 = batch if batch.ndim == 2 else batch[:, TOKEN]
        smallest, largest = int(token_BS1.min()), int(token_BS1.max())
        if smallest < 0 or largest >= self.vocab:
            outside = (token_BS1 < 0) | (token_BS1 >= self.vocab)
            raise FormatError(
                reader.dataset_prefix(numbers[int(outside.any(axis=1).argmax())]),
                "contains a token outside the model's vocabulary",
                found=min(smallest, 0) or largest,
                wanted=f"0 to {self.vocab - 1}",
                hint="a dataset made with the model's tokenizer, or a larger --vocab-size",
            )
        return batch
