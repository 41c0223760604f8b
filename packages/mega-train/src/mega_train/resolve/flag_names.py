"""Replace fields of `ModelSpec` by the user's flags in error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from mega_schema.app.config import config_keys
from mega_schema.errors import MegaError
from mega_train.config import ModelConfig, RunConfig

P = ParamSpec("P")
T = TypeVar("T")
_FIELD = re.compile(r"\bmodel\.(\w+)")
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        key.field.name: key.flag
        for key in config_keys(RunConfig)
        if key.section == "model" and key.field.name != "family"
    }
    | {
        "tied": "--untie-embeddings-and-output-weights",
        "bias": "--disable-bias-linear",
        "init": "--init-method-xavier-uniform",
    }
)
_INVERSE = frozenset({"tied", "bias"})  # fields that are false if their flag is given
_WORDS: Mapping[object, str] = MappingProxyType(
    {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "learned": "learned_absolute"}
)


def with_flag_names(model: ModelConfig, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function and return its value.

    Raises:
        MegaError: the function's error, with flags in place of the fields of a model.
    """
    try:
        return function(*args, **kwargs)
    except MegaError as error:
        raise _translate(error, model) from None


def _translate(error: MegaError, model: ModelConfig) -> MegaError:
    field = _FIELD.fullmatch(str(error.where))
    if field is None or field[1] not in _FLAGS:
        return error
    values = {name: _value(field[1], value, model) for name, value in error.values.items()}
    what, hint = _with_flags(error.what, model), _with_flags(error.hint, model)
    return type(error)(_flag(field[1], model), what, hint=hint, **values)


def _flag(field: str, model: ModelConfig) -> str:
    if field == "activation" and model.activation is None:
        return "--swiglu" if model.swiglu else "--glu-activation" if model.glu else "--activation"
    return _FLAGS[field]


def _value(field: str, value: Any, model: ModelConfig) -> object:
    if type(value) is bool:
        return "given" if value != (field in _INVERSE) else "not given"
    if field == "sliding_window" and type(value) is int:
        return f"{value - 1},0"
    return _WORDS.get(value, _with_flags(value, model) if isinstance(value, str) else value)


def _with_flags(text: str, model: ModelConfig) -> str:
    return _FIELD.sub(lambda field: _flag(field[1], model) if field[1] in _FLAGS else field[0], text)
