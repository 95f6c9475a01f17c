// @ts-check
/** Light or dark, as the reader has it; paper is light. */

/** @typedef {import("../data/colours.js").Theme} Theme */

/** What is drawn on a canvas, where style sheets do not reach. */
export const INKS = {
  light: { ink: "#1c2128", muted: "#59636e", grid: "#e4e7eb", ground: "#ffffff", bad: "#c8102e", shade: "#d55e0024",
    critical: "#b4141f", error: "#b4141f", warning: "#8a5a00", info: "#59636e" },
  dark: { ink: "#e6e9ee", muted: "#9aa4b0", grid: "#2b3038", ground: "#14171c", bad: "#ff5c6c", shade: "#ff8c4230",
    critical: "#ff7b86", error: "#ff7b86", warning: "#e6b422", info: "#9aa4b0" },
};
export const FONT = "system-ui, sans-serif";

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
