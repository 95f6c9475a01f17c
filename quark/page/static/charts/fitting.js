// @ts-check
/** How far y reaches: to the means and the usual band, with carets for what lies beyond. */

import { findAt } from "./lines.js";

/** @typedef {import("./lines.js").Line} Line */
/** @typedef {{ x: number, value: number, step: number, side: "above" | "below", count: number }} Caret */

// Nine of ten entries have a band of the usual width or less; one that is so many times as wide lies
// beyond what is fitted, and is drawn as a stroke besides.
const USUAL = 0.9;
const WIDE = 3;
const MARGIN = 0.06;
const LOG_MARGIN = 0.04;
// Of a flat curve: so much of its value is shown around it.
const FLAT_SHARE = 0.05;
// A log axis that comes near zero shows no more than this below the top.
const MOST_DECADES = 30;

/** First and last index (exclusive) of a line that lie in a window, one more on either side. @param {Line} line @param {number} low @param {number} high @returns {[number, number]} */
export function findShown(line, low, high) {
  const first = Math.max(0, findAt(line.xs, low));
  const last = Math.min(line.xs.length, findAt(line.xs, high) + 2);
  return [first, Math.max(first, last)];
}

/** The value below which this share of all lies. @param {Float64Array} sorted @param {number} share */
function readQuantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

/**
 * Bounds of y for what is shown of lines in a window.
 * @param {Line[]} lines
 * @param {{ low: number, high: number, isLog?: boolean, isFull?: boolean, include?: number[] }} options
 * @returns {[number, number]}
 */
export function fitRange(lines, { low, high, isLog = false, isFull = false, include = [] }) {
  let bottom = Infinity;
  let top = -Infinity;
  /** @param {number} value */
  const take = (value) => {
    if (!Number.isFinite(value) || (isLog && value <= 0)) return;
    if (value < bottom) bottom = value;
    if (value > top) top = value;
  };
  for (const line of lines) {
    const [first, last] = findShown(line, low, high);
    const { widths, most } = measureWidths(line, first, last, isLog);
    for (let i = first; i < last; i++) {
      if (line.xs[i] < low || line.xs[i] > high) continue;
      take(line.mean[i]);
      const isUsual = isFull || !(widths[i - first] > most);
      if (!isUsual || !line.low || !line.high) continue;
      take(line.low[i]);
      take(line.high[i]);
    }
  }
  for (const value of include) take(value);
  if (!(bottom <= top)) return isLog ? [0.1, 10] : [0, 1];
  return isLog ? widenLog(bottom, top) : widen(bottom, top);
}

/**
 * How wide the bands of entries are, in decades on a log axis, and what is usual at the most.
 * @param {Line} line @param {number} first @param {number} last @param {boolean} isLog
 */
function measureWidths({ low, high, mean }, first, last, isLog) {
  const widths = new Float64Array(last - first).fill(NaN);
  if (!low || !high) return { widths, most: 0 };
  for (let i = first; i < last; i++) {
    widths[i - first] = isLog ? Math.log10(high[i] / (low[i] > 0 ? low[i] : mean[i])) : high[i] - low[i];
  }
  const sorted = widths.filter((width) => Number.isFinite(width)).sort();
  return { widths, most: sorted.length ? WIDE * readQuantile(sorted, USUAL) : 0 };
}

/** @param {number} bottom @param {number} top @returns {[number, number]} */
function widen(bottom, top) {
  const size = Math.max(Math.abs(bottom), Math.abs(top));
  const range = top - bottom;
  if (range <= size * 1e-12) {
    const around = size * FLAT_SHARE || 1;
    return [bottom - around, top + around];
  }
  const margin = range * MARGIN;
  // What is never negative gets no axis below zero for a margin alone.
  return [bottom >= 0 && bottom < margin ? -margin / 4 : bottom - margin, top + margin];
}

/** @param {number} bottom @param {number} top @returns {[number, number]} */
function widenLog(bottom, top) {
  const least = Math.max(bottom, top * 10 ** -MOST_DECADES);
  const decades = Math.log10(top / least);
  if (decades < 0.1) return [least / 2, top * 2];
  return [least / 10 ** (decades * LOG_MARGIN), top * 10 ** (decades * LOG_MARGIN)];
}

/**
 * What of the lines lies beyond the bounds: of neighbours the furthest, with how many there are.
 * @param {Line[]} lines
 * @param {{ low: number, high: number, bottom: number, top: number, near: number }} options `near` is the
 *   distance on x within which carets are one
 * @returns {Caret[]}
 */
export function findCarets(lines, { low, high, bottom, top, near }) {
  /** @type {Caret[]} */
  const found = [];
  for (const line of lines) {
    const [first, last] = findShown(line, low, high);
    for (let i = first; i < last; i++) {
      const x = line.xs[i];
      if (x < low || x > high) continue;
      const above = readEdge(line.high, line.mean, i);
      const below = readEdge(line.low, line.mean, i);
      if (above > top) found.push({ x, value: above, step: line.highSteps?.[i] || line.steps[i], side: "above", count: 1 });
      if (below < bottom) found.push({ x, value: below, step: line.lowSteps?.[i] || line.steps[i], side: "below", count: 1 });
    }
  }
  found.sort((a, b) => a.side === b.side ? a.x - b.x : a.side < b.side ? -1 : 1);
  return joinCarets(found, near);
}

/** @param {import("./lines.js").Floats | null} edge @param {import("./lines.js").Floats} mean @param {number} i */
function readEdge(edge, mean, i) {
  return edge && Number.isFinite(edge[i]) ? edge[i] : mean[i];
}

/** @param {Caret[]} found by side and place @param {number} near */
function joinCarets(found, near) {
  /** @type {Caret[]} */
  const joined = [];
  for (const caret of found) {
    const before = joined.at(-1);
    if (!before || before.side !== caret.side || caret.x - before.x > near) {
      joined.push(caret);
      continue;
    }
    const isFurther = caret.side === "above" ? caret.value > before.value : caret.value < before.value;
    joined[joined.length - 1] = { ...(isFurther ? caret : before), count: before.count + 1 };
  }
  return joined;
}

/** Indices of entries whose band is far wider than usual. @param {Line} line @param {number} first @param {number} last @param {boolean} [isLog] */
export function findWide(line, first, last, isLog = false) {
  const { widths, most } = measureWidths(line, first, last, isLog);
  const wide = [];
  for (let i = first; i < last; i++) if (widths[i - first] > most) wide.push(i);
  return wide;
}

/**
 * Whether values span so much that only a log axis shows them, by the extremes of what is above zero. What is
 * exactly zero, such as the gradient of a layer that has died, keeps no axis from it: it has carets at the
 * edge. What is below zero does.
 * @param {Line[]} lines @param {number} [ratio]
 */
export function needsLog(lines, ratio = 1000) {
  let least = Infinity;
  let most = 0;
  let isBelow = false;
  /** @param {number} value */
  const take = (value) => {
    if (!Number.isFinite(value)) return;
    if (value < 0) isBelow = true;
    else if (value > 0) {
      if (value < least) least = value;
      if (value > most) most = value;
    }
  };
  for (const { low, mean, high } of lines) {
    for (let i = 0; i < mean.length; i++) {
      take(mean[i]);
      if (low) take(low[i]);
      if (high) take(high[i]);
    }
  }
  return !isBelow && most / least > ratio;
}
