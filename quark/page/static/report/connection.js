// @ts-check
/**
 * What stands for the server in a report: answers that were taken when it was made.
 *
 * The linker puts this in the place of pages/connection.js, so that what draws evidence need not
 * know whether somebody is there to be asked.
 */

import { findAnswer } from "../report/answers.js";

const PREFIX = "api/runs/";
const ENTRIES = /[?&]entries=\d+$/;

/** Nothing is refused here but what nobody has taken. */
export class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * The answer to what the page would ask: 204 where the report has none.
 * @param {string} path such as `api/runs/a1b2/series?key=loss&entries=600`
 * @param {Record<string, unknown>} [_query] @param {AbortSignal} [_signal]
 */
export async function ask(path, _query = {}, _signal) {
  const below = path.slice(PREFIX.length).replace(ENTRIES, "");
  const end = below.indexOf("/");
  const found = findAnswer(`${decodeURIComponent(below.slice(0, end))}${below.slice(end)}`);
  return new Response(found, { status: found ? 200 : 204 });
}
