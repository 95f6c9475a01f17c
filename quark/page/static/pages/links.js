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
  if (replace) history.replaceState(null, "", link);
  else history.pushState(null, "", link);
  lastKeys = "";
  tell();
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
  if (replace || isOne) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
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

addEventListener("popstate", () => {
  lastKeys = "";
  tell();
});

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
  const isHere = link.pathname === location.pathname;
  go(link.href);
  if (!isHere) scrollTo(0, 0);
});
