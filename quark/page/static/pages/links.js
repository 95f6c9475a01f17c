// @ts-check
/**
 * What the address says, and addresses that say it.
 *
 * The whole state of a page stands in its address, below wherever the server has mounted it:
 * `<html data-root>` is the way from the first page to the top, and nothing begins with `/`.
 */

/** @typedef {{ name: "runs" | "run" | "layers" | "compare" | "sweeps" | "sweep" | "none", run: string, query: URLSearchParams,
 *   hash: string }} Place run: the ID of a run, or of a sweep */

const TOGETHER_MS = 1000;
const RESTORE_MS = 5000;
const SCROLLED = "quark.scrolled";

/** The address that all pages lie below; it ends with `/`. */
export const root = new URL(document.documentElement.dataset.root || "./", location.href);

/** @type {Set<() => void>} */
const listeners = new Set();
let lastKeys = "";
let lastChange_ms = 0;

/** Where we are. @returns {Place} */
export function readPlace() {
  const below = location.pathname.slice(root.pathname.length).replace(/\/$/, "");
  const parts = below.split("/").map(decodeText);
  const query = new URLSearchParams(location.search);
  const hash = decodeText(location.hash.slice(1));
  if (below === "") return { name: "runs", run: "", query, hash };
  if (parts[0] === "run" && parts.length === 2) return { name: "run", run: parts[1], query, hash };
  if (parts[0] === "run" && parts.length === 3 && parts[2] === "layers") {
    return { name: "layers", run: parts[1], query, hash };
  }
  if (parts[0] === "sweep" && parts.length === 2) return { name: "sweep", run: parts[1], query, hash };
  if (below === "compare" || below === "sweeps") return { name: below, run: "", query, hash };
  return { name: "none", run: "", query, hash };
}

/**
 * The address of a page.
 * @param {string[]} parts of its path; none is the list of runs
 * @param {Record<string, string | string[] | null>} [query] null leaves one out, a list is repeated
 * @param {string} [hash]
 */
export function makeLink(parts, query = {}, hash = "") {
  const url = new URL(parts.map(encodeURIComponent).join("/"), root);
  for (const [key, value] of Object.entries(query)) {
    for (const item of [value].flat()) {
      if (item !== null && item !== "") url.searchParams.append(key, item);
    }
  }
  url.hash = hash && encodeURIComponent(hash);
  return url.pathname + url.search + url.hash;
}

/** Go to a page of ours. @param {string} link @param {{ replace?: boolean }} [options] */
export function go(link, { replace = false } = {}) {
  const { pathname } = location;
  put(link, replace);
  lastKeys = "";
  tell();
  if (location.pathname !== pathname) scrollTo(0, 0);
}

/**
 * Change the query of this page.
 * @param {Record<string, string | null>} changes null takes one out
 * @param {{ hash?: string | null, replace?: boolean, together?: boolean }} [options] together: of
 *   a slider, a field or a key held down; what follows one another at once is one step of "back"
 */
export function change(changes, { hash = null, replace = false, together = false } = {}) {
  const url = new URL(location.href);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === "") url.searchParams.delete(key);
    else url.searchParams.set(key, value);
  }
  if (hash !== null) url.hash = hash && encodeURIComponent(hash);
  if (url.href === location.href) return;
  const keys = Object.keys(changes).sort().join(" ");
  const isOne = together && keys === lastKeys && performance.now() - lastChange_ms < TOGETHER_MS;
  put(url.href, replace || isOne);
  lastKeys = keys;
  lastChange_ms = performance.now();
  tell();
}

/** Be told of every change of the address. @param {() => void} listener */
export function watchPlace(listener) {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

function tell() {
  for (const listener of [...listeners]) listener();
}

/** @param {string} text */
function decodeText(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** @param {string} link @param {boolean} isSame whether it stands for the same step of "back" */
function put(link, isSame) {
  if (isSame) return history.replaceState(history.state, "", link);
  scrolled.set(entry, readScroll());
  entry += 1;
  history.pushState({ entry }, "", link);
}

// The page of a step back is made anew, and is as long as it was only once it has been read: so how
// far it was scrolled is kept here, and not by the browser.
history.scrollRestoration = "manual";
/** Which step of the history this is. @type {number} */
let entry = history.state?.entry ?? 0;
/** @type {Map<number, number[]>} */
const scrolled = new Map(JSON.parse(sessionStorage.getItem(SCROLLED) ?? "[]"));
let restoring = 0;

const listBoxes = () => [document.documentElement, ...document.querySelectorAll(".table-box")];
const readScroll = () => listBoxes().map((box) => box.scrollTop);

/** Scroll as it was, as soon as there is so much, unless somebody does something meanwhile. */
function restoreScroll() {
  const wanted = scrolled.get(entry) ?? [];
  const end_ms = performance.now() + RESTORE_MS;
  const turn = restoring += 1;
  const scroll = () => {
    if (turn !== restoring || performance.now() > end_ms) return;
    const boxes = listBoxes();
    const isThere = wanted.map((top, at) => {
      if (boxes[at]) boxes[at].scrollTop = top;
      return Math.abs((boxes[at]?.scrollTop ?? 0) - top) < 2;
    });
    if (isThere.includes(false)) requestAnimationFrame(scroll);
  };
  scroll();
}

for (const event of ["wheel", "keydown", "pointerdown"]) {
  addEventListener(event, () => void (restoring += 1), { capture: true, passive: true });
}
addEventListener("popstate", () => {
  scrolled.set(entry, readScroll());
  entry = history.state?.entry ?? 0;
  lastKeys = "";
  tell();
  restoreScroll();
});
addEventListener("pagehide", () => {
  scrolled.set(entry, readScroll());
  sessionStorage.setItem(SCROLLED, JSON.stringify([...scrolled]));
});
// One that has no number yet was never left.
if (history.state) restoreScroll();
else history.replaceState({ entry }, "");

// A link of ours changes the page without loading it anew; with a modifier it is the browser's.
document.addEventListener("click", (event) => {
  if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey) return;
  if (event.shiftKey || event.altKey || !(event.target instanceof Element)) return;
  const link = event.target.closest("a[href]");
  if (!(link instanceof HTMLAnchorElement) || link.target || link.hasAttribute("download")) return;
  const isOurs = link.origin === root.origin && link.pathname.startsWith(root.pathname);
  const below = link.pathname.slice(root.pathname.length);
  if (!isOurs || !(["", "compare", "sweeps"].includes(below) || below.startsWith("run/") || below.startsWith("sweep/"))) return;
  event.preventDefault();
  if (link.href === location.href) return;
  go(link.href);
});
