// @ts-check
/** What the page would ask of a server, as it was answered when the report was made. */

/** @type {Map<string, Uint8Array>} */
const answers = new Map();

/** @param {string} name run and address below it, such as `a1b2/series?key=loss` @param {Uint8Array} bytes */
export function keepAnswer(name, bytes) {
  answers.set(name, bytes);
}

/** The pack of this name as a buffer of its own; null where the report does not have it. @param {string} name */
export function findAnswer(name) {
  const bytes = answers.get(name);
  return bytes ? /** @type {ArrayBuffer} */ (bytes.slice().buffer) : null;
}
