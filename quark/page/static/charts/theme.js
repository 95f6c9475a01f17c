// @ts-check
/** Light or dark, as the reader has it; paper is light. */

/** @typedef {import("../data/colours.js").Theme} Theme */

/** @type {Set<() => void>} */
const watchers = new Set();
let isPrinting = false;

/** @returns {Theme} */
export function readTheme() {
  if (isPrinting) return "light";
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "dark" || chosen === "light") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Be told when it changes. @param {() => void} watcher @returns {() => void} */
export function watchTheme(watcher) {
  if (watchers.size === 0) listen();
  watchers.add(watcher);
  return () => void watchers.delete(watcher);
}

let isListening = false;

function listen() {
  if (isListening) return;
  isListening = true;
  const tell = () => watchers.forEach((watcher) => watcher());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  new MutationObserver(tell).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  /** @param {boolean} is */
  const print = (is) => {
    isPrinting = is;
    tell();
  };
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}
