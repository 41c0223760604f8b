// Chat mode: messages through the model's template (POST /v1/chat/completions).

import { readChatChunk } from "./chunks.js";
import { choosePiece } from "./prompt_mode.js";
import { TokenView } from "./token_view.js";

export class ChatMode {
  name = "chat";
  #log = document.getElementById("chat-log");
  #placeholder = document.getElementById("chat-placeholder");
  #input = document.getElementById("chat-input");
  #system = document.getElementById("system-message");
  #turns = []; // {role, text} or {role, view}, each with its element
  #conversation = 1;
  #options;

  constructor({ card, announce }) {
    this.#options = { label: "Assistant", card, announce };
  }

  get scroller() {
    return this.#log;
  }

  get text() {
    return this.#turns.map((turn) => `${ROLES[turn.role]}: ${textOf(turn)}`).join("\n\n");
  }

  get canContinue() {
    return this.#turns.at(-1)?.view?.pieces.length > 0;
  }

  focus() {
    this.#input.focus();
  }

  /** Send the message; null if there is none. */
  start() {
    const text = this.#input.value;
    if (text.trim() === "") return null;
    this.#addTurn("user", text);
    this.#addTurn("assistant");
    this.#input.value = "";
    return this.#begin(false, () => {
      // nothing was answered: the message goes back to the input, so that roles keep alternating
      this.#truncate(this.#turns.length - 2);
      if (this.#input.value === "") this.#input.value = text;
    });
  }

  /** Go on with the last answer. */
  resume() {
    return this.#begin(true, () => {});
  }

  /** Replace a token of an answer by an alternative and go on from there; later messages are removed. */
  branch(view, index, alternative) {
    this.#truncate(this.#turns.findIndex((turn) => turn.view === view) + 1);
    view.truncate(index);
    view.append([choosePiece(alternative)]);
    return this.#begin(true, () => {});
  }

  clear() {
    this.#conversation += 1;
    this.#truncate(0);
    this.#input.value = "";
  }

  historyEntry() {
    const turns = this.#turns.map(({ role, text, view }) => {
      return { role, text, pieces: view && [...view.pieces] };
    });
    return {
      mode: this.name,
      key: `chat-${this.#conversation}`,
      detail: turns.length === 1 ? "1 message" : `${turns.length} messages`,
      title: (turns[0]?.text ?? "").trim().slice(0, 80),
      snapshot: { turns, system: this.#system.value, conversation: this.#conversation },
    };
  }

  restore({ turns, system, conversation }) {
    this.#conversation = conversation;
    this.#truncate(0);
    this.#system.value = system;
    for (const turn of turns) this.#addTurn(turn.role, turn.text, turn.pieces);
    for (const { view } of this.#turns) view?.setEmpty(view.text === "");
  }

  #begin(isContinuation, undo) {
    const messages = this.#turns.map((turn) => ({ role: turn.role, content: textOf(turn) }));
    if (!isContinuation) messages.pop(); // the answer to come
    if (this.#system.value.trim() !== "") messages.unshift({ role: "system", content: this.#system.value });
    return {
      view: this.#turns.at(-1).view,
      path: "v1/chat/completions",
      readChunk: readChatChunk,
      buildBody: (settings) => ({
        messages,
        ...settings.requestFields(),
        ...(isContinuation && { continue_final_message: true, add_generation_prompt: false }),
        ...(settings.values.logprobs && { logprobs: true, top_logprobs: 5 }),
      }),
      undo,
    };
  }

  #addTurn(role, text, pieces = []) {
    const element = document.createElement("article");
    element.className = `turn ${role}`;
    const heading = document.createElement("h3");
    heading.textContent = ROLES[role];
    element.append(heading);
    const turn = { role, element };
    if (role === "assistant") {
      turn.view = new TokenView(this.#options);
      turn.view.append(pieces);
      element.append(turn.view.element);
    } else {
      turn.text = text;
      const paragraph = document.createElement("p");
      paragraph.textContent = text;
      element.append(paragraph);
    }
    this.#turns.push(turn);
    this.#log.append(element);
    this.#placeholder.hidden = true;
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #truncate(count) {
    for (const turn of this.#turns.splice(count)) turn.element.remove();
    this.#placeholder.hidden = this.#turns.length > 0;
  }
}

const ROLES = { user: "You", assistant: "Assistant" };

function textOf(turn) {
  return turn.view ? turn.view.text : turn.text;
}
