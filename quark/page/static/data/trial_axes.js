// @ts-check
/** What trials of a sweep have in common: columns, the axes they stand on, and which of them fit. */

import { labelDecade, labelTicks, placeDecades, placeTicks } from "./ticks.js";

/**
 * @typedef {{ number: number, state: string, values: unknown[] | null, parameters: unknown[] } & Record<string, any>} Trial
 * @typedef {{ id: string, title: string, kind: "parameter" | "metric" | "other", at: number, mode?: string, range?: any }} Column
 * @typedef {{ column: Column, names: string[] | null, low: number, high: number, isLog: boolean, below: number, above: number,
 *   ticks: { at: number, text: string }[], place: (value: unknown) => number | null, read: (at: number) => unknown }} Axis
 * @typedef {{ id: string, low: unknown, high: unknown }} Brush
 */

// What is this far apart was chosen, or has come, by factors.
const LOG_FROM = 20;
const MOST_TICKS = 6;
const MOST_NAMES = 24;
// Of a metric, what lies so many times further out than most do stands at the edge.
const FAR = 6;
const SLACK = 1e-9;

/** Rows as they are sent, as objects. @param {string[]} fields @param {any[]} rows @returns {Trial[]} */
export function readTrials(fields, rows) {
  return rows.map((row) => /** @type {any} */ (Object.fromEntries(fields.map((field, at) => [field, row[at]]))));
}

/** The columns of a sweep: what is varied, what is measured, and how far a trial may go. @param {any} data @param {Trial[]} trials @returns {Column[]} */
export function listColumns(data, trials) {
  const has = (/** @type {string} */ name) => trials.some((trial) => trial[name] !== null && trial[name] !== undefined);
  return [
    ...data.names.map((/** @type {string} */ name, /** @type {number} */ at) => (
      { id: `p:${name}`, title: name, kind: "parameter", at, range: Object.hasOwn(data.sweep.space, name) ? data.sweep.space[name] : null })),
    ...["budget", "rung"].filter(has).slice(0, 1).map((name) => ({ id: name, title: name, kind: "other", at: 0 })),
    ...data.sweep.metrics.map((/** @type {any} */ metric, /** @type {number} */ at) => (
      { id: `m:${metric.name}`, title: metric.name, kind: "metric", at, mode: metric.mode })),
  ];
}

/** What a trial has in a column; null where it has nothing. @param {Trial} trial @param {Column} column */
export function readCell(trial, column) {
  if (column.kind === "parameter") return trial.parameters[column.at] ?? null;
  return (column.kind === "metric" ? trial.values?.[column.at] : trial[column.id]) ?? null;
}

/** @param {unknown} value */
function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A value as an axis names it. @param {unknown} value */
export function nameValue(value) {
  return typeof value === "string" ? value : value === null ? "" : JSON.stringify(value);
}

/**
 * The axis of a column: numbers from low to high, anything else by its names.
 * @param {Column} column @param {Trial[]} trials @returns {Axis}
 */
export function makeAxis(column, trials) {
  const known = trials.map((trial) => readCell(trial, column)).filter((value) => value !== null);
  const numbers = known.filter(isNumber).map(Number);
  // A metric that is not finite comes as a text, and is no name.
  const isNumeric = column.kind !== "parameter" || (numbers.length === known.length && column.range?.type !== "choices");
  return isNumeric ? makeNumeric(column, numbers) : makeNamed(column, known);
}

/** @param {Column} column @param {unknown[]} known @returns {Axis} */
function makeNamed(column, known) {
  const byName = new Map(known.map((value) => [nameValue(value), value]));
  const areNumbers = known.every(isNumber);
  const names = [...byName.keys()].sort((a, b) => areNumbers ? Number(a) - Number(b) : a < b ? -1 : a > b ? 1 : 0);
  const places = new Map(names.map((name, at) => [name, names.length > 1 ? at / (names.length - 1) : 0.5]));
  const every = Math.ceil(names.length / MOST_NAMES) || 1;
  return {
    column, names, low: 0, high: 1, isLog: false, below: 0, above: 0,
    ticks: names.filter((_, at) => at % every === 0).map((name) => ({ at: Number(places.get(name)), text: name })),
    place: (value) => value === null || value === undefined ? null : places.get(nameValue(value)) ?? null,
    read: (at) => names[Math.max(0, Math.min(names.length - 1, Math.round(at * (names.length - 1))))],
  };
}

/** @param {Column} column @param {number[]} numbers @returns {Axis} */
function makeNumeric(column, numbers) {
  const { range } = column;
  let [low, high] = findBounds(column, numbers);
  if (isNumber(range?.low) && isNumber(range?.high)) [low, high] = [Math.min(low, range.low), Math.max(high, range.high)];
  if (!(low < high)) [low, high] = Number.isFinite(low) ? [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1] : [0, 1];
  const areWhole = range?.type === "integers";
  const isLog = low > 0 && (range ? range.log === true : high / low >= LOG_FROM);
  /** @param {number} value */
  const scale = (value) => isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
  const places = isLog ? placeDecades(low, high, MOST_TICKS) : placeTicks(low, high, MOST_TICKS, areWhole ? 1 : 0);
  const texts = isLog ? places.map(labelDecade) : labelTicks(places);
  return {
    column, names: null, low, high, isLog,
    below: numbers.filter((value) => value < low).length,
    above: numbers.filter((value) => value > high).length,
    ticks: places.map((value, at) => ({ at: scale(value), text: texts[at] })),
    place: (value) => !isNumber(value) ? null
      : Number(value) <= low ? 0 : Number(value) >= high ? 1 : scale(Number(value)),
    read: (at) => isLog ? low * (high / low) ** at : low + (high - low) * at,
  };
}

