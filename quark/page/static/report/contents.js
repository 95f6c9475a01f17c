// @ts-check
/** What a report holds, out of the block of data in its file. */

import { decodePack } from "../data/pack.js";
import { keepAnswer } from "./answers.js";

/** @param {string} text base 64 @returns {Uint8Array<ArrayBuffer>} */
function decodeText(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return bytes;
}

/**
 * The head of the report; its packs become answers.
 * @param {string} text JSON: `{"deflated": base 64}`
 * @returns {Promise<any>}
 */
export async function readContents(text) {
  const packed = new Blob([decodeText(JSON.parse(text).deflated)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
  const { head, columns } = decodePack(await new Response(stream).arrayBuffer());
  head.packs.forEach((/** @type {string} */ name, /** @type {number} */ place) => {
    keepAnswer(name, /** @type {Uint8Array} */ (columns.get(String(place))));
  });
  return head;
}
