// @ts-check
/** Which parts of a page are in sight, or nearly so: only these are read and drawn. */

const NEAR = "200px";
/** @type {Map<Element, (isNear: boolean, width: number) => void>} */
const watched = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    watched.get(entry.target)?.(entry.isIntersecting, entry.boundingClientRect.width);
  }
}, { rootMargin: NEAR });

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
