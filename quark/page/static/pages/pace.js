// @ts-check
/** How often something is read anew while a run goes on. */

import { useEffect, useRef, useState } from "../vendor/hooks.js";

const EVERY_MS = 10_000;

/** What changes each second, but changed at most every ten. @param {number} version */
export function useRarely(version) {
  const [kept, setKept] = useState(version);
  const last = useRef(Date.now());
  useEffect(() => {
    if (version === kept) return undefined;
    const timer = setTimeout(() => {
      last.current = Date.now();
      setKept(version);
    }, Math.max(0, last.current + EVERY_MS - Date.now()));
    return () => clearTimeout(timer);
  }, [version]);
  return kept;
}
