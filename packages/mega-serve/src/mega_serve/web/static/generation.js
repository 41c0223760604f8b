// One streamed request, from its body to the pieces of text on the page.

import { Speedometer } from "./speedometer.js";
import { TokenAligner } from "./token_aligner.js";

/**
 * Send a request and hand over its text as it arrives.
 * @param {object} options
 * @param {Api} options.api
 * @param {{path: string, body: object, readChunk: Function}} options.request
 * @param {AbortSignal} options.signal
 * @param {(pieces: object[]) => void} options.onPieces
 * @param {(speedometer: Speedometer) => void} options.onProgress
 * @returns {Promise<{speedometer: Speedometer, finishReason: ?string, usage: ?object}>}
 * @throws {ApiError} what the server refused
 * @throws {DOMException} AbortError after signal
 */
export async function generate({ api, request, signal, onPieces, onProgress }) {
  const speedometer = new Speedometer(performance.now());
  const aligner = new TokenAligner();
  let finishReason = null;
  let usage = null;
  try {
    for await (const event of api.stream(request.path, request.body, signal)) {
      const chunk = request.readChunk(event);
      // without log-probabilities a chunk counts as a token, until usage gives the number
      speedometer.add(chunk.tokens.length || Number(chunk.text !== ""), performance.now());
      onPieces(aligner.push(chunk.text, chunk.tokens));
      onProgress(speedometer);
      finishReason = chunk.finishReason ?? finishReason;
      usage = chunk.usage ?? usage;
    }
  } finally {
    onPieces(aligner.flush()); // text that arrived is shown, also when the stream is cut
  }
  return { speedometer, finishReason, usage };
}
