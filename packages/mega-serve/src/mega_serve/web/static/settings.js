// Sampling settings: the form, its presets, what is remembered, and the fields of a request.

import { readItem, writeItem } from "./storage.js";

const STORAGE_KEY = "mega-serve.settings";

// name -> value that leaves the distribution as it is; such a field is not sent
const NEUTRAL = {
  top_p: 1,
  top_k: 0,
  min_p: 0,
  repetition_penalty: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
};
const BALANCED = { ...NEUTRAL, temperature: 0.8, top_p: 0.95 };
const PRESETS = { greedy: { ...NEUTRAL, temperature: 0 }, balanced: BALANCED };
const DEFAULTS = { ...BALANCED, max_tokens: 128, seed: "", stop: "", logprobs: true };

export class Settings {
  #form;
  #presetButtons;

  /** @param {HTMLFormElement} form whose fields have the names of DEFAULTS */
  constructor(form) {
    this.#form = form;
    this.#presetButtons = [...form.querySelectorAll("button[data-preset]")];
    this.#fill({ ...DEFAULTS, ...readRemembered() });
    form.addEventListener("input", () => this.#onChange());
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const button of this.#presetButtons) {
      button.addEventListener("click", () => this.#fill(PRESETS[button.dataset.preset]));
    }
    form.querySelector("button[data-action=reset]").addEventListener("click", () => this.#fill(DEFAULTS));
  }

  get values() {
    const values = {};
    for (const name of Object.keys(DEFAULTS)) {
      const field = this.#form.elements[name];
      if (field.type === "checkbox") values[name] = field.checked;
      else if (field.type === "number" && name !== "seed") {
        values[name] = Number.isNaN(field.valueAsNumber) ? DEFAULTS[name] : field.valueAsNumber;
      } else values[name] = field.value;
    }
    return values;
  }

  /** The first field whose value is out of range; null if there is none. */
  get invalidField() {
    return this.#form.querySelector("input:invalid");
  }

  /** Return the sampling fields of a request; both APIs have these names. */
  requestFields() {
    const values = this.values;
    const fields = { max_tokens: values.max_tokens, temperature: values.temperature };
    for (const [name, neutral] of Object.entries(NEUTRAL)) {
      if (values[name] !== neutral) fields[name] = values[name];
    }
    if (values.seed !== "") fields.seed = Number(values.seed);
    const stop = readStopStrings(values.stop);
    if (stop.length) fields.stop = stop;
    return fields;
  }

  #fill(values) {
    for (const [name, value] of Object.entries(values)) {
      const field = this.#form.elements[name];
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
    this.#onChange();
  }

  #onChange() {
    const values = this.values;
    for (const button of this.#presetButtons) {
      const preset = PRESETS[button.dataset.preset];
      const isActive = Object.entries(preset).every(([name, value]) => values[name] === value);
      button.setAttribute("aria-pressed", String(isActive));
    }
    if (this.invalidField === null) writeItem("localStorage", STORAGE_KEY, JSON.stringify(values));
  }
}

/** Return one string per line; \n, \t and \\ in a line stand for a line break, a tab and a backslash. */
function readStopStrings(text) {
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  return text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replace(/\\[nt\\]/g, (escape) => escapes[escape]));
}

/** Return the remembered settings that still have the name and type of a setting. */
function readRemembered() {
  let remembered;
  try {
    remembered = JSON.parse(readItem("localStorage", STORAGE_KEY)) ?? {};
  } catch {
    return {};
  }
  const entries = Object.entries(remembered);
  return Object.fromEntries(entries.filter(([name, value]) => typeof value === typeof DEFAULTS[name]));
}
