// @ts-check
/** Curves as lines over one x: in order, smoothed, and with what is not finite aside. */


// A running mean over steps: how often a curve was sampled does not change how smooth it is.

// The weight is what is left of an entry after a thousandth of the range that is shown.
const PARTS = 1000;

/**
 * Exponential mean of the finite values, by the distance between their places and without the bias of
 * its beginning. NaN where no finite value has been yet, and where the value itself is not finite.
 * @param {ArrayLike<number>} places ascending
 * @param {ArrayLike<number>} values
 * @param {number} weight 0 (nothing) to below 1
 * @param {number} range of the places that are shown
 */
export function smoothValues(places, values, weight, range) {
  const smoothed = new Float64Array(values.length).fill(NaN);
  const unit = range > 0 ? range / PARTS : 1;
  let total = 0;
  let weights = 0;
  let before = NaN;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!Number.isFinite(value)) continue;
    const distance = Number.isNaN(before) ? 0 : Math.max(0, places[i] - before) / unit;
    const left = Number.isNaN(before) ? 0 : Math.pow(weight, distance);
    // An entry stands for the way up to it; one that follows at once still counts a little.
    const share = Number.isNaN(before) ? 1 : Math.max(1 - left, Number.EPSILON);
    total = total * left + value * share;
    weights = weights * left + share;
    before = places[i];
    smoothed[i] = total / weights;
  }
  return smoothed;
}

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {Float32Array | Float64Array} Floats */

/**
 * A line to be drawn. Arrays are of one length, and `xs` ascends.
 * @typedef {object} Line
 * @property {string} name what tells it from the others of its chart
 * @property {number} index which style it has
 * @property {Floats} xs
 * @property {Floats} mean
 * @property {Floats | null} low
 * @property {Floats | null} high
 * @property {Floats} steps
 * @property {Floats | null} lowSteps
 * @property {Floats | null} highSteps
 * @property {Float64Array | null} smoothed
 * @property {{ x: number, step: number, count: number }[]} bad
 * @property {number} points
 * @property {boolean} exact
 * @property {boolean} isThin one of the runs of a group
 * @property {Floats | null} count of the runs behind each entry
 */

/**
 * What x is: a column of the curve, seconds since `start_s`, or the values of another curve.
 * @typedef {{ kind: "step" | "epoch" | "time" | "relative" } | { kind: "metric", curve: Curve }} XAxis
 */

/** Places of a curve's entries on the x axis. @param {Curve} curve @param {XAxis} x @param {number} start_s */
export function placeEntries(curve, x, start_s) {
  if (x.kind === "metric") return curve.step.map((step) => readAt(x.curve, step));
  if (x.kind === "epoch") return curve.epoch ?? (curve.unit === "epoch" ? curve.step : nowhere(curve));
  if (x.kind === "time") return curve.time ?? nowhere(curve);
  if (x.kind === "relative") return curve.time?.map((time) => time - start_s) ?? nowhere(curve);
  return curve.step;
}

/** @param {Curve} curve */
function nowhere(curve) {
  return new Float64Array(curve.step.length).fill(NaN);
}

/** The value of a curve at a step: of the last entry up to it. @param {Curve} curve @param {number} step */
export function readAt(curve, step) {
  const at = findAt(curve.step, step);
  return at < 0 ? NaN : curve.mean[at];
}

/** Index of the last place up to this one, -1 where there is none. @param {ArrayLike<number>} places ascending @param {number} place */
export function findAt(places, place) {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] <= place) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Index of the place nearest to this one, -1 where there is none. @param {ArrayLike<number>} places @param {number} place */
export function findNearest(places, place) {
  const below = findAt(places, place);
  const above = below + 1;
  if (above >= places.length) return below;
  return below < 0 || places[above] - place < place - places[below] ? above : below;
}

/**
 * A curve as a line. Entries without a place are left out; entries are put in the order of x,
 * so that a step that went back makes no line back.
 * @param {Curve} curve
 * @param {{ x?: XAxis, start_s?: number, smooth?: number, range?: number, name?: string, index?: number, isThin?: boolean }} [options]
 * @returns {Line}
 */
