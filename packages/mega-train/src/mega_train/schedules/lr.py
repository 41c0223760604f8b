"""Learning-rate and weight-decay schedules over samples, as Megatron computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
AnnealStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
IncreaseStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Learning rate as a function of consumed samples; the first step uses the rate at 0 samples.

    Attributes:
        initial: the rate at which the warm-up starts.
        warmup, decay: in samples, from the start of training.
        anneal: of WSD (warm-up, stable, decay; arXiv:2404.06395 §4), the samples of its decay, which ends
            with `decay`.
        anneal_style: of WSD.
    """

    peak: float
    least: float
    warmup: float
    decay: int
    style: DecayStyle
    initial: float = 0.0
    anneal: int = 0
    anneal_style: AnnealStyle = "exponential"

    def lr_at(self, samples: int) -> float:
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.least
        if self.style == "inverse-square-root":
            return max(self.least, self.peak * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
        return self.least + self._remaining_fraction(samples) * (self.peak - self.least)

    def _remaining_fraction(self, samples: int) -> float:
        """Return the remaining fraction of the decay from `peak` to `least`."""
        if self.style == "WSD":
            decay_samples = samples - (self.decay - self.anneal)
            if decay_samples <= 0:
                return 1.0
            progress = decay_samples / self.anneal
            if self.anneal_style == "exponential":
                return float(2 * 0.5**progress - 1)
            if self.anneal_style == "minus_sqrt":
                return 1.0 - math.sqrt(progress)
            is_cosine = self.anneal_style == "cosine"
        else:
            progress = (samples - self.warmup) / (self.decay - self.warmup)
            is_cosine = self.style == "cosine"
        return 0.5 * (math.cos(math.pi * progress) + 1.0) if is_cosine else 1.0 - progress


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay as a function of consumed samples.

    Attributes:
        samples: number of samples after which it is `end`.
    """

    start: float
    end: float
    samples: int
    style: IncreaseStyle = "constant"

    def value_at(self, samples: int) -> float:
        if self.style == "constant":
            return self.end
        progress = samples / self.samples
        if progress > 1:
            return self.end
        fraction = progress if self.style == "linear" else 0.5 * (math.cos(math.pi * (1 - progress)) + 1.0)
        return self.start + fraction * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class ParamSchedules:
    """Learning-rate and weight-decay schedules; saved in and restored from the checkpoint."""

    lr: LRSchedule
    weight_decay: WeightDecaySchedule
    decoupled_lr: LRSchedule | None = None  # of embedding and output, if it differs

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by the keys of trainer.json."""
        state = {"lr_schedule": asdict(self.lr), "wd_schedule": asdict(self.weight_decay)}
        return (
            state
            if self.decoupled_lr is None
            else state | {"decoupled_lr_schedule": asdict(self.decoupled_lr)}
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ParamSchedules:
        """Build the schedules from a checkpoint's trainer.json, of which other keys are ignored.

        Raises:
            TypeError, KeyError: the state is not that of schedules.
        """
        lr = LRSchedule(**state["lr_schedule"])
        weight_decay = WeightDecaySchedule(**state["wd_schedule"])
        decoupled_lr = state.get("decoupled_lr_schedule")
        schedules = cls(lr, weight_decay, None if decoupled_lr is None else LRSchedule(**decoupled_lr))
        for schedule in (
            schedules.lr,
            schedules.weight_decay,
            *([] if schedules.decoupled_lr is None else [schedules.decoupled_lr]),
        ):
            for name, kind in get_type_hints(type(schedule)).items():
                value = getattr(schedule, name)
                if not _has_type(value, kind):
                    raise TypeError(f"{name} {value!r}")
        return schedules

    def resume_fields(self, unit: Literal["iters", "samples"]) -> dict[str, Any]:
        """Return the values that determine the schedules, by their flags in this unit; lengths in samples."""
        lr, weight_decay = self.lr, self.weight_decay
        fields: dict[str, Any] = {
            "--lr": lr.peak,
            "--lr-decay-style": lr.style,
            f"--lr-warmup-{unit}": lr.warmup,
        }
        if lr.warmup:
            fields["--lr-warmup-init"] = lr.initial
        if lr.style != "constant":
            fields |= {"--min-lr": lr.least, f"--lr-decay-{unit}": lr.decay}
        if lr.style == "WSD":
            fields[f"--lr-wsd-decay-{unit}"] = lr.anneal
            fields["--lr-wsd-decay-style"] = lr.anneal_style
        fields["--decoupled-lr"] = None if self.decoupled_lr is None else self.decoupled_lr.peak
        if self.decoupled_lr is not None and lr.style != "constant":
            fields["--decoupled-min-lr"] = self.decoupled_lr.least
        if weight_decay.style == "constant":
            return fields | {"--weight-decay": weight_decay.end}
        return fields | {
            "--weight-decay-incr-style": weight_decay.style,
            "--start-weight-decay": weight_decay.start,
            "--end-weight-decay": weight_decay.end,
            f"--train-{unit}": weight_decay.samples,
        }


def _has_type(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is int or (kind is float and isinstance(value, float) and math.isfinite(value))
