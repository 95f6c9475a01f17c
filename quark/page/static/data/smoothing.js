// @ts-check
/** A running mean over steps: how often a curve was sampled does not change how smooth it is. */

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