/**
 * From where to where an axis goes: of a metric as far as most trials lie, so that one that has
 * diverged does not press all others into a line.
 * @param {Column} column @param {number[]} numbers @returns {[number, number]}
 */
function findBounds(column, numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  let [low, high] = [sorted[0] ?? Infinity, sorted[sorted.length - 1] ?? -Infinity];
  if (column.kind !== "metric" || sorted.length < 8) return [low, high];
  const at = (/** @type {number} */ share) => sorted[Math.round(share * (sorted.length - 1))];
  const reach = FAR * (at(0.75) - at(0.25));
  // What is best is never at the edge for being far.
  if (column.mode === "min" && at(0.75) + reach < high) high = Math.max(...sorted.filter((value) => value <= at(0.75) + reach));
  if (column.mode === "max" && at(0.25) - reach > low) low = Math.min(...sorted.filter((value) => value >= at(0.25) - reach));
  return [low, high];
}

/** The brushes that an address names; what is no brush is let go. @param {string[]} texts @returns {Brush[]} */
export function readBrushes(texts) {
  return texts.flatMap((text) => {
    try {
      const [id, low, high] = JSON.parse(text);
      return typeof id === "string" && low !== undefined && high !== undefined ? [{ id, low, high }] : [];
    } catch {
      return [];
    }
  });
}

/** @param {Brush} brush */
export function writeBrush({ id, low, high }) {
  return JSON.stringify([id, shorten(low), shorten(high)]);
}

/** @param {unknown} value */
function shorten(value) {
  return typeof value === "number" ? Number(value.toPrecision(6)) : value;
}

/** From where to where a brush goes on its axis, or null where it fits none of its values. @param {Axis} axis @param {Brush} brush */
export function placeBrush(axis, brush) {
  const [low, high] = [axis.place(brush.low), axis.place(brush.high)];
  return low === null || high === null ? null : { low: Math.min(low, high), high: Math.max(low, high) };
}

/** The trials that fit all brushes. @param {Trial[]} trials @param {Axis[]} axes @param {Brush[]} brushes */
export function brushTrials(trials, axes, brushes) {
  const tests = brushes.flatMap((brush) => {
    const axis = axes.find((each) => each.column.id === brush.id);
    const range = axis && placeBrush(axis, brush);
    return range ? [{ axis, ...range }] : [];
  });
  if (!tests.length) return trials;
  return trials.filter((trial) => tests.every(({ axis, low, high }) => {
    const at = axis.place(readCell(trial, axis.column));
    return at !== null && at >= low - SLACK && at <= high + SLACK;
  }));
}

/** How good each trial is by a metric's axis, from 0 to 1; null without a value. @param {Axis} axis @param {Trial} trial */
export function rateTrial(axis, trial) {
  const at = axis.place(readCell(trial, axis.column));
  return at === null ? null : axis.column.mode === "max" ? at : 1 - at;
}

/** Trials sorted by a column; what has no value stands last, either way. @param {Trial[]} trials @param {Column | null} column @param {boolean} isFalling */
export function sortTrials(trials, column, isFalling) {
  /** @param {Trial} trial */
  const read = (trial) => column ? readCell(trial, column) : trial.number;
  const sign = isFalling ? -1 : 1;
  return [...trials].sort((a, b) => {
    const [x, y] = [read(a), read(b)];
    if (isNumber(x) && isNumber(y)) return sign * (Number(x) - Number(y)) || a.number - b.number;
    if (isNumber(x) !== isNumber(y)) return isNumber(x) ? -1 : 1;
    if (x === null || y === null) return x === y ? a.number - b.number : x === null ? 1 : -1;
    const [one, two] = [nameValue(x), nameValue(y)];
    return sign * (one < two ? -1 : one > two ? 1 : 0) || a.number - b.number;
  });
}

/**
 * The best value so far, each time that a trial has ended with one.
 * @param {Trial[]} trials @param {Column} column a metric
 * @returns {{ trial: Trial, value: number, best: number, isBest: boolean, isWhole: boolean }[]} in the order in which they ended
 */
export function followBest(trials, column) {
  const ended = trials.filter((trial) => trial.settled_at && isNumber(readCell(trial, column)) && trial.state !== "failed" && trial.state !== "broken");
  ended.sort((a, b) => a.settled_at < b.settled_at ? -1 : a.settled_at > b.settled_at ? 1 : a.number - b.number);
  // What had less to run with is worse or better only because of that.
  const most = ended.reduce((found, trial) => Math.max(found, trial.state === "completed" ? trial.budget ?? -1 : -1), -1);
  let best = NaN;
  return ended.map((trial) => {
    const value = Number(readCell(trial, column));
    const isKept = (trial.constraints ?? []).every((/** @type {any} */ each) => Number(each) <= 0);
    const isWhole = trial.state === "completed" && isKept && (trial.budget === null || trial.budget >= most);
    const isBest = isWhole && (Number.isNaN(best) || (column.mode === "max" ? value > best : value < best));
    if (isBest) best = value;
    return { trial, value, best, isBest, isWhole };
  });
}
