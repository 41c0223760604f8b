// Prompt mode: the model continues a text (POST /v1/completions).

import { readCompletionChunk } from "./chunks.js";
import { TokenView } from "./token_view.js";

export class PromptMode {
  name = "prompt";
  #input = document.getElementById("prompt");
  #output = document.getElementById("output");
  #placeholder = document.getElementById("output-placeholder");
  #note = document.getElementById("output-note");
  #view;
  #prompt = null;
  #number = 0;

  constructor({ card, announce }) {
    this.#view = new TokenView({ label: "Generated text", card, announce });
    this.#output.append(this.#view.element);
    this.#view.element.hidden = true;
    this.#input.addEventListener("input", () => this.#updateNote());
  }

  get scroller() {
    return this.#output;
  }

  get text() {
    return this.#view.text;
  }

  get canContinue() {
    return this.#prompt !== null && this.#view.pieces.length > 0;
  }

  focus() {
    this.#input.focus();
  }

  /** Start from the prompt. */
  start() {
    this.#prompt = this.#input.value;
    return this.#begin(0);
  }

  /** Go on after the last token. */
  resume() {
    return this.#begin(this.#view.pieces.length);
  }

  /** Replace the token at `index` by an alternative and go on from there. */
  branch(view, index, alternative) {
    return this.#begin(index, alternative);
  }

  clear() {
    this.#prompt = null;
    this.#view.truncate(0);
    this.#input.value = "";
    this.#show();
  }

  historyEntry() {
    return {
      mode: this.name,
      key: `prompt-${this.#number}`,
      detail: countTokens(this.#view.pieces),
      title: this.#prompt.trim().slice(0, 80) || "(empty prompt)",
      snapshot: { prompt: this.#prompt, pieces: [...this.#view.pieces] },
    };
  }

  restore({ prompt, pieces }) {
    this.#input.value = prompt;
    this.#prompt = prompt;
    this.#view.truncate(0);
    this.#view.append(pieces);
    this.#view.setEmpty(this.#view.text === "");
    this.#show();
  }

  #begin(count, alternative) {
    this.#number += 1;
    this.#view.truncate(count);
    if (alternative) this.#view.append([choosePiece(alternative)]);
    this.#show();
    const prompt = this.#prompt + this.#view.text;
    return {
      view: this.#view,
      path: "v1/completions",
      readChunk: readCompletionChunk,
      buildBody: (settings) => ({
        prompt,
        ...settings.requestFields(),
        ...(settings.values.logprobs && { logprobs: 5 }),
      }),
      undo: () => this.#forgetEmpty(),
    };
  }

  #forgetEmpty() {
    if (this.#view.pieces.length === 0) this.#prompt = null;
    this.#show();
  }

  #show() {
    const isEmpty = this.#prompt === null;
    this.#placeholder.hidden = !isEmpty;
    this.#view.element.hidden = isEmpty;
    this.#updateNote();
  }

  #updateNote() {
    const isStale = this.#prompt !== null && this.#prompt !== this.#input.value;
    this.#note.textContent = isStale ? "of an earlier prompt" : "";
  }
}

/** Return the number of tokens in words. */
export function countTokens(pieces) {
  const count = pieces.reduce((sum, piece) => sum + Math.max(piece.tokens.length, 1), 0);
  return count === 1 ? "1 token" : `${count} tokens`;
}

/** Return the piece of an alternative that the user chose. */
export function choosePiece(alternative) {
  const token = { ...alternative, alternatives: [alternative] };
  return { text: alternative.text, tokens: [token], isChosen: true };
}
