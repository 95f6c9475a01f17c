// @ts-check
/** Packs: a JSON head and raw columns behind it; columns are views of the bytes that came. */

/** @typedef {Float32Array | Float64Array | Int32Array | Uint8Array} Column */
/** @typedef {{ head: Record<string, any>, columns: Map<string, Column> }} Pack */

const LENGTH_BYTES = 4;

/** @typedef {{ new (buffer: ArrayBuffer, offset: number, length: number): Column,
 *   BYTES_PER_ELEMENT: number }} Typed */

/** @type {Map<string, Typed>} */
const DTYPES = new Map();
DTYPES.set("f4", Float32Array).set("f8", Float64Array).set("i4", Int32Array).set("u1", Uint8Array);

/**
 * Read a pack without copying its columns.
 * @param {ArrayBuffer} buffer
 * @returns {Pack}
 * @throws {RangeError} where the bytes are not a whole pack
 */
export function decodePack(buffer) {
  if (buffer.byteLength < LENGTH_BYTES) throw new RangeError("The answer is empty.");
  const size = new DataView(buffer).getUint32(0, true);
  const start = LENGTH_BYTES + size;
  if (start > buffer.byteLength) {
    throw new RangeError(`The answer is incomplete: its head has ${size} bytes, but ${buffer.byteLength} arrived.`);
  }
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, LENGTH_BYTES, size)));
  const columns = new Map();
  for (const [name, dtype, offset, length] of head.cols ?? []) {
    const Typed = DTYPES.get(dtype);
    if (!Typed) throw new RangeError(`The answer has a column of the unknown type ${dtype}.`);
    if (start + offset + length * Typed.BYTES_PER_ELEMENT > buffer.byteLength) {
      throw new RangeError(`The answer is incomplete: column ${name} ends too early.`);
    }
    columns.set(name, new Typed(buffer, start + offset, length));
  }
  return { head, columns };
}

/** A number of a JSON answer, where what is not finite is a text. @param {unknown} value */
export function readNumber(value) {
  if (typeof value === "number") return value;
  if (value === "NaN" || value === "Infinity" || value === "-Infinity") return Number(value);
  return null;
}
