// @ts-check
/** Curves, lines and packs for tests, made of plain numbers. */

/** @typedef {import("../../../../quark/page/static/data/curves.js").Curve} Curve */

/** @param {number[]} mean @param {Partial<Curve>} [more] @returns {Curve} */
export function makeCurve(mean, more = {}) {
  return {
    key: "train/loss", name: "train/loss", run: "", field: "", kind: "", summary: "", rank: null, attempt: null,
    points: mean.length, exact: true, nonFinite: mean.filter((value) => !Number.isFinite(value)).length,
    lowest: null, highest: null, unit: "step", step: Float64Array.from(mean, (_, i) => i), mean: Float64Array.from(mean),
    low: null, high: null, time: null, epoch: null, lowStep: null, highStep: null, bad: null, badStep: null,
    side: 0, runs: 1, count: null, ...more,
  };
}

/** A pack as the server writes it. @param {Record<string, unknown>} head @param {[string, string, number[]][]} columns */
export function makePack(head, columns) {
  const kinds = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array };
  const arrays = columns.map(([, dtype, values]) => kinds[/** @type {"f4"} */ (dtype)].from(values));
  /** @type {unknown[]} */
  const cols = [];
  let offset = 0;
  columns.forEach(([name, dtype, values], at) => {
    cols.push([name, dtype, offset, values.length]);
    offset += Math.ceil(arrays[at].byteLength / 8) * 8;
  });
  let text = JSON.stringify({ ...head, cols });
  const length = new TextEncoder().encode(text).length;
  text += " ".repeat((8 - (4 + length) % 8) % 8);
  const bytes = new TextEncoder().encode(text);
  const buffer = new ArrayBuffer(4 + bytes.length + offset);
  new DataView(buffer).setUint32(0, bytes.length, true);
  new Uint8Array(buffer).set(bytes, 4);
  arrays.forEach((array, at) => {
    const [, , start] = /** @type {[string, string, number]} */ (cols[at]);
    new Uint8Array(buffer).set(new Uint8Array(array.buffer), 4 + bytes.length + start);
  });
  return buffer;
}

/** @param {unknown} is @param {unknown} wanted @param {string} [what] */
export function equal(is, wanted, what = "") {
  const [left, right] = [is, wanted].map((value) => JSON.stringify(value, write));
  if (left !== right) throw new Error(`${what} is ${left}, and not ${right}`);
}

/** @param {unknown} is @param {string} what */
export function holds(is, what) {
  if (!is) throw new Error(`does not hold: ${what}`);
}

/** @param {string} _ @param {unknown} value */
function write(_, value) {
  if (typeof value === "number" && !Number.isFinite(value)) return String(value);
  return ArrayBuffer.isView(value) ? [.../** @type {any} */ (value)] : value;
}
