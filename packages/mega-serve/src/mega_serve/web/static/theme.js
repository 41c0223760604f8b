// Light or dark. A classic script in the head, so that a chosen theme is set before the first paint.
"use strict";

(() => {
  const key = "mega-serve.theme";

  function applyTheme(theme) {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  }

  let theme = "auto";
  try {
    theme = localStorage.getItem(key) ?? "auto";
  } catch {
    // storage is switched off: the system's choice
  }
  applyTheme(theme);

  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = document.documentElement.dataset.theme ?? "auto";
    select.addEventListener("change", () => {
      applyTheme(select.value);
      try {
        localStorage.setItem(key, select.value);
      } catch {
        // not remembered
      }
    });
  });
})();
