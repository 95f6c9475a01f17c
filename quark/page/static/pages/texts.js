// @ts-check
/** How figures, times and states are written; nothing here knows of a page. */

const THOUSAND = 1e3;
const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86400;
const SIZES = ["B", "kB", "MB", "GB", "TB"];
const UNITS = /** @type {const} */ ([["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]);

/** Health and severity: a glyph and a word, so that colour is never alone. */
export const GLYPHS = new Map([
  ["healthy", "●"], ["watch", "▲"], ["degraded", "◆"], ["critical", "■"], ["unknown", "○"],
  ["info", "i"], ["warning", "▲"], ["error", "◆"],
  ["running", "▶"], ["completed", "✓"], ["failed", "✗"], ["interrupted", "‖"], ["lost", "?"],
  ["waiting", "○"], ["suspended", "‖"], ["pruned", "✂"], ["broken", "✗"], ["cancelled", "⊘"], ["paused", "‖"], ["done", "✓"],
]);

// They turn what is read around, or hide: `spell` shows them. As quark_core/system/terminal_text.py.
const UNSEEN = /[\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;

/** A text of somebody else with what steers the reading of it spelled out. @template T @param {T} text @returns {T} */
export function spell(text) {
  if (typeof text !== "string") return text;
  return /** @type {any} */ (text.replace(UNSEEN, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`));
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

// Made by who needs it first: what knows the customs of countries costs as much as a screen of rows.
/** @type {Intl.Collator | null} */
let byName = null;

/** Names as people count them: m2 before m10. @param {string} a @param {string} b */
export function compareNames(a, b) {
  byName ??= new Intl.Collator("en", { numeric: true });
  return byName.compare(a, b) || (a < b ? -1 : a > b ? 1 : 0);
}

/** A figure in five digits, such as 0.28131, 2.590e+6 or NaN. @param {unknown} value */
export function writeNumber(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size < 1e5 ? 5 : 6)));
}

/** A count, such as 41.2k. @param {number | null | undefined} value */
export function writeCount(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, size] of UNITS) {
    if (value >= size) {
      const share = value / size;
      return `${share >= 100 ? Math.round(share) : Number(share.toPrecision(3))}${unit}`;
    }
  }
  return String(Math.round(value));
}

/** All digits, parted by commas, such as 31,000. @param {number | null | undefined} value */
export function writeStep(value) {
  if (value === null || value === undefined) return "";
  if (!Number.isSafeInteger(value)) return value.toLocaleString("en");
  const digits = String(value);
  return value > -THOUSAND && value < THOUSAND ? digits : digits.replace(/\B(?=(?:\d{3})+$)/g, ",");
}

/** About how long, in one unit, as `format_span`. @param {number | null | undefined} seconds */
export function writeDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  const whole = Math.max(0, seconds);
  if (whole < 10) return `${whole.toFixed(1)} s`;
  if (whole < MINUTE_S * 2) return `${Math.round(whole)} s`;
  if (whole < HOUR_S * 2) return `${Math.round(whole / MINUTE_S)} min`;
  const [size, unit] = whole < DAY_S * 2 ? [HOUR_S, "h"] : [DAY_S, "d"];
  return `${Number((whole / size).toFixed(1))} ${unit}`;
}

/** How long ago, or its date. @param {string | null | undefined} time ISO 8601 @param {number} [now_ms] */
export function writeAge(time, now_ms = Date.now()) {
  const age_s = (now_ms - (time ? Date.parse(time) : NaN)) / THOUSAND;
  if (!time || Number.isNaN(age_s)) return "";
  if (age_s < MINUTE_S) return "just now";
  if (age_s >= DAY_S) return time.slice(0, "2026-11-30".length);
  return age_s < HOUR_S ? `${Math.floor(age_s / MINUTE_S)} min ago` : `${Math.floor(age_s / HOUR_S)} h ago`;
}

/** A measured time in the unit that suits it. @param {number | null} seconds */
export function writeSeconds(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "-";
  if (seconds >= THOUSAND) return `${writeStep(Math.round(seconds))} s`;
  const [size, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${Number((seconds / size).toPrecision(3))} ${unit}`;
}

/** Local time with its zone. @param {string | null | undefined} time ISO 8601 */
export function writeTime(time) {
  const then = time ? Date.parse(time) : NaN;
  if (Number.isNaN(then)) return "";
  const at = new Date(then);
  const clock = [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0"));
  const ahead_min = -at.getTimezoneOffset();
  const [hours, minutes] = [Math.floor(Math.abs(ahead_min) / 60), Math.abs(ahead_min) % 60];
  const zone = ahead_min ? `${ahead_min > 0 ? "+" : "−"}${hours}${minutes ? `:${String(minutes).padStart(2, "0")}` : ""}` : "";
  return `${at.getDate()} ${MONTHS[at.getMonth()]} ${at.getFullYear()}, ${clock.join(":")} UTC${zone}`;
}

/** A size such as 512 B or 1.2 kB, of 1000 bytes. @param {number | null | undefined} bytes */
export function writeBytes(bytes) {
  if (bytes === null || bytes === undefined) return "";
  let [value, place] = [bytes, 0];
  // What would be shown as 1000.0 is one of the next unit.
  for (; Math.abs(value) >= 999.95 && place < SIZES.length - 1; place += 1) value /= THOUSAND;
  return `${place ? value.toFixed(1) : value} ${SIZES[place]}`;
}

/** @param {number} count @param {string} noun @param {string} [plural] */
export function writeMany(count, noun, plural = `${noun}s`) {
  return `${writeStep(count)} ${count === 1 ? noun : plural}`;
}

/** A JSON value as one line; texts without quotes. @param {unknown} value */
export function writeValue(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return writeNumber(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A name as the search language writes it, in backticks where it must. @param {string} name */
export function quoteName(name) {
  if (name.length > 2 && name.startsWith("`") && name.endsWith("`")) return name;
  const words = new Set(["and", "or", "not", "in", "true", "false", "null", "None"]);
  const isPlain = /^[\p{L}_][\p{L}\p{N}_./@:#%$~^+-]*$/u.test(name) && !words.has(name);
  return isPlain ? name : `\`${name}\``;
}

/**
 * A text cut at its https links, in order; every other scheme stays text.
 * @param {string} text
 * @returns {{ text: string, isLink: boolean }[]}
 */
export function findLinks(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(/https:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}]/g)) {
    if (match.index > end) parts.push({ text: text.slice(end, match.index), isLink: false });
    parts.push({ text: match[0], isLink: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push({ text: text.slice(end), isLink: false });
  return parts;
}
