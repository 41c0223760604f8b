// Requests to the OpenAI-compatible API of the server that sent this page.

import { readEvents } from "./sse.js";

/** An error that the server (or the way to it) reported. `status` is 0 without an HTTP answer. */
export class ApiError extends Error {
  constructor(message, fields) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status: 0, code: null, param: null, retryAfter: null, requestId: null }, fields);
  }
}

export class Api {
  /** @param {() => string} readKey returns the API key, or "". */
  constructor(readKey) {
    this.readKey = readKey;
  }

  async getJson(path) {
    const response = await this.#fetch(path, { cache: "no-store" });
    return response.json();
  }

  async postJson(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    return response.json();
  }

  /** Return if the path answers with a status below 400; throw ApiError otherwise. */
  async probe(path) {
    const response = await this.#fetch(path, { cache: "no-store" });
    await response.body?.cancel();
  }

  /** Yield the JSON objects of a streamed answer until [DONE]. */
  async *stream(path, body, signal) {
    const response = await this.#fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body: JSON.stringify(body),
      signal,
    });
    const type = response.headers.get("content-type") ?? "none";
    if (!type.startsWith("text/event-stream")) {
      const message = `The answer's content type is ${type}, wanted text/event-stream.`;
      throw new ApiError(message, { title: "No stream" });
    }
    try {
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") return;
        const chunk = parseChunk(data);
        if (chunk.error) throw errorOf(chunk, response, chunk.error.status ?? chunk.error.code);
        yield chunk;
      }
    } catch (error) {
      if (error instanceof TypeError) throw connectionError();
      throw error;
    }
    const message = "The server closed the stream before the answer was complete.";
    throw new ApiError(message, { title: "Connection lost" });
  }

  async #fetch(path, options) {
    const key = this.readKey();
    if (!/^[\x21-\x7e]*$/.test(key)) {
      const message = "The API key has a space or a character that is not ASCII; no header can carry it.";
      throw new ApiError(message, { title: "API key" });
    }
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      // without a key of its own, a request takes the password that the browser asked for the page
      const credentials = key ? "omit" : "same-origin";
      response = await fetch(path, { ...options, headers, credentials, redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw connectionError();
    }
    if (response.ok) return response;
    throw errorOf(await response.json().catch(() => null), response, response.status);
  }
}

function parseChunk(data) {
  try {
    return Object(JSON.parse(data));
  } catch {
    throw new ApiError("The stream contains an event that is not JSON.", { title: "Unreadable answer" });
  }
}

function connectionError() {
  return new ApiError("The server does not answer. It may have stopped, or the network is down.", {
    title: "No connection",
  });
}

function errorOf(body, response, status) {
  const error = body?.error ?? {};
  const number = Number.isInteger(status) ? status : 0;
  const reason = number === response.status ? response.statusText : "";
  return new ApiError(error.message ?? body?.message ?? "The server gave no reason.", {
    status: number,
    title: number ? `${number} ${reason || reasonOf(number)}`.trim() : "Server error",
    code: typeof error.code === "string" ? error.code : null,
    param: error.param ?? null,
    retryAfter: readRetryAfter(response.headers.get("retry-after")),
    requestId: response.headers.get("x-request-id"),
  });
}

// HTTP/2 and some proxies send no reason phrase
function reasonOf(status) {
  const reasons = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    408: "Request Timeout",
    413: "Content Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
  };
  return reasons[status] ?? "";
}

/** Return seconds from the header's number or HTTP date; null if there is none. */
function readRetryAfter(value) {
  if (value === null) return null;
  const seconds = /^\d+(\.\d+)?$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}
