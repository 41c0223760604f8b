"""Describe a class of Hugging Face: keys of config.json and the matching fields of `ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from mega_schema.spec import Family

Rule = Callable[[Mapping[str, Any]], object]
"""A value derived from fields of `ModelSpec`; None if it would not be an integer."""

NEEDED: Final = object()


@dataclass(frozen=True, slots=True)
class HfConfigKey:
    """One key of config.json and the field of `ModelSpec` with the same meaning.

    Attributes:
        theirs: name of the key.
        ours: a field of `ModelSpec`.
        missing, null: default of the class if the key is missing, and if it is null: a value of the field, a
            rule, or NEEDED.
        older: other names of the key, in files of older versions.
        values: Hugging Face's values to ours, if they differ; of several equal ones the last is written.
    """

    theirs: str
    ours: str
    missing: object = NEEDED
    null: object = NEEDED
    older: tuple[str, ...] = ()
    values: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RopeKeys:
    """Keys of rotary positions other than `rope_parameters`, which transformers 5 uses for all classes.

    Attributes:
        base, fraction: keys of the base of the angles, and of the fraction of rotated components; None: all.
        missing: the fraction if its key is missing.
        default_base: the base if its key is missing.
        local_base: key of the base in layers with a window; None: all layers have one base.
    """

    base: str = "rope_theta"
    fraction: str | None = None
    missing: float = 1.0
    default_base: float = 10000.0
    local_base: str | None = None


@dataclass(frozen=True, slots=True)
class HfModelClass:
    """A class of `transformers`.

    Attributes:
        model_type, architecture: its two names in a config.json.
        family: the name of the defaults nearest to the class, recorded in the spec.
        keys: ordered so that a rule comes after the keys it depends on.
        fixed: keys that change the computation, with the one value that Mega supports.
        implied: fields of `ModelSpec` without a key, with a value or a rule.
        rope: None: positions are not rotary.
        window: "switch": `use_sliding_window` and the layers it is for; "key": as in `keys`; "alternating":
            layers with and without a window alternate, see `alternating_layers`; None: there is no window.
        decoder_layers: key of the layers of a decoder beside an encoder, which has as many if the key is
            missing or null; None: all layers are one stack.
    """

    model_type: str
    architecture: str
    family: Family
    keys: tuple[HfConfigKey, ...]
    fixed: Mapping[str, object]
    implied: Mapping[str, object]
    rope: RopeKeys | None = None
    window: Literal["key", "switch", "alternating"] | None = None
    decoder_layers: str | None = None


def same_heads(fields: Mapping[str, Any]) -> object:
    """Return as many key heads as query heads."""
    return fields["heads"]


def even_width(fields: Mapping[str, Any]) -> object:
    """Return the hidden size divided by the heads; None if it does not divide."""
    return None if fields["hidden"] % fields["heads"] else fields["hidden"] // fields["heads"]


def same_activation(fields: Mapping[str, Any]) -> object:
    """Return the activation of the feed-forward."""
    return fields["activation"]


def same_as_tied(fields: Mapping[str, Any]) -> object:
    """Return whether the output matrix is the embedding: then T5 scales the states before it."""
    return fields["tied"]


def four_times(fields: Mapping[str, Any]) -> object:
    """Return a feed-forward width of four times the hidden size."""
    return 4 * fields["hidden"]
