// The page: wires modes, settings and the server together. One request at a time.

import { Api, ApiError } from "./api.js";
import { ChatMode } from "./chat_mode.js";
import { copyText } from "./clipboard.js";
import { limitNewTokens } from "./context_limit.js";
import { ErrorBanner } from "./error_banner.js";
import { Figures } from "./figures.js";
import { generate } from "./generation.js";
import { History } from "./history.js";
import { PromptMode } from "./prompt_mode.js";
import { ServerStatus } from "./server_status.js";
import { Settings } from "./settings.js";
import { readItem, writeItem } from "./storage.js";
import { TokenCard } from "./token_card.js";

const KEY_STORAGE = "mega-serve.api-key";
const BOTTOM_DISTANCE = 40; // pixels: nearer to the end of the text, the view follows it

class App {
  #status = document.getElementById("status");
  #announcement = document.getElementById("announcement");
  #figures = new Figures(document.getElementById("figures"));
  #buttons = Object.fromEntries(
    ["send", "stop", "continue", "copy", "clear"].map((name) => [name, document.getElementById(name)]),
  );
  #sidebar = document.getElementById("sidebar");
  #sidebarButton = document.getElementById("sidebar-toggle");
  #tabs = [...document.querySelectorAll("[role=tab]")];
  #keyField = document.getElementById("api-key");
  #narrow = window.matchMedia("(max-width: 55rem)");
  #settings = new Settings(document.getElementById("settings"));
  #banner = new ErrorBanner(document.getElementById("error"));
  #api = new Api(() => this.#keyField.value.trim());
  #card;
  #modes;
  #mode;
  #history;
  #server;
  #request = null; // AbortController of the request in progress

  constructor() {
    this.#card = new TokenCard(document.getElementById("token-card"), (...choice) => this.#branch(...choice));
    const announce = (message) => (this.#announcement.textContent = message);
    const options = { card: this.#card, announce };
    this.#modes = { prompt: new PromptMode(options), chat: new ChatMode(options) };
    this.#mode = this.#modes.prompt;
    this.#history = new History(
      document.getElementById("history"),
      document.getElementById("history-note"),
      (entry) => this.#restore(entry),
    );
    this.#server = new ServerStatus(this.#api, (hasTemplate) => this.#setChatAvailable(hasTemplate));
    this.#keyField.value = readItem("sessionStorage", KEY_STORAGE) ?? "";
    this.#listen();
    this.#toggleSidebar(!this.#narrow.matches);
    this.#updateButtons();
  }

  #listen() {
    const actions = {
      send: () => this.#send(),
      stop: () => this.#request?.abort(),
      continue: () => this.#run(() => this.#mode.resume()),
      copy: () => this.#copy(),
      clear: () => this.#clear(),
    };
    for (const [name, action] of Object.entries(actions)) {
      this.#buttons[name].addEventListener("click", action);
    }
    document.addEventListener("keydown", (event) => this.#onKey(event));
    for (const tab of this.#tabs) {
      tab.addEventListener("click", () => {
        this.#selectMode(tab.dataset.mode);
        this.#mode.focus();
      });
      tab.addEventListener("keydown", (event) => this.#onTabKey(event));
    }
    this.#sidebarButton.addEventListener("click", () => this.#toggleSidebar(this.#sidebar.hidden));
    document.getElementById("sidebar-close").addEventListener("click", () => {
      this.#toggleSidebar(false);
      this.#sidebarButton.focus();
    });
    this.#narrow.addEventListener("change", () => this.#toggleSidebar(!this.#narrow.matches));
    document.getElementById("connection").addEventListener("submit", (event) => event.preventDefault());
    this.#keyField.addEventListener("input", () => {
      writeItem("sessionStorage", KEY_STORAGE, this.#keyField.value.trim());
    });
    this.#keyField.addEventListener("change", () => this.#server.check());
  }

  #onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "Escape") {
      if (this.#card.isOpen) this.#card.hide();
      else if (this.#request) this.#request.abort();
      else if (this.#narrow.matches && !this.#sidebar.hidden) {
        this.#toggleSidebar(false);
        this.#sidebarButton.focus();
      }
    }
  }

  #onTabKey(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const other = this.#tabs.find((tab) => tab !== event.currentTarget);
    other.focus();
    this.#selectMode(other.dataset.mode);
  }

  #send() {
    if (this.#request) return;
    const field = this.#settings.invalidField;
    if (field) {
      this.#toggleSidebar(true);
      field.reportValidity();
      return;
    }
    this.#run(() => this.#mode.start());
  }

  #branch(view, index, alternative) {
    this.#request?.abort();
    this.#run(() => this.#mode.branch(view, index, alternative));
  }

  /** Run the request that `build` prepares. */
  async #run(build) {
    const request = build();
    if (request === null) return;
    const mode = this.#mode;
    const piecesBefore = request.view.pieces.length;
    const controller = new AbortController();
    this.#request = controller;
    this.#banner.hide();
    this.#card.hide();
    this.#figures.show(null, null);
    this.#setStatus("Generating");
    request.view.setRunning(true);
    this.#updateButtons();
    let outcome = null;
    let failure = null;
    let isLimited = false;
    try {
      const { signal } = controller;
      const length = this.#server.contextLength;
      const limited = await limitNewTokens(this.#api, this.#buildBody(request), length, signal);
      ({ isLimited } = limited);
      outcome = await generate({
        api: this.#api,
        request: { ...request, body: limited.body },
        signal,
        onPieces: (pieces) => this.#request === controller && this.#append(mode, request.view, pieces),
        onProgress: (speedometer) => this.#request === controller && this.#figures.update(speedometer),
      });
    } catch (error) {
      failure = error;
    }
    if (this.#request !== controller) return; // another request, or the history, owns the page now
    this.#request = null;
    request.view.setRunning(false);
    const hasText = request.view.pieces.length > piecesBefore;
    const isEmpty = outcome !== null && request.view.text === "";
    request.view.setEmpty(isEmpty);
    const isShown = this.#mode === mode;
    if (outcome && isShown) this.#figures.show(outcome.speedometer, outcome.usage);
    if (outcome || hasText) this.#history.add(mode.historyEntry());
    else request.undo();
    if (failure && failure.name !== "AbortError") {
      this.#showError(failure, () => this.#run(hasText ? () => mode.resume() : build));
    }
    const status = isEmpty ? "Done: the answer is empty" : describeOutcome(outcome, failure, isLimited);
    if (isShown) this.#setStatus(status);
    this.#updateButtons();
  }

  #buildBody(request) {
    return {
      ...(this.#server.model && { model: this.#server.model }),
      ...request.buildBody(this.#settings),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** Append pieces; the view follows the end of the text unless the user scrolled away from it. */
  #append(mode, view, pieces) {
    if (pieces.length === 0) return;
    const { scroller } = mode;
    const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < BOTTOM_DISTANCE;
    view.append(pieces);
    if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  #showError(error, onRetry) {
    const isReported = error instanceof ApiError;
    if (!isReported) console.error(error);
    const shown = isReported ? error : new ApiError(String(error), { title: "Error in this page" });
    this.#banner.show(shown, this.#mode.scroller.parentElement, onRetry);
    if (error.status === 401 && !this.#narrow.matches) {
      this.#toggleSidebar(true);
      this.#keyField.focus();
    }
  }

  #restore({ mode, snapshot }) {
    this.#request?.abort();
    this.#request = null;
    this.#selectMode(mode);
    this.#mode.restore(snapshot);
    this.#figures.show(null, null);
    this.#setStatus("Restored from history");
    if (this.#narrow.matches) this.#toggleSidebar(false);
    this.#updateButtons();
  }

  async #copy() {
    try {
      await copyText(this.#mode.text);
      this.#setStatus("Copied");
    } catch {
      this.#setStatus("The browser refuses to copy");
    }
  }

  #clear() {
    this.#request?.abort();
    this.#request = null;
    this.#banner.hide();
    this.#card.hide();
    this.#mode.clear();
    this.#figures.show(null, null);
    this.#setStatus("");
    this.#updateButtons();
    this.#mode.focus();
  }

  #selectMode(name) {
    const tab = this.#tabs.find(({ dataset }) => dataset.mode === name);
    if (tab.getAttribute("aria-disabled") === "true" || this.#mode.name === name) return;
    this.#request?.abort();
    this.#banner.hide();
    this.#card.hide();
    this.#figures.show(null, null);
    this.#setStatus("");
    this.#mode = this.#modes[name];
    for (const other of this.#tabs) {
      const isSelected = other === tab;
      other.setAttribute("aria-selected", String(isSelected));
      other.tabIndex = isSelected ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !isSelected;
    }
    this.#updateButtons();
  }

  #setChatAvailable(isAvailable) {
    const tab = this.#tabs.find(({ dataset }) => dataset.mode === "chat");
    tab.setAttribute("aria-disabled", String(!isAvailable));
    document.getElementById("chat-reason").hidden = isAvailable;
    if (!isAvailable) this.#selectMode("prompt");
  }

  #toggleSidebar(isOpen) {
    this.#sidebar.hidden = !isOpen;
    this.#sidebarButton.setAttribute("aria-expanded", String(isOpen));
    if (isOpen && this.#narrow.matches) document.getElementById("sidebar-close").focus();
  }

  #setStatus(text) {
    this.#status.textContent = text;
  }

  #updateButtons() {
    const isRunning = this.#request !== null;
    const { send, stop, copy } = this.#buttons;
    send.disabled = isRunning;
    send.firstElementChild.textContent = this.#mode.name === "chat" ? "Send" : "Generate";
    stop.disabled = !isRunning;
    this.#buttons.continue.disabled = isRunning || !this.#mode.canContinue;
    copy.disabled = this.#mode.text === "";
  }
}

function describeOutcome(outcome, failure, isLimited) {
  if (failure) return failure.name === "AbortError" ? "Stopped" : "Failed";
  const reasons = {
    stop: "Done: the text ended",
    length: isLimited ? "Done: the context is full" : "Done: max tokens reached",
    timeout: "Done: the server's time limit was reached",
  };
  return reasons[outcome.finishReason] ?? "Done";
}

new App();
