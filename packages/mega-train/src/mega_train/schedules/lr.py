"""The courses of the learning rate and of the weight decay, in samples, as Megatron computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

Style = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
AnnealStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The rate after `samples` samples; the first step uses that of 0 samples.

    Attributes:
        initial: where the warm-up begins.
        warmup, decay: in samples, from the start of training.
        anneal: of WSD (warm-up, stable, decay; arXiv:2404.06395 §4), the samples of its decay, which ends
            with `decay`.
        anneal_style: of WSD.
    """

    peak: float
    least: float
    warmup: float
    decay: int
    style: Style
    initial: float = 0.0
    anneal: int = 0
    anneal_style: AnnealStyle = "exponential"

    def at(self, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.least
        if self.style == "inverse-square-root":
            return max(self.least, self.peak * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
        return self.least + self._left(samples) * (self.peak - self.least)

    def _left(self, samples: int) -> float:
        """The share of the way from least to peak that is left."""
        if self.style == "WSD":
            begun = samples - (self.decay - self.anneal)
            if begun <= 0:
                return 1.0
            done = begun / self.anneal
            if self.anneal_style == "exponential":
                return float(2 * 0.5**done - 1)
            if self.anneal_style == "minus_sqrt":
                return 1.0 - math.sqrt(done)
            cosine = self.anneal_style == "cosine"
        else:
            done = (samples - self.warmup) / (self.decay - self.warmup)
            cosine = self.style == "cosine"
        return 0.5 * (math.cos(math.pi * done) + 1.0) if cosine else 1.0 - done


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecay:
    """The weight decay after `samples` samples.

    Attributes:
        samples: when it has reached `end`.
    """

    start: float
    end: float
    samples: int
    style: IncreaseStyle = "constant"

    def at(self, samples: int) -> float:
        if self.style == "constant":
            return self.end
        done = samples / self.samples
        if done > 1:
            return self.end
        share = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Courses:
    """All of them, as a run has them and a checkpoint says them."""

    rate: LearningRate
    decay: WeightDecay
    ends: LearningRate | None = None  # of embedding and output, where theirs is another

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what `of` reads back."""
        said = {"learning_rate": asdict(self.rate), "weight_decay": asdict(self.decay)}
        return said if self.ends is None else said | {"decoupled_learning_rate": asdict(self.ends)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Courses:
        """Courses that a checkpoint says.

        Raises:
            TypeError, KeyError: it says something else.
        """
        rate, decay = LearningRate(**state["learning_rate"]), WeightDecay(**state["weight_decay"])
        ends = state.get("decoupled_learning_rate")
        found = cls(rate, decay, None if ends is None else LearningRate(**ends))
        for part in (found.rate, found.decay, *([] if found.ends is None else [found.ends])):
            for name, kind in get_type_hints(type(part)).items():
                value = getattr(part, name)
                if not _fits(value, kind):
                    raise TypeError(f"{name} {value!r}")
        return found

    def matters(self, unit: Literal["iters", "samples"]) -> dict[str, Any]:
        """What decides the numbers, by the flags of a run that counts in this unit; lengths in samples."""
        rate, decay = self.rate, self.decay
        found: dict[str, Any] = {
            "--lr": rate.peak,
            "--lr-decay-style": rate.style,
            f"--lr-warmup-{unit}": rate.warmup,
        }
        if rate.warmup:
            found["--lr-warmup-init"] = rate.initial
        if rate.style != "constant":
            found |= {"--min-lr": rate.least, f"--lr-decay-{unit}": rate.decay}
        if rate.style == "WSD":
            found[f"--lr-wsd-decay-{unit}"] = rate.anneal
            found["--lr-wsd-decay-style"] = rate.anneal_style
        found["--decoupled-lr"] = None if self.ends is None else self.ends.peak
        if self.ends is not None and rate.style != "constant":
            found["--decoupled-min-lr"] = self.ends.least
        if decay.style == "constant":
            return found | {"--weight-decay": decay.end}
        return found | {
            "--weight-decay-incr-style": decay.style,
            "--start-weight-decay": decay.start,
            "--end-weight-decay": decay.end,
            f"--train-{unit}": decay.samples,
        }


def _fits(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is int or (kind is float and isinstance(value, float) and math.isfinite(value))
