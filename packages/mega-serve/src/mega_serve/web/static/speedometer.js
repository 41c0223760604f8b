// Time to first token and tokens per second of one request. Times are milliseconds of a monotonic clock.

export class Speedometer {
  tokens = 0;
  #start;
  #first = null;
  #last = null;
  #tokensAfterFirst = 0;

  constructor(start) {
    this.#start = start;
  }

  /** Count tokens that arrived together. */
  add(count, now) {
    if (count === 0) return;
    if (this.#first === null) this.#first = now;
    else this.#tokensAfterFirst += count;
    this.#last = now;
    this.tokens += count;
  }

  /** Milliseconds from the request to its first token; null before it. */
  get timeToFirstToken() {
    return this.#first === null ? null : this.#first - this.#start;
  }

  /** Tokens per second after the first token (prefill is not part of it); null before the second. */
  get tokensPerSecond() {
    const elapsed = this.#last - this.#first;
    return this.#tokensAfterFirst === 0 || elapsed <= 0 ? null : (1000 * this.#tokensAfterFirst) / elapsed;
  }
}
