"""Options of the objective that a decoder is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from mega_schema.app.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Options of prefix language models and of span corruption."""

    prefix: bool = option(
        "--prefix-lm",
        False,
        "tokens of a prefix of random length see each other; mega-train prefix sets it",
    )
    targets_only: bool = option(
        "--loss-on-targets-only", False, "no loss for targets within the prefix (prefix language models)"
    )
    reweight: bool = option(
        "--reweight-loss-based-on-position-frequency",
        False,
        "multiply the loss of token i of S by 2 (S - i) / (S + 1) (prefix language models)",
    )
    noise_density: float | None = option(
        "--noise-density",
        None,
        "span corruption: share of the tokens that sentinels replace, to be predicted after the text",
    )
    span_length: float | None = option(
        "--mean-noise-span-length", None, "mean tokens that a sentinel replaces; 3 if not given"
    )

    @property
    def mean_span_length(self) -> float:
        return 3 if self.span_length is None else self.span_length

    @property
    def label(self) -> str:
        """The name of the objective in the log; empty if each token predicts the next."""
        names = {"prefix language model": self.prefix, "span corruption": self.noise_density is not None}
        return ", ".join(name for name, is_chosen in names.items() if is_chosen)

    @property
    def is_causal(self) -> bool:
        """Whether the model is trained to predict each next token of the text from those before."""
        return not self.prefix and self.noise_density is None
