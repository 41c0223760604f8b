"""The options of `mega-serve serve`, by group, and the settings they become."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from mega_schema.app.click_options import LocalPath, NonEmptyPath, NumberRange, add_options
from mega_schema.errors import ConfigError
from mega_serve.commands.option_groups import option_group
from mega_serve.http.auth import ENVIRONMENT, load_keys
from mega_serve.http.config import ServerConfig
from mega_serve.http.limits import Limits
from mega_serve.http.rate_limit import RateLimits

_limits = option_group("Limits")
_security = option_group("Security and monitoring")

# flag -> (field of Limits, unit and meaning). Names of vLLM, Megatron-LM and uvicorn where they have one.
LIMIT_FLAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--max-body-bytes": ("body_bytes", "Maximum size of a request body, in bytes."),
        "--max-prompts": ("prompts", "Maximum prompts of a request."),
        "--max-n": ("n", "Maximum sequences sampled from a prompt."),
        "--max-beam-width": ("beam_width", "Maximum hypotheses of a beam search."),
        "--max-tokens-to-oom": (
            "request_tokens",
            "Maximum prompts (or beams) x tokens of the longest row, per request.",
        ),
        "--max-logprobs": ("logprobs", "Maximum most probable words reported with a token."),
        "--max-stop-strings": ("stop_strings", "Maximum stop strings of a request."),
        "--max-stop-string-chars": ("stop_string_chars", "Maximum characters of a stop string."),
        "--max-bad-words": ("bad_words", "Maximum words in bad_words."),
        "--max-logit-biases": ("logit_biases", "Maximum entries of logit_bias and allowed_token_ids."),
        "--max-grammar-bytes": (
            "grammar_bytes",
            "Maximum size of a JSON schema, regex or grammar, in bytes.",
        ),
        "--max-num-queued-reqs": (
            "queue_requests",
            "Maximum prompts in the engine, waiting or running; then 429.",
        ),
        "--max-num-queued-tokens": ("queue_tokens", "Maximum tokens that they may take; then 429."),
        "--request-timeout": ("request_timeout", "Seconds after which a request is ended with 504."),
        "--header-timeout": ("header_timeout", "Seconds that a client has to send its headers."),
        "--body-timeout": ("body_timeout", "Seconds that a client has to send its body."),
        "--timeout-keep-alive": ("keep_alive", "Seconds that a connection may be idle between two requests."),
        "--write-timeout": ("write_timeout", "Seconds that a client may leave its response unread."),
        "--max-connections": ("connections", "Maximum open connections."),
    }
)


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add a flag for every field of `Limits`."""
    defaults = {field.name: field.default for field in fields(Limits)}
    options = []
    for flag, (name, text) in LIMIT_FLAGS.items():
        default = defaults[name]
        assert default is not MISSING
        kind = NumberRange(min=0, min_open=True) if isinstance(default, float) else click.IntRange(min=1)
        options.append(
            _limits(flag, f"limit_{name}", default=default, show_default=True, type=kind, help=text)
        )
    return add_options(command, options)


def security_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of keys, hosts, origins, TLS and rates."""
    file = LocalPath(dir_okay=False)
    options = (
        _security(
            "--api-key-file",
            type=NonEmptyPath(exists=True, dir_okay=False),
            help=f"File of accepted API keys, one a line: KEY or NAME:KEY. {ENVIRONMENT} holds keys too.",
        ),
        _security("--public-metrics", is_flag=True, help="Serve /metrics without a key."),
        _security(
            "--rate-limit-requests",
            default=0,
            type=click.IntRange(min=0),
            help="Requests a minute of each key; 0: no limit.",
        ),
        _security(
            "--rate-limit-tokens",
            default=0,
            type=click.IntRange(min=0),
            help="Tokens a minute of each key, prompts and generated; 0: no limit.",
        ),
        _security(
            "--allowed-host",
            multiple=True,
            help="Host name that clients may use, beside localhost; repeatable; * allows all.",
        ),
        _security(
            "--allowed-origin",
            multiple=True,
            help="Origin of web pages that may read responses (CORS), as https://NAME; repeatable.",
        ),
        _security("--ssl-certfile", type=file, help="Certificate chain (PEM): serve HTTPS."),
        _security("--ssl-keyfile", type=file, help="Private key (PEM) of the certificate."),
        _security("--root-path", default="", help="Prefix of paths that a proxy removes."),
        _security(
            "--metrics-alias",
            type=click.Choice(["vllm"]),
            help="Also serve every metric by the name that vLLM gives it.",
        ),
        _security(
            "--otlp-traces-endpoint",
            default="",
            help="URL of an OpenTelemetry collector for traces: the only connection that the server opens.",
        ),
    )
    return add_options(command, options)


def build_limits(values: dict[str, Any]) -> Limits:
    """Take the values of `limit_options` out of a command's parameters."""
    return Limits(**{field.name: values.pop(f"limit_{field.name}") for field in fields(Limits)})


