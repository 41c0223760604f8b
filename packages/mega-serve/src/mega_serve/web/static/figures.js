// The figures of a request: time to first token, speed, tokens of prompt and output.

const UPDATE_INTERVAL = 200; // milliseconds: digits that change faster cannot be read
const NONE = "\u2013";

export class Figures {
  #cells;
  #nextUpdate = 0;

  /** @param {HTMLElement} list with one element per data-figure */
  constructor(list) {
    this.#cells = Object.fromEntries(
      [...list.querySelectorAll("[data-figure]")].map((cell) => [cell.dataset.figure, cell]),
    );
  }

  /** Show the figures of a request in progress, a few times a second. */
  update(speedometer) {
    const now = performance.now();
    if (now < this.#nextUpdate) return;
    this.#nextUpdate = now + UPDATE_INTERVAL;
    this.show(speedometer, null);
  }

  show(speedometer, usage) {
    const first = speedometer?.timeToFirstToken ?? null;
    const speed = speedometer?.tokensPerSecond ?? null;
    this.#set("first", first === null ? NONE : showDuration(first));
    this.#set("speed", speed === null ? NONE : `${speed.toFixed(speed < 100 ? 1 : 0)} tok/s`);
    this.#set("prompt", usage?.prompt_tokens?.toLocaleString("en") ?? NONE);
    this.#set("output", (usage?.completion_tokens ?? speedometer?.tokens)?.toLocaleString("en") ?? NONE);
  }

  #set(name, text) {
    this.#cells[name].textContent = text;
  }
}

function showDuration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
