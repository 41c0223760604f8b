// Server-sent events (HTML standard, section 9.2.6) from the body of a fetch.

/**
 * Yield the data of each event. Comments (keep-alives), ids and event names are ignored.
 * @param {ReadableStream<Uint8Array>} body
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      buffer += done ? "\n" : value;
      // a carriage return at the end may be the first half of a CRLF: wait for the next piece
      const lines = buffer.split(done ? /\r\n|\r|\n/ : /\r\n|\r(?!$)|\n/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (done) return;
    }
  } finally {
    // also when the caller breaks off: the server sees the connection close and aborts the request
    await reader.cancel().catch(() => {});
  }
}
