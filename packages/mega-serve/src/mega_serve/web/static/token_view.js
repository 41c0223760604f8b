// Generated text as a row of tokens, coloured by probability. Arrow keys walk over them; a card explains one.
//
// The view is one tab stop with the role of a read-only text box, so that a screen reader reads it as text. A
// token is announced when the arrow keys move to it, never while text streams in.

import { classifyProbability, showProbability, speakToken } from "./token_text.js";

export class TokenView {
  pieces = [];
  #cursor = -1;
  #card;
  #announce;

  /**
   * @param {object} options
   * @param {string} options.label accessible name
   * @param {TokenCard} options.card
   * @param {(message: string) => void} options.announce
   */
  constructor({ label, card, announce }) {
    this.#card = card;
    this.#announce = announce;
    this.element = document.createElement("div");
    this.element.className = "tokens";
    const attributes = {
      role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": label,
      "aria-describedby": "token-keys", tabindex: "0",
    };
    for (const [name, value] of Object.entries(attributes)) this.element.setAttribute(name, value);
    this.element.addEventListener("pointerover", (event) => this.#onPointer(event));
    this.element.addEventListener("pointerout", () => card.hideSoon());
    this.element.addEventListener("click", (event) => this.#onClick(event));
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("blur", () => this.#onBlur());
  }

  get text() {
    return this.pieces.map((piece) => piece.text).join("");
  }

  append(pieces) {
    const fragment = document.createDocumentFragment();
    for (const piece of pieces) {
      fragment.append(buildSpan(piece));
      this.pieces.push(piece);
    }
    this.element.append(fragment);
  }

  /** Keep the first `count` pieces. */
  truncate(count) {
    this.#moveCursor(-1);
    this.setEmpty(false);
    this.pieces.length = count;
    while (this.element.childNodes.length > count) this.element.lastChild.remove();
  }

  /** Show whether a request is writing to the view. */
  setRunning(isRunning) {
    this.element.classList.toggle("running", isRunning);
    if (isRunning) this.setEmpty(false);
  }

  /** Show whether an answer is complete and has no text. */
  setEmpty(isEmpty) {
    this.element.classList.toggle("empty", isEmpty);
  }

  #indexOf(target) {
    const span = target.closest(".tokens > span");
    return span === null ? -1 : [...this.element.childNodes].indexOf(span);
  }

  #onPointer(event) {
    const index = this.#indexOf(event.target);
    if (event.pointerType !== "touch" && this.#hasTokens(index)) this.#showCard(index, { isPinned: false });
  }

  #onClick(event) {
    const index = this.#indexOf(event.target);
    if (!window.getSelection().isCollapsed || !this.#hasTokens(index)) return;
    this.#moveCursor(index);
    this.#showCard(index, { isPinned: true });
  }

  #onKey(event) {
    const last = this.pieces.length - 1;
    const targets = {
      ArrowRight: this.#cursor + 1,
      ArrowLeft: this.#cursor === -1 ? last : this.#cursor - 1,
      Home: 0,
      End: last,
    };
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.key in targets && last >= 0) {
      event.preventDefault();
      this.#moveCursor(Math.min(Math.max(targets[event.key], 0), last));
      this.#describeCursor();
    } else if ((event.key === "Enter" || event.key === "ArrowDown") && this.#hasTokens(this.#cursor)) {
      event.preventDefault();
      this.#showCard(this.#cursor, { isPinned: true });
      this.#card.focusFirst();
    }
  }

  #onBlur() {
    // the card takes the focus to choose an alternative: the token stays marked
    requestAnimationFrame(() => {
      if (this.#card.hasFocus || document.activeElement === this.element) return;
      this.#moveCursor(-1);
      this.#card.hide();
    });
  }

  #describeCursor() {
    const piece = this.pieces[this.#cursor];
    if (!piece.tokens.length) {
      this.#card.hide();
      this.#announce(piece.text);
      return;
    }
    this.#showCard(this.#cursor, { isPinned: true });
    const words = piece.tokens.map((token) => `${speakToken(token)}, ${showProbability(token.logprob)}`);
    this.#announce(words.join("; "));
  }

  #hasTokens(index) {
    return index >= 0 && this.pieces[index].tokens.length > 0;
  }

  #moveCursor(index) {
    this.element.childNodes[this.#cursor]?.classList.remove("cursor");
    this.#cursor = index;
    const span = this.element.childNodes[index];
    span?.classList.add("cursor");
    span?.scrollIntoView({ block: "nearest" });
  }

  #showCard(index, options) {
    this.#card.show({ view: this, index, anchor: this.element.childNodes[index], ...options });
  }
}

function buildSpan(piece) {
  const span = document.createElement("span");
  span.textContent = piece.text; // a model's text is never HTML
  const logprobs = piece.tokens.map((token) => token.logprob).filter((logprob) => logprob !== null);
  if (logprobs.length) span.dataset.p = classifyProbability(Math.min(...logprobs));
  if (piece.isChosen) span.classList.add("chosen");
  if (piece.text.startsWith("\n") && piece.tokens.length) span.classList.add("line-break");
  return span;
}
