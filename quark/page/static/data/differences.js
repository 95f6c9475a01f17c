// @ts-check
/** A curve less another one, wherever both are. */

/** @typedef {import("./curves.js").Curve} Curve */
/** @typedef {import("./curves.js").Floats} Floats */

/**
 * Values of a curve at places, straight between its entries; NaN before its first and after its last.
 * @param {Curve} curve @param {Float64Array} places ascending
 * @returns {Float64Array}
 */
export function readPlaces(curve, places) {
  const values = new Float64Array(places.length).fill(NaN);
  const known = [];
  for (let i = 0; i < curve.step.length; i++) if (Number.isFinite(curve.mean[i])) known.push(i);
  let at = 0;
  for (let i = 0; i < places.length; i++) {
    while (at + 1 < known.length && curve.step[known[at + 1]] <= places[i]) at++;
    const below = known[at];
    if (below === undefined || places[i] < curve.step[below]) continue;
    const above = known[at + 1];
    if (places[i] === curve.step[below]) values[i] = curve.mean[below];
    else if (above !== undefined) {
      const share = (places[i] - curve.step[below]) / (curve.step[above] - curve.step[below]);
      values[i] = curve.mean[below] + share * (curve.mean[above] - curve.mean[below]);
    }
  }
  return values;
}

/**
 * The difference to a baseline, with the band moved along. Neither of the two is changed.
 * @param {Curve} curve @param {Curve} base
 * @returns {Curve}
 */
export function subtractCurve(curve, base) {
  const from = readPlaces(base, curve.step);
  /** @param {Floats | null} values */
  const less = (values) => values && Float64Array.from(values, (value, i) => value - from[i]);
  return { ...curve, mean: /** @type {Float64Array} */ (less(curve.mean)), low: less(curve.low), high: less(curve.high) };
}
