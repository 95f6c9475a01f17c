// @ts-check
/** Which parts of a page are in sight, or nearly so: only these are read and drawn. */

import { setPrinting } from "./connection.js";

const NEAR = "200px";
/** @type {Map<Element, (isNear: boolean, width: number) => void>} */
const watched = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    watched.get(entry.target)?.(entry.isIntersecting, entry.boundingClientRect.width);
  }
}, { rootMargin: NEAR });

// Paper shows all of the page, and is taken of it as it is when this ends.
addEventListener("beforeprint", () => {
  setPrinting(true);
  for (const [element, tell] of watched) tell(true, element.getBoundingClientRect().width);
});
addEventListener("afterprint", () => {
  setPrinting(false);
  for (const element of watched.keys()) {
    watcher.unobserve(element);
    watcher.observe(element);
  }
});

/**
 * Be told whenever an element comes into sight or leaves it.
 * @param {Element} element @param {(isNear: boolean, width: number) => void} tell with its width, in pixels
 * @returns {() => void} ends it
 */
export function watchSight(element, tell) {
  watched.set(element, tell);
  watcher.observe(element);
  return () => {
    watched.delete(element);
    watcher.unobserve(element);
  };
}
