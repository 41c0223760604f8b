"""Descriptions of request fields, for /docs and the OpenAPI schema: those that no model gives itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_IGNORED: Final = "Accepted and ignored."

# field, or model.field where a name has several meanings -> description
_DESCRIPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # all requests
        "model": "Name of the served model, as /v1/models lists it; another one is a 404.",
        "user": _IGNORED,
        "metadata": _IGNORED,
        "stream": "Send the text as server-sent events while it is generated.",
        # sampling
        "temperature": "Divisor of the logits; 0 takes the most probable token. Default: 1.",
        "top_p": "Sample from the most probable tokens that together have this probability. Default: 1.",
        "top_k": "Sample from this many most probable tokens; -1, 0: from all.",
        "min_p": "Exclude tokens with less than this part of the largest probability.",
        "repetition_penalty": "Divide positive logits of earlier tokens by this, and multiply negative ones.",
        "presence_penalty": "Subtract this from the logits of tokens in the output.",
        "frequency_penalty": "Subtract this from a logit for each occurrence of its token in the output.",
        "logit_bias": "Token id: what to add to its logit, -100 to 100.",
        "allowed_token_ids": "Sample only these tokens.",
        "bad_words": "Words that are not generated, at the beginning of a text or after a space.",
        "stop_token_ids": "Tokens that end the generation.",
        "include_stop_str_in_output": "Keep the stop string or stop token in the text.",
        "return_token_ids": "Report the ids of prompt and output.",
        "seed": "The same seed and request give the same text, whatever else the server computes.",
        "n": "Number of outputs per prompt.",
        "prompt_logprobs": "Report log-probabilities of the prompt, with this many alternatives per token.",
        "include_usage": "Send the number of tokens in a last event.",
        "continuous_usage_stats": "With include_usage: send the number of tokens in every event.",
        "include_obfuscation": "Only false: events have no padding.",
        # completions
        "prompt": "A text, token ids, or a list of either.",
        "echo": "Put the prompt before the text.",
        "CompletionBody.logprobs": "Report log-probabilities, with this many alternatives per token.",
        "CompletionBody.max_tokens": "Tokens to generate; 0 with echo scores the prompt. Default: 16.",
        # structured output
        "ResponseFormat.type": "What the text must be; structural_tag: text with JSON between given texts.",
        "TextFormat.type": "What the text must be; structural_tag: text with JSON between given texts.",
        "JsonSchemaFormat.name": "Any name; only its length is checked.",
        "TextFormat.name": "Any name; only its length is checked.",
        "schema": "The JSON schema that the text satisfies.",
        "JsonSchemaFormat.description": _IGNORED,
        "TextFormat.description": _IGNORED,
        "strict": "Ignored: a schema is always enforced.",
        "FunctionTool.strict": "Ignored: forced calls always satisfy their parameters.",
        "ResponsesTool.strict": "Ignored: forced calls always satisfy their parameters.",
        "structures": "The JSON values that the text may contain, with the texts around each.",
        "begin": "The text before the JSON value; it starts with a trigger.",
        "end": "The text after the JSON value.",
        "triggers": "Texts after which only a structure may follow.",
        "json": "A JSON schema that the text satisfies, or its JSON text.",
        "regex": "A regular expression that matches the whole text.",
        "choice": "The texts of which one is generated.",
        "json_object": "The text is a JSON object.",
        "guided_json": "As structured_outputs.json.",
        "guided_regex": "As structured_outputs.regex.",
        "guided_choice": "As structured_outputs.choice.",
        "guided_grammar": "As structured_outputs.grammar.",
        # messages
        "messages": "The conversation, oldest message first.",
        "role": 'Who speaks; "developer" is "system" for the template.',
        "content": "The text, or parts that are joined by line feeds.",
        "ChatMessage.name": "Name of the speaker, for templates that use it.",
        "tool_calls": "The functions that the assistant called.",
        "ToolCall.id": "Identifies the call for its result.",
        "ToolCall.type": "Only functions can be called.",
        "ToolCall.index": _IGNORED,
        "CalledFunction.name": "Name of the function.",
        "CalledFunction.arguments": "The arguments, as the text of a JSON object.",
        "tool_call_id": "The call whose result this message is.",
        "reasoning_content": "The reasoning before the answer, for templates that use it.",
        "refusal": "The content of a message of the assistant that has none.",
        "annotations": _IGNORED,
        "TextPart.type": "Only text: the server parses no images, sounds or files.",
        "TextPart.text": "The text of the part.",
        "TextPart.logprobs": _IGNORED,
        # chats
        "ChatBody.max_tokens": "Tokens to generate; max_completion_tokens goes before it.",
        "max_completion_tokens": "Tokens to generate. Default: as many as the context has room for.",
        "ChatBody.logprobs": "Report log-probabilities of the output.",
        "top_logprobs": "Alternatives to report per token.",
        "tools": "Functions that the model may call.",
        "ChatTool.type": "Only functions.",
        "ResponsesTool.type": "Only functions.",
        "FunctionTool.name": "Name of the function.",
        "FunctionTool.description": "What the function does, for the template.",
        "parameters": "JSON schema of the arguments.",
        "ResponsesTool.name": "Name of the function.",
        "ResponsesTool.description": "What the function does, for the template.",
        "NamedToolChoice.type": "Only a function.",
        "ResponsesToolChoice.type": "Only a function.",
        "NamedFunction.name": "Name of the function that must be called.",
        "ResponsesToolChoice.name": "Name of the function that must be called.",
        "parallel_tool_calls": "With tool_choice required: allow several calls. Default: false.",
        "add_generation_prompt": "End the conversation with the beginning of the assistant's message.",
        "continue_final_message": "Continue the last message; needs add_generation_prompt false.",
        "enable_thinking": "A variable of the chat template.",
        "thinking": "A variable of the chat template.",
        "reasoning_effort": "A variable of the chat template.",
        "ChatBody.store": "Only false: the server stores nothing.",
        # responses
        "ResponsesBody.input": "A text, or the items of a conversation, oldest first.",
        "InputItem.type": "A message, a call of a function, or its result.",
        "InputItem.id": _IGNORED,
        "status": _IGNORED,
        "call_id": "Of a call and of its result.",
        "InputItem.name": "Of a call: name of the function.",
        "InputItem.arguments": "Of a call: the arguments, as the text of a JSON object.",
        "output": "Of a result: its text, or parts that are joined by line feeds.",
        "instructions": "A system message before the input.",
        "max_output_tokens": "Tokens to generate. Default: as many as the context has room for.",
        "effort": "The variable reasoning_effort of the chat template.",
        "summary": "Only null: reasoning is not summarized.",
        "include": "Report log-probabilities of the output.",
        "background": "Only false: the answer comes with the response.",
        "truncation": "Only disabled: a conversation that is too long is a 400.",
        # embeddings and the tokenizer
        "EmbeddingBody.input": "A text, token ids, or a list of either.",
        "TokenizeBody.prompt": "The text; or give messages.",
        "return_token_strs": "Report the text of each token too.",
        "tokens": "Token ids.",
    }
)


def describe_fields(schema: Mapping[str, Any], model: str) -> None:
    """Add the missing descriptions to a JSON schema, in place.

    Args:
        schema: of a model and, in `$defs`, of those inside it.
        model: its name.
    """
    definitions = {model: schema, **schema.get("$defs", {})}
    for owner, definition in definitions.items():
        for name, field in definition.get("properties", {}).items():
            description = _DESCRIPTIONS.get(f"{owner}.{name}") or _DESCRIPTIONS.get(name)
            if description is not None and "$ref" not in field:
                field.setdefault("description", description)
