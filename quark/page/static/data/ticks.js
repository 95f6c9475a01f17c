// @ts-check
/** Where an axis has ticks, and what stands beside them. */

const SECOND_MS = 1000;
const TIME_STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  604800, 1209600, 2592000, 7776000, 31536000,
];
const DAY_S = 86400;
const HOUR_S = 3600;
const MINUTE_S = 60;
const MOST_DECADES = 8;

/** A step of 1, 2 or 5 times a power of ten. @param {number} range @param {number} count */
export function chooseStep(range, count) {
  const raw = range / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  for (const factor of [1, 2, 5]) if (raw <= factor * power * (1 + 1e-9)) return factor * power;
  return 10 * power;
}

/**
 * Round places between two bounds, at most about so many.
 * @param {number} low @param {number} high @param {number} count @param {number} [least] smallest step
 * @param {number} [step] where it is known
 */
export function placeTicks(low, high, count, least = 0, step = 0) {
  if (!(high > low) || !Number.isFinite(high - low)) return Number.isFinite(low) ? [low] : [];
  step ||= Math.max(least, chooseStep(high - low, count));
  const ticks = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let i = first; i * step <= high + step * 1e-9; i++) ticks.push(roundTo(i * step, step));
  return ticks;
}

/** Powers of ten between two bounds; every second or third where there are many. @param {number} low @param {number} high @param {number} [count] at most so many */
export function placeDecades(low, high, count = MOST_DECADES) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.min(count, MOST_DECADES)));
  const ticks = [];
  for (let power = Math.ceil(first / every) * every; power <= last; power += every) {
    ticks.push(Number(`1e${power}`));
  }
  // Within one decade there is no power of ten to stand at: the bounds are said.
  return ticks.length ? ticks : placeTicks(low, high, 3);
}

/** Round moments between two times in seconds. @param {number} low @param {number} high @param {number} count */
export function placeTimes(low, high, count) {
  if (!(high > low)) return Number.isFinite(low) ? [low] : [];
  if (high - low < count) return placeTicks(low, high, count);
  const step = TIME_STEPS_S.find((s) => (high - low) / s <= count) ?? DAY_S * 365 * Math.ceil((high - low) / (DAY_S * 365 * count));
  const zone_s = new Date(low * SECOND_MS).getTimezoneOffset() * MINUTE_S;
  const ticks = [];
  for (let at = Math.ceil((low - zone_s) / step) * step + zone_s; at <= high; at += step) ticks.push(at);
  return ticks;
}

/** Round durations between two bounds in seconds. @param {number} low @param {number} high @param {number} count */
export function placeDurations(low, high, count) {
  const step = TIME_STEPS_S.find((s) => (high - low) / s <= count);
  return high - low < count || !step ? placeTicks(low, high, count) : placeTicks(low, high, count, step, step);
}

/** Labels of ticks, all to the same digits. @param {number[]} ticks */
export function labelTicks(ticks) {
  if (ticks.length === 0) return [];
  const size = Math.max(...ticks.map(Math.abs));
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : size || 1;
  if (size >= 1e5 && step >= 100) return ticks.map((tick) => labelLarge(tick, size, step));
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    const digits = Math.max(0, Math.min(6, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step) + 1e-9)));
    return ticks.map((tick) => tick === 0 ? "0" : shortenExponent(tick.toExponential(digits)));
  }
  const digits = Math.max(0, Math.min(8, -Math.floor(Math.log10(step) + 1e-9)));
  return ticks.map((tick) => tick === 0 ? "0" : tick.toFixed(digits));
}

/** @param {number} tick @param {number} size @param {number} step */
function labelLarge(tick, size, step) {
  if (tick === 0) return "0";
  if (size >= 1e15) return shortenExponent(tick.toExponential(1));
  const [unit, scale] = size >= 1e12 ? ["T", 1e12] : size >= 1e9 ? ["G", 1e9] : size >= 1e6 ? ["M", 1e6] : ["k", 1e3];
  const digits = Math.max(0, -Math.floor(Math.log10(step / Number(scale)) + 1e-9));
  return `${(tick / Number(scale)).toFixed(Math.min(digits, 6))}${unit}`;
}

/** Powers of ten as 1e-4, what lies between as it is. @param {number} tick */
export function labelDecade(tick) {
  if (tick >= 0.01 && tick < 10_000) return String(Number(tick.toPrecision(3)));
  return shortenExponent(tick.toExponential(Number.isInteger(Math.log10(tick)) ? 0 : 1));
}

/** Local times; days stand beside the first tick of each. @param {number[]} ticks seconds since 1970 */
export function labelTimes(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  let day = "";
  return ticks.map((tick) => {
    const at = new Date(tick * SECOND_MS);
    const date = at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    if (step >= DAY_S) return step >= DAY_S * 300 ? String(at.getFullYear()) : date;
    const clock = at.toLocaleTimeString("en-GB", {
      hour: "2-digit", minute: "2-digit", ...(step < MINUTE_S ? { second: "2-digit" } : {}),
    });
    const isNew = date !== day;
    day = date;
    return isNew ? `${clock}\n${date}` : clock;
  });
}

/** Durations such as 90 s, 1:30 h or 3 d. @param {number[]} ticks seconds */
export function labelDurations(ticks) {
  const most = Math.max(0, ...ticks.map(Math.abs));
  if (most < 2 * MINUTE_S) return labelTicks(ticks).map((text) => `${text} s`);
  if (most < 2 * HOUR_S) return ticks.map((tick) => `${Number((tick / MINUTE_S).toFixed(1))} min`);
  if (most < 3 * DAY_S) return ticks.map((tick) => `${Number((tick / HOUR_S).toFixed(1))} h`);
  return ticks.map((tick) => `${Number((tick / DAY_S).toFixed(1))} d`);
}

/** @param {string} text */
function shortenExponent(text) {
  return text.replace("e+", "e");
}

/** @param {number} value @param {number} step */
function roundTo(value, step) {
  const digits = Math.max(0, Math.min(20, 1 - Math.floor(Math.log10(step))));
  return digits > 15 ? value : Number(value.toFixed(digits));
}