export function makeLine(curve, { x = { kind: "step" }, start_s = 0, smooth = 0, range = 0, name = curve.name, index = 0, isThin = false } = {}) {
  const places = placeEntries(curve, x, start_s);
  const order = orderEntries(places);
  /** @template {Floats | null} T @param {T} values @returns {T} */
  const pick = (values) => {
    if (order === null || values === null) return values;
    return /** @type {T} */ (/** @type {unknown} */ (Float64Array.from(order, (i) => values[i])));
  };
  const xs = pick(places);
  const mean = pick(curve.mean);
  const steps = pick(curve.step);
  const counts = pick(curve.bad);
  const badSteps = pick(curve.badStep);
  const bad = [];
  for (let i = 0; i < xs.length; i++) {
    const count = counts ? counts[i] : Number.isFinite(mean[i]) || curve.nonFinite === 0 ? 0 : 1;
    if (count > 0) bad.push({ x: placeBad(xs, steps, badSteps, i), step: badSteps?.[i] || steps[i], count });
  }
  const extent = range || (xs.length ? xs[xs.length - 1] - xs[0] : 0);
  return {
    name, index, isThin, xs, mean, steps, bad, points: curve.points, exact: curve.exact, count: curve.count,
    low: pick(curve.low), high: pick(curve.high),
    lowSteps: pick(curve.lowStep), highSteps: pick(curve.highStep),
    smoothed: smooth > 0 && xs.length > 1 ? smoothValues(xs, mean, smooth, extent) : null,
  };
}

/** Where a value that is not finite lies: at its own step, between two entries. @param {Floats} xs @param {Floats} steps @param {Floats | null} badSteps @param {number} i */
function placeBad(xs, steps, badSteps, i) {
  const share = badSteps && i + 1 < xs.length ? (badSteps[i] - steps[i]) / (steps[i + 1] - steps[i]) : 0;
  return share > 0 && share < 1 ? xs[i] + share * (xs[i + 1] - xs[i]) : xs[i];
}

/** Indices by place, or null where the entries are in order and all have one. @param {ArrayLike<number>} places */
function orderEntries(places) {
  let isOrdered = true;
  for (let i = 0; i < places.length && isOrdered; i++) {
    isOrdered = places[i] >= (i ? places[i - 1] : -Infinity);
  }
  if (isOrdered) return null;
  const found = [];
  for (let i = 0; i < places.length; i++) if (Number.isFinite(places[i])) found.push(i);
  return found.sort((a, b) => places[a] - places[b] || a - b);
}

/** What tells the curves of one chart apart: rank, attempt, field or name. @param {Curve[]} curves */
export function nameLines(curves) {
  const parts = curves.map((curve) => [
    curve.name, curve.field, curve.summary,
    curve.attempt === null ? "" : curve.attempt < 0 ? "before the fork" : `attempt ${curve.attempt}`,
    curve.rank === null ? "" : `rank ${curve.rank}`,
  ]);
  const differs = parts[0]?.map((_, at) => new Set(parts.map((part) => part[at])).size > 1) ?? [];
  return parts.map((part) => part.filter((text, at) => text && differs[at]).join(" ") || part[0]);
}

/** Least and greatest place of all lines, or null. @param {Line[]} lines @returns {[number, number] | null} */
export function findExtent(lines) {
  let low = Infinity;
  let high = -Infinity;
  for (const { xs } of lines) {
    if (xs.length === 0) continue;
    low = Math.min(low, xs[0]);
    high = Math.max(high, xs[xs.length - 1]);
  }
  return low <= high ? [low, high] : null;
}

/** Where a step lies on x, by the entries of these lines; NaN beyond them. @param {Line[]} lines @param {number} step @param {boolean} isStep */
export function placeStep(lines, step, isStep) {
  if (isStep) return step;
  for (const { steps, xs } of lines) {
    if (steps.length === 0 || step < steps[0] || step > steps[steps.length - 1]) continue;
    const at = findAt(steps, step);
    return xs[Math.max(0, at)];
  }
  return NaN;
}
