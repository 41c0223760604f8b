// Streamed chunks of both APIs in one form:
//   {text, tokens: [{text, label, isPartial, logprob, alternatives: [{text, label, isPartial, logprob}]}],
//    finishReason, usage}
// A token is partial when its bytes are not whole characters: its text is then unknown; its label shows bytes
// where the server sends them.

const BYTES_TEXT = /^bytes:((?:\\x[0-9a-f]{2})+)$/i;
const REPLACEMENT = "\ufffd";

/** Read a chunk of POST /v1/completions. */
export function readCompletionChunk(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.text ?? "",
    tokens: readCompletionLogprobs(choice?.logprobs),
    finishReason: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
  };
}

/** Read a chunk of POST /v1/chat/completions. */
export function readChatChunk(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? "",
    tokens: (choice?.logprobs?.content ?? []).map((item) => ({
      ...readChatToken(item),
      alternatives: sortAlternatives((item.top_logprobs ?? []).map(readChatToken)),
    })),
    finishReason: choice?.finish_reason ?? null,
    usage: chunk.usage ?? null,
  };
}

function readCompletionLogprobs(logprobs) {
  return (logprobs?.tokens ?? []).map((token, i) => ({
    ...readToken(token, logprobs.token_logprobs?.[i]),
    alternatives: sortAlternatives(
      Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([text, logprob]) => readToken(text, logprob)),
    ),
  }));
}

function readChatToken(item) {
  return item.bytes ? readBytes(item.bytes, item.logprob) : readToken(item.token, item.logprob);
}

function readToken(text, logprob) {
  const bytes = BYTES_TEXT.exec(text);
  if (bytes) return readBytes(bytes[1].split("\\x").slice(1).map((hex) => parseInt(hex, 16)), logprob);
  return { text, label: text, isPartial: text.includes(REPLACEMENT), logprob: logprob ?? null };
}

function readBytes(bytes, logprob) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
    return { text, label: text, isPartial: false, logprob: logprob ?? null };
  } catch {
    const label = bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    return { text: "", label, isPartial: true, logprob: logprob ?? null };
  }
}

function sortAlternatives(tokens) {
  return tokens.filter((token) => token.logprob !== null).sort((a, b) => b.logprob - a.logprob);
}
