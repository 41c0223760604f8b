// What the page knows of the server: health, models, whether there is a chat template.

const POLL_INTERVAL = 15_000; // milliseconds between two looks at /health
const LOADING_INTERVAL = 3_000; // the same while the server loads its model

export class ServerStatus {
  #api;
  #dot = document.getElementById("health");
  #models = document.getElementById("model");
  #context = document.getElementById("context-length");
  #onTemplate;
  #isLoaded = false;
  #needsKey = false;

  /**
   * @param {Api} api
   * @param {(hasTemplate: boolean) => void} onTemplate
   */
  constructor(api, onTemplate) {
    this.#api = api;
    this.#onTemplate = onTemplate;
    this.#models.addEventListener("change", () => this.#showContext());
    this.#checkAgain();
  }

  get model() {
    return this.#models.value;
  }

  /** Tokens of the model's context; null if the server does not tell. */
  get contextLength() {
    return Number(this.#models.selectedOptions[0]?.dataset.length) || null;
  }

  /** Ask /health; once it answers, ask what is served. */
  async check() {
    try {
      await this.#api.probe("health");
      if (!this.#isLoaded) await this.#load();
      this.#needsKey = false;
      this.#show("ok", "Ready");
    } catch (error) {
      this.#needsKey = error.status === 401;
      const states = { 401: ["busy", "API key needed"], 503: ["busy", "Not ready"] };
      this.#show(...(states[error.status] ?? ["down", "Not reachable"]));
    }
  }

  async #checkAgain() {
    // without a key each look would be a refused request in the server's log: the field calls check()
    if (!document.hidden && !this.#needsKey) await this.check();
    this.#schedule();
  }

  #schedule() {
    setTimeout(() => this.#checkAgain(), this.#isLoaded ? POLL_INTERVAL : LOADING_INTERVAL);
  }

  async #load() {
    this.#showModels((await this.#api.getJson("v1/models")).data ?? []);
    this.#isLoaded = true;
    const tokenizer = await this.#api.getJson("tokenizer_info").catch(() => null);
    // a server without this endpoint may still have a template: only a clear "none" counts
    if (tokenizer !== null) this.#onTemplate(Boolean(tokenizer.chat_template));
  }

  #show(state, text) {
    if (this.#dot.textContent === text) return;
    this.#dot.dataset.state = state;
    this.#dot.textContent = text;
  }

  #showModels(models) {
    const options = models.map(({ id, max_model_len: length }) => {
      const option = new Option(id, id);
      option.dataset.length = length ?? "";
      return option;
    });
    this.#models.replaceChildren(...options);
    this.#models.disabled = models.length === 0;
    this.#showContext();
  }

  #showContext() {
    const length = this.contextLength;
    this.#context.textContent = length ? `${length.toLocaleString("en")} tokens of context` : "";
  }
}
