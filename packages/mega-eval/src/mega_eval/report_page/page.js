"use strict";
// Examples are shown a page at a time; all text enters the page as text nodes, never as HTML.
(() => {
  const results = JSON.parse(document.getElementById("examples-data").textContent);
  const get = (id) => document.getElementById(id);
  const [resultSelect, judgeSelect, search, order, list, status] =
    ["result", "judge", "search", "order", "list", "status"].map(get);
  if (!resultSelect) return;
  const filters = [...document.querySelectorAll("[data-filter]")];
  const PAGE = 25;
  let filter = "all", page = 0, shown = [];

  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const current = () => results[resultSelect.value];
  const isRight = (example) => example.scores[judgeSelect.value] === 1;
  const searchText = (example) => (example.lower ??=
    [example.id, example.prompt, example.expected, example.prediction, ...Object.values(example.tags),
      ...example.choices.map(([text]) => text)].join("\n").toLowerCase());
  const nats = (example) => (example.nats ??= example.tokens.length
    ? example.tokens.reduce((sum, token) => sum - token[1], 0) / example.tokens.length : 0);

  function select() {
    const all = current().examples, words = search.value.toLowerCase();
    const matching = words ? all.filter((example) => searchText(example).includes(words)) : all;
    const judged = Boolean(judgeSelect.value);
    const right = judged ? matching.filter(isRight).length : 0;
    const counts = { all: matching.length, right, wrong: matching.length - right };
    for (const button of filters) {
      const name = button.dataset.filter;
      button.querySelector("span").textContent = counts[name].toLocaleString("en");
      button.setAttribute("aria-pressed", String(name === filter));
      button.hidden = !judged && name !== "all";
    }
    shown = filter === "all" || !judged ? [...matching]
      : matching.filter((example) => isRight(example) === (filter === "right"));
    if (order.value !== "file") {
      const sign = order.value === "surprising" ? -1 : 1;
      shown.sort((a, b) => sign * (nats(a) - nats(b)));
    }
    page = Math.min(page, Math.max(0, Math.ceil(shown.length / PAGE) - 1));
    draw();
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE)), first = page * PAGE;
    list.replaceChildren(...shown.slice(first, first + PAGE).map(card));
    const last = Math.min(first + PAGE, shown.length);
    const text = shown.length
      ? `${(first + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${shown.length.toLocaleString("en")}`
      : "No example matches.";
    status.textContent = text;
    for (const position of document.querySelectorAll(".position")) position.textContent = `page ${page + 1} of ${pages}`;
    for (const button of document.querySelectorAll("[data-step]")) {
      const target = page + Number(button.dataset.step);
      button.disabled = target < 0 || target >= pages;
    }
  }

  function card(example) {
    const node = element("article", "example");
    node.tabIndex = -1;
    const header = node.appendChild(element("header"));
    header.append(element("h3", "", example.id));
    if (judgeSelect.value) {
      const right = isRight(example);
      header.append(element("span", `verdict ${right ? "right" : "wrong"}`, right ? "✓ right" : "✗ wrong"));
    }
    for (const [name, value] of Object.entries(example.tags)) header.append(element("span", "", `${name}: ${value}`));
    for (const [name, value] of Object.entries(example.scores)) {
      if (name === judgeSelect.value) continue;
      header.append(element("span", "", `${name.replaceAll("_", " ")} ${format(value)}`));
    }
    const fields = node.appendChild(element("dl"));
    const field = (name, ...content) => {
      const value = element("dd");
      value.append(...content);
      fields.append(element("dt", "", name), value);
    };
    field("Prompt", prompt(example.prompt));
    field("Expected", element("div", "text", visible(example.expected)));
    field("Prediction", element("div", "text", visible(example.prediction)));
    if (example.tokens.length) field("Tokens", ...example.tokens.map(token));
    if (example.choices.length) field("Choices", choices(example));
    return node;
  }

  const format = (value) => Number.isInteger(value) ? String(value) : value.toPrecision(4);
  const visible = (text) => text === "" ? "(empty)" : text;

  function prompt(text) {
    if (text.length <= 700) return element("div", "text", visible(text));
    const details = element("details"), summary = element("summary", "text");
    summary.textContent = `… ${text.slice(-500)}`;
    details.append(summary, element("div", "text", text));
    return details;
  }

  function token([text, logprob, isGreedy]) {
    const node = element("span", isGreedy ? "token" : "token miss", text.replaceAll("\n", "↵\n") || "·");
    const strength = Math.min(1, -logprob / 10) * 0.75;
    node.style.backgroundColor = `rgb(var(--surprise) / ${strength.toFixed(3)})`;
    node.title = `ln P ${logprob.toFixed(4)}, P ${(100 * Math.exp(logprob)).toPrecision(3)} %` +
      (isGreedy ? ", the most probable token" : "");
    return node;
  }

  function choices(example) {
    const table = element("table", "choices"), best = Math.max(...example.choices.map(([, value]) => value));
    for (const [text, logprob] of example.choices) {
      const row = table.insertRow();
      row.className = logprob === best ? "best" : "";
      row.insertCell().append(element("span", "text", `${text === example.expected ? "● " : ""}${visible(text)}`));
      const number = row.insertCell();
      number.className = "n";
      number.textContent = `ln P ${logprob.toFixed(3)}`;
      const bar = row.insertCell().appendChild(element("span", "bar"));
      bar.style.width = `${(120 * Math.exp(logprob - best)).toFixed(1)}px`;
      bar.title = "P, relative to the most probable choice";
    }
    return table;
  }

  function changeResult() {
    const { judges } = current();
    judgeSelect.replaceChildren(...judges.map((name) => element("option", "", name)));
    judgeSelect.closest("label").hidden = judges.length < 2;
    order.closest("label").hidden = !current().examples.some((example) => example.tokens.length);
    restart();
  }
  const restart = () => { page = 0; select(); };
  const turn = (step) => {
    const target = page + step;
    if (target < 0 || target * PAGE >= shown.length) return;
    page = target;
    draw();
    get("examples").scrollIntoView();
  };

  resultSelect.addEventListener("change", changeResult);
  for (const control of [judgeSelect, order]) control.addEventListener("change", restart);
  search.addEventListener("input", restart);
  for (const button of filters) button.addEventListener("click", () => { filter = button.dataset.filter; restart(); });
  for (const button of document.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => turn(Number(button.dataset.step)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const cards = [...list.children], at = cards.indexOf(document.activeElement);
    const focus = (index) => cards[Math.max(0, Math.min(cards.length - 1, index))]?.focus();
    const actions = {
      "/": () => search.focus(), n: () => turn(1), p: () => turn(-1),
      j: () => focus(at + 1), k: () => focus(at - 1),
      a: () => filters[0].click(), r: () => filters[1].click(), w: () => filters[2].click(),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  });
  changeResult();
})();
