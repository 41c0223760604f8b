"""The protocol of Megatron-LM's tools/text_generation_cli.py, by the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request


def text_generation_cli(address: str, prompt: str, tokens: int) -> str:
    """Send one prompt and return what the script prints."""
    body = json.dumps({"prompts": [prompt], "tokens_to_generate": tokens}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/api", body, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return f"Megatron Response: \n{json.load(response)['text'][0]}"
    except urllib.error.HTTPError as error:
        with error:
            return f"Error {error.code}: {json.load(error)['message']}"
