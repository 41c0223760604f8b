// The last error, in the server's words; after a 429 or 503 with Retry-After, a countdown.

export class ErrorBanner {
  #element;
  #title;
  #message;
  #detail;
  #retry;
  #timer = 0;
  #onRetry = null;

  constructor(element) {
    this.#element = element;
    [this.#title, this.#message, this.#detail] = ["title", "message", "detail"].map((name) =>
      element.querySelector(`[data-part=${name}]`),
    );
    this.#retry = element.querySelector("button[data-action=retry]");
    this.#retry.addEventListener("click", () => {
      this.hide();
      this.#onRetry();
    });
    element.querySelector("button[data-action=dismiss]").addEventListener("click", () => this.hide());
  }

  /**
   * @param {ApiError} error
   * @param {HTMLElement} area whose lower edge the banner covers, so that nothing moves
   * @param {() => void} onRetry
   */
  show(error, area, onRetry) {
    this.hide();
    area.append(this.#element);
    this.#onRetry = onRetry;
    this.#title.textContent = error.title || "Error";
    this.#message.textContent = error.message;
    const details = [
      error.param && `field ${error.param}`,
      error.code && `code ${error.code}`,
      error.requestId && `request ${error.requestId}`,
    ];
    this.#detail.textContent = details.filter(Boolean).join(" · ");
    this.#element.hidden = false;
    if (error.retryAfter) this.#countDown(Date.now() + 1000 * error.retryAfter);
  }

  hide() {
    clearTimeout(this.#timer);
    this.#retry.disabled = false;
    this.#retry.textContent = "Retry";
    this.#element.hidden = true;
  }

  #countDown(end) {
    const seconds = Math.ceil((end - Date.now()) / 1000);
    this.#retry.disabled = seconds > 0;
    this.#retry.textContent = seconds > 0 ? `Retry in ${seconds} s` : "Retry";
    if (seconds > 0) this.#timer = setTimeout(() => this.#countDown(end), 250);
  }
}
