// @ts-check
/** Modules that are begun when something first needs them, such as what draws charts. */

import { useEffect, useState } from "../vendor/hooks.js";

/** @type {Map<() => Promise<any>, any>} */
const loaded = new Map();

/**
 * Load a module, and keep it. The promise is done when `useLate` gives it.
 * @param {() => Promise<any>} load the same function each time
 */
export async function loadLate(load) {
  if (!loaded.has(load)) loaded.set(load, await load());
}

/**
 * A module, or null until it is there: what needs it is drawn again then.
 * @param {(() => Promise<any>) | undefined} load the same function each time; undefined for none
 */
export function useLate(load) {
  const [, setCount] = useState(0);
  const [problem, setProblem] = useState(/** @type {unknown} */ (null));
  const found = load ? loaded.get(load) ?? null : null;
  useEffect(() => {
    // Also where it has come since this was drawn, for somebody else.
    if (load && !found) loadLate(load).then(() => setCount((count) => count + 1), setProblem);
  }, [load]);
  // Whoever stands around it says so, in place of waiting for ever.
  if (problem) throw problem;
  return found;
}
