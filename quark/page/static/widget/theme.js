// @ts-check
/** In the place of charts/theme.js: light or dark as the notebook around is, which says so itself. */

/** @typedef {import("../data/colours.js").Theme} Theme */

/** @returns {Theme} */
export function readTheme() {
  const { body, documentElement: page } = document;
  // JupyterLab and Notebook, then VS Code, then Colab.
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false" ? "dark" : "light";
  const kind = body.dataset.vscodeThemeKind;
  if (kind) return kind.includes("light") ? "light" : "dark";
  const said = page.getAttribute("theme") ?? page.dataset.theme;
  if (said === "dark" || said === "light") return said;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** @type {Set<() => void>} */
const watchers = new Set();
let isListening = false;

/** Be told when it changes. @param {() => void} watcher @returns {() => void} */
export function watchTheme(watcher) {
  if (!isListening) {
    isListening = true;
    const tell = () => watchers.forEach((each) => each());
    const observer = new MutationObserver(tell);
    observer.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
    observer.observe(document.documentElement, { attributeFilter: ["theme", "data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  }
  watchers.add(watcher);
  return () => void watchers.delete(watcher);
}