def build_config(values: dict[str, Any], *, host: str, limits: Limits, log_prompts: bool) -> ServerConfig:
    """Take the values of `security_options` out of a command's parameters.

    Raises:
        ConfigError: a flag is wrong.
    """
    from mega_serve.http.hosts import is_host_name  # imports a web framework, which --help does without

    for origin in values["allowed_origin"]:
        scheme, _, name = origin.partition("://")
        if scheme not in ("http", "https") or not name or "/" in name or name == "*":
            hint = "--allowed-origin https://app.example"
            raise ConfigError("--allowed-origin", "not an origin", found=origin, hint=hint)
    for name in values["allowed_host"]:
        if not is_host_name(name):
            wanted = "a name or an address, without scheme and port"
            hint = "--allowed-host llm.example.org"
            raise ConfigError("--allowed-host", "not a host", found=repr(name), wanted=wanted, hint=hint)
    endpoint = values["otlp_traces_endpoint"]
    if endpoint and not endpoint.startswith(("http://", "https://")):
        hint = "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces"
        raise ConfigError("--otlp-traces-endpoint", "not a URL", found=endpoint, hint=hint)
    return ServerConfig(
        keys=load_keys(values.pop("api_key_file"), os.environ),
        rate_limits=RateLimits(
            requests_per_minute=values.pop("rate_limit_requests"),
            tokens_per_minute=values.pop("rate_limit_tokens"),
        ),
        limits=limits,
        # a name given to --host is one by which clients may come; the address of the socket is allowed anyway
        allowed_hosts=(host, *values.pop("allowed_host")),
        allowed_origins=tuple(values.pop("allowed_origin")),
        public_metrics=values.pop("public_metrics"),
        vllm_metrics=values.pop("metrics_alias") == "vllm",
        log_prompts=log_prompts,
        root_path=values.pop("root_path"),
        traces_endpoint=values.pop("otlp_traces_endpoint"),
    )


def build_certificate(values: dict[str, Any]) -> tuple[str, str] | None:
    """Take the TLS files out of a command's parameters.

    Raises:
        ConfigError: one is given without the other, or is missing.
    """
    certfile, keyfile = values.pop("ssl_certfile"), values.pop("ssl_keyfile")
    if certfile is None and keyfile is None:
        return None
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is None:
            raise ConfigError(flag, "missing: TLS needs a certificate and its key", hint=f"add {flag} FILE")
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if not path.is_file():
            raise ConfigError(flag, "no such file", found=path)
    _check_certificate(certfile, keyfile)
    return str(certfile), str(keyfile)


def _check_certificate(certfile: Path, keyfile: Path) -> None:
    """Load the files as the server will, before it opens its port.

    Raises:
        ConfigError: one is not what it should be, or the key has a password, for which OpenSSL would prompt.
    """

    def refuse_password() -> str:
        hint = f"openssl pkey -in {keyfile} -out key-without-password.pem"
        raise ConfigError("--ssl-keyfile", "has a password", found=keyfile, hint=hint)

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"is not the key of {certfile}"
            raise ConfigError("--ssl-keyfile", what, found=keyfile) from None
        what = "no certificate chain in PEM, or --ssl-keyfile no private key in PEM"
        # for localhost; a public name gets its certificate from an authority
        hint = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -out cert.pem -keyout key.pem"
        raise ConfigError("--ssl-certfile", what, found=f"{certfile} and {keyfile}", hint=hint) from None
    except OSError as error:
        what = f"or --ssl-keyfile cannot be read ({error.strerror})"
        raise ConfigError("--ssl-certfile", what, found=f"{certfile} and {keyfile}") from None
