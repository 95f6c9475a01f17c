// @ts-check
/** A curve as small as a word, of low and high too, so that a spike is in it. */

import { html } from "../data/html.js";

const WIDTH = 120;
const HEIGHT = 24;
const PAD = 1.5;

/** @typedef {{ step: ArrayLike<number>, mean: ArrayLike<number>, low?: ArrayLike<number> | null,
 *   high?: ArrayLike<number> | null }} SparkCurve */

/**
 * Where the entries lie: x by their place, y between the least and the greatest.
 * @param {SparkCurve} curve
 * @returns {{ line: string, band: string, label: string }}
 */
export function traceSpark(curve) {
  const { mean } = curve;
  const low = curve.low ?? mean;
  const high = curve.high ?? mean;
  let least = Infinity;
  let most = -Infinity;
  for (let index = 0; index < mean.length; index++) {
    if (low[index] < least) least = low[index];
    if (high[index] > most) most = high[index];
  }
  if (!(least <= most)) return { line: "", band: "", label: "no finite value" };
  const scale = most > least ? (HEIGHT - 2 * PAD) / (most - least) : 0;
  const wide = mean.length > 1 ? (WIDTH - 2 * PAD) / (mean.length - 1) : 0;
  /** @param {number} index @param {number} value */
  const at = (index, value) => {
    const y = scale ? HEIGHT - PAD - (value - least) * scale : HEIGHT / 2;
    return `${(PAD + index * wide).toFixed(1)} ${y.toFixed(1)}`;
  };
  let line = "";
  let band = "";
  for (let index = 0; index < mean.length; index++) {
    if (!Number.isFinite(mean[index])) continue;
    const isBegun = line && Number.isFinite(mean[index - 1]);
    line += `${isBegun ? "L" : "M"}${at(index, mean[index])}`;
    if (high[index] > low[index]) band += `M${at(index, low[index])}L${at(index, high[index])}`;
  }
  return { line, band, label: `from ${least.toPrecision(3)} to ${most.toPrecision(3)}` };
}

/** @param {{ curve: SparkCurve | null | undefined, name?: string }} props */
export function Sparkline({ curve, name = "" }) {
  if (!curve || !curve.mean.length) return html`<span class="spark"></span>`;
  const { line, band, label } = traceSpark(curve);
  return html`<svg class="spark" role="img" aria-label=${`${name} ${label}`.trim()}
    viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT}>
    ${band && html`<path class="spark-band" d=${band} />`}<path class="spark-line" d=${line} />
  </svg>`;
}
