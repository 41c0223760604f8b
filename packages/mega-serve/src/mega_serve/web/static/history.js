// Requests of this page visit, newest first. In memory only: a prompt may be confidential.

const MAX_ENTRIES = 50;

export class History {
  #entries = [];
  #list;
  #note;
  #onRestore;

  /**
   * @param {HTMLElement} list ul
   * @param {HTMLElement} note shown while the history is empty
   * @param {(entry: object) => void} onRestore
   */
  constructor(list, note, onRestore) {
    this.#list = list;
    this.#note = note;
    this.#onRestore = onRestore;
  }

  /** Add {mode, key, title, detail, snapshot}, in place of an entry with the same key. */
  add(entry) {
    this.#entries = this.#entries.filter(({ key }) => key !== entry.key);
    this.#entries.unshift({ ...entry, time: new Date() });
    this.#entries.length = Math.min(this.#entries.length, MAX_ENTRIES);
    this.#render();
  }

  #render() {
    this.#note.hidden = this.#entries.length > 0;
    this.#list.replaceChildren(...this.#entries.map((entry) => this.#buildItem(entry)));
  }

  #buildItem(entry) {
    const button = document.createElement("button");
    button.type = "button";
    const time = entry.time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    for (const [className, text] of [["title", entry.title], ["detail", `${time} · ${entry.detail}`]]) {
      const span = document.createElement("span");
      span.className = className;
      span.textContent = text;
      button.append(span);
    }
    button.addEventListener("click", () => this.#onRestore(entry));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }
}
