"""Open a Hugging Face folder by `transformers`: offline, without running code of the folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mega_eval.batch_size import is_out_of_memory
from mega_eval.models.hugging_face_folder import (
    CONFIG,
    TOKENIZER,
    HuggingFaceFolder,
    open_hugging_face_folder,
)
from mega_eval.models.hugging_face_model import HuggingFaceModel
from mega_eval.models.interface import ModelIdentity
from mega_model.devices import resolve_device
from mega_schema.app.install_hint import install_hint
from mega_schema.checkpoint.formats import conversion_command
from mega_schema.errors import ConfigError, CorruptFileError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def check_transformers(folder: Path) -> None:
    """Import `transformers`, without access to its hub.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, by the import
    try:
        import transformers  # noqa: F401
    except ImportError:
        hint = f"{install_hint('mega-eval', 'hf')}, or {conversion_command(folder, 'hf')}"
        raise ConfigError(
            "--load", "is a Hugging Face folder, and transformers is not installed", found=folder, hint=hint
        ) from None


def identify_module(
    files: HuggingFaceFolder, tokenizer: Tokenizer, module: Any, device: torch.device
) -> ModelIdentity:
    """Return the identity of a model of `transformers` that was loaded from a folder."""
    import transformers

    return ModelIdentity(
        source=str(files.path.resolve()),
        sha256=files.hash_content(),
        tokenizer_sha256=tokenizer.identity.sha256,
        iteration=None,
        dtype=str(module.dtype).removeprefix("torch."),
        device=str(device),
        parameters=sum(weight.numel() for weight in module.parameters()),
        versions={"transformers": transformers.__version__},
    )


def open_hugging_face(
    folder: Path, *, dtype: str, device: str, batch_size: int | None = None, max_length: int | None = None
) -> HuggingFaceModel:
    """Load a Hugging Face folder. Nothing is downloaded, and no code of the folder is run.

    Args:
        dtype: "float32", "bfloat16", or "auto": that of config.json, float32 if it names none.
        batch_size: windows of one forward pass at most.
        max_length: the context in tokens; None: that of config.json.

    Raises:
        MegaError: `transformers` is not installed, the folder is not a causal model's with a tokenizer, or
            the machine lacks the device.
    """
    files = open_hugging_face_folder(folder)
    tokenizer = open_tokenizer("HuggingFaceTokenizer", model=folder)
    on = resolve_device(device, where="--device")
    check_transformers(folder)
    _check_class(files)
    with quiet_library(), explain_errors(files):
        module = _load_module(files, dtype).to(on)
    config = module.config.get_text_config()
    _check_vocabulary(tokenizer, config.vocab_size, folder)
    identity = identify_module(files, tokenizer, module, on)
    model = HuggingFaceModel(
        module,
        tokenizer,
        identity,
        vocab_size=config.vocab_size,
        context_length=_choose_context(config, folder, max_length),
        batch_size=batch_size,
    )
    with explain_errors(files):
        model.check_causal()
    return model


def _check_class(files: HuggingFaceFolder) -> None:
    """Refuse a model that `transformers` has no causal class for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    model_type = files.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CLASSES:
        raise FormatError(
            f"{files.path / CONFIG}: model_type",
            "is not of a causal model of the installed transformers",
            found=model_type,
            wanted="such as gpt2, llama, qwen3",
            hint="pip install --upgrade transformers, if the model is new",
        )
    architectures = files.config.get("architectures") or [CLASSES[model_type]]
    if not isinstance(architectures, list) or not any(name in architectures for name in CLASSES.values()):
        raise FormatError(
            f"{files.path / CONFIG}: architectures",
            "is not a causal model",
            found=json.dumps(architectures),
            wanted=CLASSES[model_type],
        )


def _load_module(files: HuggingFaceFolder, dtype: str) -> Any:
    """Load the weights, and refuse a folder that lacks some: `transformers` would draw them at random."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    stored = config.get_text_config().dtype or config.dtype or torch.float32
    module, loading = AutoModelForCausalLM.from_pretrained(
        files.path,
        config=config,
        dtype=stored if dtype == "auto" else getattr(torch, dtype),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        found = f"{len(missing)} missing, such as {missing[0]}"
        hint = f"hf download ORGANIZATION/MODEL --local-dir {files.path}"
        raise CorruptFileError(files.path, "lacks weights", found=found, hint=hint)
    module.generation_config = GenerationConfig()  # else its penalties and temperature stay in effect
    return module.eval()


def _choose_context(config: Any, folder: Path, max_length: int | None) -> int:
    """Return the context in tokens, that of the config or a smaller one."""
    lengths = [value for key in _CONTEXT_KEYS if isinstance(value := getattr(config, key, None), int)]
    if not lengths and max_length is None:
        raise FormatError(
            folder / CONFIG,
            "does not tell the model's context",
            wanted=" or ".join(_CONTEXT_KEYS),
            hint="--max-model-len 2048",
        )
    if lengths and max_length is not None and max_length > lengths[0]:
        raise ConfigError(
            "--max-model-len",
            "is longer than the model's context",
            found=max_length,
            wanted=f"at most {lengths[0]}",
            hint=f"--max-model-len {lengths[0]}",
        )
    return max_length or lengths[0]


def _check_vocabulary(tokenizer: Tokenizer, rows: int, folder: Path) -> None:
    if tokenizer.identity.vocab_size > rows:
        raise FormatError(
            folder / TOKENIZER,
            "the tokenizer has more tokens than the model",
            found=tokenizer.identity.vocab_size,
            wanted=f"at most {rows}",
        )


@contextmanager
def quiet_library() -> Iterator[None]:
    """Keep the library's warnings and progress bars off the terminal."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


@contextmanager
def explain_errors(files: HuggingFaceFolder) -> Iterator[None]:
    """Report what the library finds wrong with a folder in one line."""
    from safetensors import SafetensorError

    try:
        yield
    except MegaError:
        raise
    except SafetensorError as error:
        names = ", ".join(path.name for path in files.weights[:3])
        hint = f"hf download ORGANIZATION/MODEL --local-dir {files.path}"
        raise CorruptFileError(
            files.path, "its weights are damaged", found=f"{error} in {names}", hint=hint
        ) from None
    except Exception as error:  # of any class: the config's values reach all of the library
        if is_out_of_memory(error):
            hint = "--dtype bfloat16, or a device with more memory"
            raise ConfigError(
                "--load", "the model does not fit in memory", found=files.path, hint=hint
            ) from None
        code = f"M.from_pretrained('{files.path}')"
        raise FormatError(
            files.path,
            "cannot be run by transformers",
            found=" ".join(str(error).split())[:200],
            hint=f'python -c "from transformers import AutoModelForCausalLM as M; {code}"',
        ) from error
