// @ts-check
/** Windows on x that all charts of a page share. */

/** @typedef {{ low: number, high: number }} Window */

const ZOOM = 0.5;
const PAN = 0.25;
// Nearer than so small a share of the whole is no view of anything.
const LEAST_SHARE = 1e-9;

/**
 * The window after a key: w nearer, s further, a and d to the sides, 0 the whole.
 * @param {Window | null} window null is the whole
 * @param {[number, number]} whole
 * @param {string} key
 * @returns {Window | null}
 */
export function moveWindow(window, whole, key) {
  const { low, high } = window ?? { low: whole[0], high: whole[1] };
  const range = high - low;
  const middle = (low + high) / 2;
  if (key === "0") return null;
  if (key === "w") return clampWindow({ low: middle - range * ZOOM / 2, high: middle + range * ZOOM / 2 }, whole);
  if (key === "s") return clampWindow({ low: middle - range, high: middle + range }, whole);
  const shift = key === "a" ? -PAN * range : key === "d" ? PAN * range : 0;
  return clampWindow({ low: low + shift, high: high + shift }, whole);
}

/** A window within the whole, of the same size where it fits; null where it shows all. @param {Window} window @param {[number, number]} whole @returns {Window | null} */
export function clampWindow({ low, high }, [first, last]) {
  const size = Math.max(high - low, (last - first) * LEAST_SHARE);
  if (size >= last - first) return null;
  const start = Math.min(Math.max(low, first), last - size);
  return { low: start, high: start + size };
}

/** A window around a finding: its range with as much again on both sides. @param {number} from @param {number} to @param {[number, number]} whole @returns {Window | null} */
export function frameRange(from, to, [first, last]) {
  const around = Math.max(to - from, (last - first) / 50);
  const [low, high] = [Math.max(first, from - around), Math.min(last, to + around)];
  return low > first || high < last ? { low, high } : null;
}
