// @ts-check
/** What a part of a page reads: anew when it is another thing, and again while the server is busy or lost. */

import { useEffect, useState } from "../vendor/hooks.js";
import { isPassing, poll } from "./connection.js";

const AGAIN_MS = 2000;

/**
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} read
 * @param {unknown[]} inputs what it depends on
 * @returns {{ value: T | null, mistake: string }} the value before, until the next one has come
 */
export function useAnswer(read, inputs) {
  const [state, setState] = useState(/** @type {{ value: T | null, mistake: string }} */ ({ value: null, mistake: "" }));
  useEffect(() => {
    const ended = new AbortController();
    let stop = () => {};
    /** @param {AbortSignal} signal */
    const load = async (signal) => {
      try {
        const value = await read(signal);
        if (!ended.signal.aborted) setState({ value, mistake: "" });
      } catch (error) {
        if (ended.signal.aborted) return false;
        setState((old) => ({ ...old, mistake: error instanceof Error ? error.message : String(error) }));
        if (isPassing(error)) throw error;
      }
      return false;
    };
    load(ended.signal).catch(() => {
      if (!ended.signal.aborted) stop = poll(load, AGAIN_MS);
    });
    return () => {
      ended.abort();
      stop();
    };
  }, inputs);
  return state;
}
