// Checks that run within the page. Each returns a list of faults.
({
  // Every visible text against the colours behind it, every control against its name, every reference to an
  // id. A bar in the card is a gradient: the text must be readable on it too. Disabled controls are exempt
  // (WCAG 1.4.3).
  findAccessibilityFaults: () => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
      context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, under) => [0, 1, 2].map((i) => (top[i] * top[3] + under[i] * (255 - top[3])) / 255);
    const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
      const value = color[i] / 255;
      return sum + weight * (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    }, 0);
    const backgrounds = (element) => {
      if (element === null) return [[255, 255, 255]];
      const style = getComputedStyle(element);
      const plain = backgrounds(element.parentElement).map((under) => over(rgba(style.backgroundColor), under));
      const bar = /gradient\((rgba?\([^)]*\))/.exec(style.backgroundImage);
      return bar ? [...plain, over(rgba(bar[1]), plain[0])] : plain;
    };
    const faults = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      const isExempt = !element.checkVisibility() || element.closest(":disabled, option, noscript");
      if (isExempt || walker.currentNode.data.trim() === "") continue;
      for (const background of backgrounds(element)) {
        const color = over(rgba(getComputedStyle(element).color), background);
        const [low, high] = [luminance(color), luminance(background)].sort((a, b) => a - b);
        const contrast = (high + 0.05) / (low + 0.05);
        if (contrast < 4.5) faults.push(`${contrast.toFixed(2)}: ${walker.currentNode.data.trim()}`);
      }
    }
    for (const control of document.querySelectorAll("input, select, textarea, button, [role]")) {
      const labels = [...(control.labels ?? [])].map((label) => label.textContent.trim()).join("");
      const text = control.matches("button, [role=status], [role=alert]") ? control.id + control.textContent : "";
      const name = labels || text || control.ariaLabel || control.getAttribute("aria-labelledby");
      if (!name) faults.push(`no name: ${control.outerHTML}`);
    }
    for (const name of ["for", "aria-controls", "aria-labelledby", "aria-describedby"]) {
      for (const element of document.querySelectorAll(`[${name}]`)) {
        if (!document.getElementById(element.getAttribute(name))) faults.push(`no target: ${element.outerHTML}`);
      }
    }
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    if (new Set(ids).size !== ids.length) faults.push("ids are not unique");
    return faults;
  },

  // The same stream cut at any two places gives the same events.
  findCutFaults: async () => {
    const { readEvents } = await import("/static/sse.js");
    const text = ': hi\r\n\r\ndata: one\r\n\r\ndata: {"é":\ndata: "\u{1f642}"}\n\nid: 3\rdata:two\r\r'
      + 'event: x\ndata: last\n\n';
    const bytes = new TextEncoder().encode(text);
    const read = async (cuts) => {
      const edges = [0, ...cuts.sort((a, b) => a - b), bytes.length];
      const pieces = edges.slice(1).map((end, i) => bytes.slice(edges[i], end));
      const events = [];
      const start = (controller) => {
        for (const piece of pieces) controller.enqueue(piece);
        controller.close();
      };
      for await (const event of readEvents(new ReadableStream({ start }))) events.push(event);
      return JSON.stringify(events);
    };
    const wanted = JSON.stringify(["one", '{"é":\n"\u{1f642}"}', "two", "last"]);
    const different = [];
    for (let i = 0; i <= bytes.length; i++) {
      for (let j = i; j <= bytes.length; j += 3) {
        const got = await read([i, j]);
        if (got !== wanted) different.push([i, j, got]);
      }
    }
    return different.slice(0, 3);
  },

  // In 3,000 random streams each character is in one piece and each token in one at most, in order.
  findAlignmentFaults: async () => {
    const { TokenAligner } = await import("/static/token_aligner.js");
    let state = 7;
    const random = (n) => (state = (state * 48271) % 2147483647) % n;
    const words = [" a", "b", "bc", "\n", "", " a b", "\u00e9", "<eos>"];
    const faults = [];
    for (let run = 0; run < 3000; run++) {
      const tokens = [];
      let text = "";
      for (let i = random(8); i >= 0; i--) {
        const isPartial = random(5) === 0;
        const word = isPartial ? "" : words[random(words.length)];
        tokens.push({ text: word, isPartial, id: tokens.length });
        text += isPartial ? ["", "\u{1f642}"][random(2)] : word === "<eos>" ? "" : word;
      }
      const aligner = new TokenAligner();
      const pieces = [];
      for (let sent = 0, told = 0; sent < text.length || told < tokens.length; ) {
        const length = random(3);
        const count = random(3);
        pieces.push(...aligner.push(text.slice(sent, sent + length), tokens.slice(told, told + count)));
        sent += length;
        told += count;
      }
      pieces.push(...aligner.flush());
      const joined = pieces.map((piece) => piece.text).join("");
      const ids = pieces.flatMap((piece) => piece.tokens.map((token) => token.id));
      const isOrdered = ids.every((id, i) => i === 0 || id > ids[i - 1]);
      if (joined !== text || !isOrdered || pieces.some((piece) => piece.text === "")) faults.push(run);
    }
    return faults;
  },
})
