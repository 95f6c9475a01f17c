// @ts-check
/** One key, one action; a page says which while it is shown. */

import { moveWindow } from "../charts/zooming.js";

/** @typedef {{ key: string, says: string, act: (event: KeyboardEvent) => void }} Shortcut */

const SETTING = "quark-keys";

/** @type {Shortcut[][]} */
const layers = [];
let isOn = readSetting();

/** Whether single keys act; who speaks to their machine may want them not to. */
export function areKeysOn() {
  return isOn;
}

/** @param {boolean} on */
export function setKeysOn(on) {
  isOn = on;
  try {
    localStorage.setItem(SETTING, on ? "on" : "off");
  } catch {
    // Without storage it holds until the page is loaded anew.
  }
}

function readSetting() {
  try {
    return localStorage.getItem(SETTING) !== "off";
  } catch {
    return true;
  }
}

/**
 * The keys that move what all charts show.
 * @param {() => { view: any, whole: [number, number] | null, zoom: (low: number | null, high: number | null, repeat: boolean) => void }} read
 * @returns {Shortcut[]}
 */
export function listMoves(read) {
  const act = (/** @type {KeyboardEvent} */ { key, repeat }) => {
    const { view, whole, zoom } = read();
    if (!whole) return;
    const next = moveWindow(view.window && { low: view.window[0], high: view.window[1] }, whole, key);
    zoom(next?.low ?? null, next?.high ?? null, repeat);
  };
  return [
    { key: "w", says: "zoom in", act }, { key: "s", says: "zoom out", act },
    { key: "a", says: "earlier", act }, { key: "d", says: "later", act },
  ];
}

/**
 * Take keys until the function that is returned is called.
 * @param {Shortcut[]} shortcuts
 */
export function takeKeys(shortcuts) {
  layers.push(shortcuts);
  return () => void layers.splice(layers.indexOf(shortcuts), 1);
}

/** All that is taken now, for the help. @returns {Shortcut[]} */
export function listKeys() {
  const found = new Map(layers.flat().map((shortcut) => [shortcut.key, shortcut]));
  return [...found.values()];
}

/** @param {EventTarget | null} target */
function isWriting(target) {
  if (!(target instanceof HTMLElement)) return false;
  if (target instanceof HTMLInputElement) return !["checkbox", "radio", "button"].includes(target.type);
  return target.isContentEditable || ["TEXTAREA", "SELECT"].includes(target.tagName);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.key === "Escape" && isWriting(event.target)) {
    /** @type {HTMLElement} */ (event.target).blur();
    return;
  }
  if (isWriting(event.target) || document.querySelector("dialog[open]")) return;
  // Enter and the space bar belong to the button or link that has the focus.
  const isControl = event.target instanceof Element && event.target.closest("a, button, summary");
  if (isControl && (event.key === "Enter" || event.key === " ")) return;
  if (!isOn && event.key.length === 1) return;
  const shortcut = layers.flat().findLast(({ key }) => key === event.key);
  if (!shortcut) return;
  event.preventDefault();
  shortcut.act(event);
});
