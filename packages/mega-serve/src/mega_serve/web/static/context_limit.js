// Lower max_tokens to what the model's context leaves after the prompt: the server refuses more.

// A token is a byte of the text at least; special tokens and a chat template add some.
const ADDED_TOKENS = 1024;

/**
 * Return the body with a max_tokens that fits, and whether it was lowered.
 * @param {Api} api
 * @param {object} body of a completion or a chat completion
 * @param {?number} contextLength of the model; null if the server does not tell
 * @param {AbortSignal} signal
 * @returns {Promise<{body: object, isLimited: boolean}>}
 */
export async function limitNewTokens(api, body, contextLength, signal) {
  const { messages, prompt } = body;
  const bytes = new TextEncoder().encode(JSON.stringify(messages ?? prompt)).length;
  if (!contextLength || bytes + ADDED_TOKENS + body.max_tokens <= contextLength) {
    return { body, isLimited: false };
  }
  const count = await countTokens(api, body, signal);
  const room = contextLength - count;
  if (count === null || body.max_tokens <= room) return { body, isLimited: false };
  // with no room left, the server's refusal tells the length of the prompt
  return { body: { ...body, max_tokens: Math.max(room, 1) }, isLimited: true };
}

/** Return the tokens of the prompt; null if the server does not count them. */
async function countTokens(api, body, signal) {
  const names = ["model", "prompt", "messages", "add_generation_prompt", "continue_final_message"];
  const fields = Object.fromEntries(names.filter((name) => name in body).map((name) => [name, body[name]]));
  try {
    return (await api.postJson("tokenize", fields, signal)).count ?? null;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return null; // the request itself then tells what is wrong
  }
}
