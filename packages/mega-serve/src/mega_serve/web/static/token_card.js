// The card of one token: its probability, and the alternatives, each a button that continues from there.

import { classifyProbability, showProbability, showToken, speakToken } from "./token_text.js";

const SHOW_DELAY = 60; // milliseconds: a pointer that crosses the text opens nothing
const HIDE_DELAY = 250; // milliseconds: time to move the pointer from the token to the card
const GAP = 4; // pixels between token and card
const MARGIN = 8; // pixels between card and edge of the window

export class TokenCard {
  #target = null;
  #isPinned = false;
  #timer = 0;
  #onChoose;

  /**
   * @param {HTMLElement} element
   * @param {(view: TokenView, index: number, alternative: object) => void} onChoose
   */
  constructor(element, onChoose) {
    this.element = element;
    this.#onChoose = onChoose;
    element.addEventListener("pointerenter", () => clearTimeout(this.#timer));
    element.addEventListener("pointerleave", () => this.hideSoon());
    element.addEventListener("keydown", (event) => this.#onKey(event));
    document.addEventListener("pointerdown", (event) => {
      if (!element.contains(event.target)) this.hide();
    });
    element.addEventListener("focusout", (event) => this.#onFocusOut(event));
    window.addEventListener("resize", () => this.#follow());
    document.addEventListener("scroll", () => this.#follow(), { capture: true, passive: true });
  }

  get isOpen() {
    return !this.element.hidden;
  }

  get hasFocus() {
    return this.element.contains(document.activeElement);
  }

  /** Show the card of a token, at once if pinned. A card that is pinned ignores the pointer. */
  show({ view, index, anchor, isPinned }) {
    if (this.#isPinned && !isPinned) return;
    clearTimeout(this.#timer);
    const open = () => {
      this.#isPinned = isPinned;
      this.#target = { view, index, anchor };
      this.#fill(view.pieces[index]);
      this.element.hidden = false;
      this.#place(anchor);
    };
    if (isPinned || this.isOpen) open();
    else this.#timer = setTimeout(() => anchor.isConnected && open(), SHOW_DELAY);
  }

  /** Hide the card unless it is pinned or the pointer reaches it. */
  hideSoon() {
    clearTimeout(this.#timer);
    if (!this.#isPinned) this.#timer = setTimeout(() => this.hide(), HIDE_DELAY);
  }

  /** Hide the card; a focus inside goes back to the text. */
  hide() {
    clearTimeout(this.#timer);
    if (this.hasFocus) this.#target.view.element.focus({ preventScroll: true });
    this.#isPinned = false;
    this.element.hidden = true;
  }

  focusFirst() {
    this.element.querySelector("button:not([disabled])")?.focus();
  }

  #onFocusOut(event) {
    const next = event.relatedTarget;
    if (this.isOpen && !this.element.contains(next) && next !== this.#target.view.element) {
      this.#isPinned = false;
      this.element.hidden = true;
    }
  }

  /** Keep the card at its token while the text scrolls. */
  #follow() {
    if (!this.isOpen) return;
    if (this.#target.anchor.isConnected) this.#place(this.#target.anchor);
    else this.hide();
  }

  #onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const buttons = [...this.element.querySelectorAll("button:not([disabled])")];
    const index = buttons.indexOf(document.activeElement) + step;
    buttons[(index + buttons.length) % buttons.length]?.focus();
  }

  #fill(piece) {
    const [token] = piece.tokens;
    const parts = [];
    if (piece.tokens.length > 1) {
      parts.push(buildText("p", `${piece.tokens.length} tokens form this text:`, "card-note"));
      parts.push(...piece.tokens.map((part) => buildHead(part)));
      parts.push(buildText("p", "Instead of the first:", "card-note"));
    } else {
      parts.push(buildHead(token));
    }
    const list = document.createElement("ul");
    list.append(...token.alternatives.map((alternative) => this.#buildAlternative(alternative, token)));
    parts.push(list);
    this.element.replaceChildren(...parts);
  }

  #buildAlternative(alternative, token) {
    const isGenerated = alternative.label === token.label;
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.p = classifyProbability(alternative.logprob);
    button.style.setProperty("--share", `${100 * Math.exp(alternative.logprob)}%`);
    button.append(
      buildText("span", showToken(alternative), "token-text"),
      buildText("span", showProbability(alternative.logprob), "share"),
    );
    const words = `${speakToken(alternative)}, ${showProbability(alternative.logprob)}`;
    if (isGenerated) {
      button.disabled = true;
      button.setAttribute("aria-label", `${words}, generated`);
    } else if (alternative.isPartial) {
      button.disabled = true;
      button.title = "Part of a character: the text cannot continue from it.";
      button.setAttribute("aria-label", `${words}, part of a character, cannot be chosen`);
    } else {
      button.setAttribute("aria-label", `Continue from ${words}`);
      button.addEventListener("click", () => {
        const { view, index } = this.#target;
        this.hide();
        this.#onChoose(view, index, alternative);
      });
    }
    if (isGenerated) button.classList.add("generated");
    const item = document.createElement("li");
    item.append(button);
    return item;
  }

  /** Put the card under the token, or above where there is no room, inside the window. */
  #place(anchor) {
    // of a token that is broken between two lines, the wider part: the other is often only its space
    const [rectangle] = [...anchor.getClientRects()].sort((a, b) => b.width - a.width);
    if (rectangle === undefined) return;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = Math.min(Math.max(rectangle.left, MARGIN), window.innerWidth - width - MARGIN);
    const isAbove = rectangle.bottom + GAP + height + MARGIN > window.innerHeight;
    const top = isAbove ? Math.max(MARGIN, rectangle.top - GAP - height) : rectangle.bottom + GAP;
    this.element.style.setProperty("left", `${left}px`);
    this.element.style.setProperty("top", `${top}px`);
  }
}

function buildHead(token) {
  const head = document.createElement("p");
  head.className = "card-head";
  head.append(buildText("span", showToken(token), "token-text"));
  if (token.logprob !== null) {
    head.append(
      buildText("span", showProbability(token.logprob), "share"),
      buildText("span", `ln P = ${token.logprob.toFixed(3).replace("-", "\u2212")}`, "logprob"),
    );
  }
  return head;
}

function buildText(tag, text, className) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}
