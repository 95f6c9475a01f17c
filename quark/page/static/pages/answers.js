// @ts-check
/** What a part of a page reads: anew when it is another thing, and again while the server is busy or lost. */

import { useEffect, useState } from "../vendor/hooks.js";
import { Refused, askJson, follow, isPassing, poll } from "./connection.js";

const AGAIN_MS = 2000;
const ASK_AGAIN_MS = 400;

/**
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} read
 * @param {unknown[]} inputs what it depends on
 * @returns {{ value: T | null, mistake: string }} the value before, until the next one has come
 */
export function useAnswer(read, inputs) {
  const [state, setState] = useState(/** @type {{ value: T | null, mistake: string }} */ ({ value: null, mistake: "" }));
  useEffect(() => {
    /** @param {AbortSignal} signal */
    const load = async (signal) => {
      try {
        const value = await read(signal);
        if (!signal.aborted) setState({ value, mistake: "" });
      } catch (error) {
        if (signal.aborted) return false;
        setState((old) => ({ ...old, mistake: error instanceof Error ? error.message : String(error) }));
        if (isPassing(error)) throw error;
      }
      return false;
    };
    return follow(load, AGAIN_MS);
  }, inputs);
  return state;
}

/**
 * What the server has to work out, asked for until it is there; null before that, and where nothing is asked.
 * @param {string} path @param {any} query @param {number} version
 */
export function useSaid(path, query, version) {
  const [found, setFound] = useState(/** @type {{ key: string, said: any } | null} */ (null));
  const key = JSON.stringify(query);
  useEffect(() => query ? poll(async (signal) => {
    try {
      const said = await askJson(path, query, signal);
      // What was said of the same before stands until there is something newer.
      if (said.state !== "computing") setFound({ key, said });
      return said.state === "computing";
    } catch (error) {
      if (!(error instanceof Refused) || error.status === 503) throw error;
      setFound({ key, said: { state: "failed", note: error.message } });
      return false;
    }
  }, ASK_AGAIN_MS) : undefined, [key, version]);
  return found?.key === key ? found.said : null;
}
