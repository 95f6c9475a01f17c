// @ts-check
/** A grid of layers over steps: what each cell says, which rows are shown, and what becomes of a pixel. */

import { findAt } from "./lines.js";

/** @typedef {import("../data/pack.js").Pack} Pack */
/** @typedef {{ name: string, type?: string, module?: string }} GridRow */
/**
 * Cells row after row; what is missing is NaN.
 * @typedef {object} Grid
 * @property {GridRow[]} rows in the model's order
 * @property {Float64Array} step first step of each bin
 * @property {number} last step
 * @property {Float32Array} cells
 * @property {Uint8Array} bad 1 where a value of the cell was not finite
 * @property {Float32Array} base each row's own beginning
 * @property {{ row: number, step: number, finding: string }[]} marks
 * @property {boolean} exact whether each bin is one step
 * @property {number} rowCount how many rows there are in all
 */
/** @typedef {{ name: string, rows: number[], group: string, isGroup: boolean }} ShownRow */
/** @typedef {"relative" | "absolute"} Mode */
/** @typedef {{ low: number, high: number, isLog: boolean }} ColourScale in decades with `isLog` */

// No change, but for what all figures do, is white: a scale of less than a decade would colour noise.
const LEAST_DECADES = 1;
const MOST_DECADES = 6;
const SLACK_DECADES = 0.1;
const MOST_SHARE = 0.999;
const LOG_RATIO = 100;
const SHADES = 256;
const APART = 1000;
const SAMPLE = 60_000;

/** @param {Pack} pack @returns {Grid} */
export function readGrid({ head, columns }) {
  const step = /** @type {Float64Array} */ (columns.get("step") ?? new Float64Array(0));
  const rows = head.rows ?? [];
  return {
    rows, step, last: head.steps?.[1] ?? step.at(-1) ?? 0,
    cells: /** @type {Float32Array} */ (columns.get("cells") ?? new Float32Array(0)),
    bad: /** @type {Uint8Array} */ (columns.get("bad") ?? new Uint8Array(rows.length * step.length)),
    base: /** @type {Float32Array} */ (columns.get("base") ?? new Float32Array(rows.length).fill(NaN)),
    marks: head.marks ?? [], exact: head.exact ?? true, rowCount: head.row_count ?? rows.length,
  };
}

/**
 * A grid with all of these rows: those that it lacks have no value (a parameter that no step has updated).
 * @param {Grid} grid @param {GridRow[]} rows in the model's order @returns {Grid} the same one where it lacks none
 */
export function fillRows(grid, rows) {
  const places = new Map(grid.rows.map(({ name }, at) => [name, at]));
  const added = rows.filter(({ name }) => !places.has(name)).length;
  if (added === 0 || rows.length !== grid.rows.length + added) return grid;
  const bins = grid.step.length;
  const filled = {
    ...grid, rows, rowCount: Math.max(rows.length, grid.rowCount), base: new Float32Array(rows.length).fill(NaN),
    cells: new Float32Array(rows.length * bins).fill(NaN), bad: new Uint8Array(rows.length * bins),
    marks: grid.marks.map((mark) => ({ ...mark, row: rows.findIndex(({ name }) => name === grid.rows[mark.row]?.name) })),
  };
  rows.forEach(({ name }, row) => {
    const at = places.get(name);
    if (at === undefined) return;
    filled.cells.set(grid.cells.subarray(at * bins, (at + 1) * bins), row * bins);
    filled.bad.set(grid.bad.subarray(at * bins, (at + 1) * bins), row * bins);
    filled.base[row] = grid.base[at];
  });
  return filled;
}

/** Rows that have no figure at any step, such as the dead units of a layer that cannot have any. @param {Grid} grid @returns {Set<number>} */
export function findEmpty({ rows, step, cells, bad }) {
  /** @type {Set<number>} */
  const empty = new Set();
  for (let row = 0; row < rows.length; row++) {
    let at = row * step.length;
    const end = at + step.length;
    while (at < end && cells[at] !== cells[at] && !bad[at]) at++;
    if (at === end) empty.add(row);
  }
  return empty;
}

/** The block that a layer is of: its name up to the first number, else its first part. @param {string} name */
export function nameGroup(name) {
  const parts = name.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  if (number >= 0 && number < parts.length - 1) return parts.slice(0, number + 1).join(".");
  return parts.length > 1 ? parts[0] : "";
}

/** Rows as they are shown: found by name, and those of a folded block as one. @param {GridRow[]} rows @param {Set<string>} folded @param {string} [find] @param {Set<number>} [hidden] @returns {ShownRow[]} */
export function listShown(rows, folded, find = "", hidden = new Set()) {
  const text = find.toLowerCase();
  /** @type {ShownRow[]} */
  const shown = [];
  rows.forEach(({ name }, row) => {
    if (hidden.has(row) || (text && !name.toLowerCase().includes(text))) return;
    const group = nameGroup(name);
    const before = shown.at(-1);
    if (group && folded.has(group)) {
      if (before?.isGroup && before.group === group) before.rows.push(row);
      else shown.push({ name: group, rows: [row], group, isGroup: true });
    } else shown.push({ name, rows: [row], group, isGroup: false });
  });
  return shown;
}

/** Names of all blocks of more than one row, in order. @param {GridRow[]} rows */
export function listGroups(rows) {
  const counts = new Map();
  for (const { name } of rows) counts.set(nameGroup(name), (counts.get(nameGroup(name)) ?? 0) + 1);
  return [...counts].filter(([name, count]) => name && count > 1).map(([name]) => /** @type {string} */ (name));
}

/**
 * What each cell is coloured by: decades of change against the row's beginning, or the figure itself.
 * From nothing to something and back are as far as a scale goes.
 * @param {Grid} grid @param {Mode} mode
 */
export function measureCells({ cells, base, step }, mode) {
  if (mode === "absolute") return cells;
  const values = new Float32Array(cells.length);
  const bins = step.length;
  for (let row = 0; row < base.length; row++) {
    const start = Math.abs(base[row]);
    const shift = Math.log10(start);
    for (let i = row * bins; i < (row + 1) * bins; i++) {
      const value = Math.abs(cells[i]);
      if (Number.isNaN(value) || Number.isNaN(start)) values[i] = NaN;
      else if (start === 0) values[i] = value === 0 ? 0 : Infinity;
      else values[i] = Math.log10(value) - shift;
    }
  }
  return values;
}

/**
 * Which colours tell more: how rows change, or, where they hardly do and are of different sizes from the first
 * step on, their figures (a gradient that vanishes on its way down is small from the beginning).
 * @param {Grid} grid @returns {Mode}
 */
export function suggestMode(grid) {
  let least = Infinity;
  let most = 0;
  for (const value of grid.base) {
    const size = Math.abs(value);
    if (!(size > 0)) continue;
    least = Math.min(least, size);
    most = Math.max(most, size);
  }
  if (!(most / least > APART)) return "relative";
  return chooseScale(measureCells(grid, "relative"), "relative").high > LEAST_DECADES ? "relative" : "absolute";
}

/** The scale that shows nearly all: the same to both sides of no change, or from least to most. @param {Float32Array} values @param {Mode} mode @param {boolean} [isShare] from 0 to 1 @returns {ColourScale} */
export function chooseScale(values, mode, isShare = false) {
  // A sample tells where nearly all lie, as long as no row or column is always left out.
  const every = Math.max(1, Math.floor(values.length / SAMPLE)) | 1;
  const kept = new Float32Array(Math.ceil(values.length / every));
  let count = 0;
  for (let i = 0; i < values.length; i += every) {
    const value = mode === "relative" ? Math.abs(values[i]) : values[i];
    if (Number.isFinite(value)) kept[count++] = value;
  }
  const sorted = kept.subarray(0, count).sort();
  if (count === 0) return { low: 0, high: 1, isLog: false };
  const high = sorted[Math.round((count - 1) * MOST_SHARE)];
  if (mode === "relative") {
    const decades = Math.min(MOST_DECADES, Math.max(LEAST_DECADES, Math.ceil(high - SLACK_DECADES)));
    return { low: -decades, high: decades, isLog: true };
  }
  const positive = sorted.find((value) => value > 0) ?? 0;
  if (isShare) return { low: 0, high: Math.max(1, high), isLog: false };
  const isLog = sorted[0] >= 0 && positive > 0 && high / positive > LOG_RATIO;
  if (isLog) return { low: Math.floor(Math.log10(Math.max(positive, high / 1e8))), high: Math.ceil(Math.log10(high)), isLog };
  return { low: Math.min(0, sorted[0]), high: high > sorted[0] ? high : sorted[0] + 1, isLog: false };
}

/** Bins that each pixel of a width shows, as first and last; -1 where there is none. @param {Grid} grid @param {[number, number]} window @param {number} width */
export function mapColumns({ step, last }, [low, high], width) {
  const first = new Int32Array(width).fill(-1);
  const final = new Int32Array(width).fill(-1);
  const bins = step.length;
  // The last bin is as wide as those before it are.
  const end = bins > 1 ? Math.max(last, step[bins - 1]) + (step[bins - 1] - step[0]) / (bins - 1) : Infinity;
  for (let x = 0; x < width && bins > 0; x++) {
    const left = low + (x / width) * (high - low);
    const right = low + ((x + 1) / width) * (high - low);
    if (right <= step[0] || left >= end) continue;
    first[x] = Math.max(0, findAt(step, left));
    // A bin that begins where the pixel ends is of the next one.
    final[x] = Math.max(first[x], findAt(step, right - (right - left) * 1e-6));
  }
  return { first, final };
}

/**
 * Pixels of a map. Of all cells of a pixel the one furthest from no change is seen (the greatest, in
 * absolute figures), and what is not finite before all else: nothing is lost in white.
 * @param {Grid} grid @param {Float32Array} values @param {ShownRow[]} shown
 * @param {{ width: number, height: number, window: [number, number], mode: Mode, scale: ColourScale,
 *   palette: Uint32Array, bad: number, none: number }} look
 * @returns {Uint32Array} height x width
 */
export function shadePixels(grid, values, shown, { width, height, window, mode, scale, palette, bad, none }) {
  const { first, final } = mapColumns(grid, window, width);
  const pixels = new Uint32Array(width * height).fill(none);
  const isRelative = mode === "relative";
  const steps = (SHADES - 1) / (scale.high - scale.low);
  const line = { best: new Float32Array(grid.step.length), isBad: new Uint8Array(grid.step.length) };
  /** @type {[number, number]} */
  const bins = [first.find((bin) => bin >= 0) ?? 0, final.reduce((last, bin) => Math.max(last, bin), -1)];
  for (let y = 0; y < height; y++) {
    const from = Math.floor((y * shown.length) / height);
    const to = Math.max(from + 1, Math.ceil(((y + 1) * shown.length) / height));
    mergeRows(grid, values, shown.slice(from, to), bins, isRelative, line);
    for (let x = 0; x < width; x++) {
      if (first[x] < 0) continue;
      const value = mergeBins(line, first[x], final[x], isRelative);
      const place = y * width + x;
      if (hasBad(line.isBad, first[x], final[x])) pixels[place] = bad;
      else if (value === value) {
        const placed = scale.isLog && !isRelative ? Math.log10(value) : value;
        pixels[place] = palette[Math.max(0, Math.min(SHADES - 1, Math.round((placed - scale.low) * steps)))];
      }
    }
  }
  return pixels;
}

/**
 * The furthest of several rows, bin by bin, and whether any of them is not finite.
 * @param {Grid} grid @param {Float32Array} values @param {ShownRow[]} shown @param {[number, number]} bins first and last
 * @param {boolean} isRelative @param {{ best: Float32Array, isBad: Uint8Array }} line is written to
 */
function mergeRows(grid, values, shown, [firstBin, lastBin], isRelative, { best, isBad }) {
  best.fill(NaN);
  isBad.fill(0);
  for (const { rows } of shown) {
    for (const row of rows) {
      const start = row * grid.step.length;
      for (let bin = firstBin; bin <= lastBin; bin++) {
        isBad[bin] |= grid.bad[start + bin];
        const value = values[start + bin];
        const before = best[bin];
        if (before !== before || (isRelative ? Math.abs(value) > Math.abs(before) : value > before)) best[bin] = value;
      }
    }
  }
}

/** @param {{ best: Float32Array }} line @param {number} first @param {number} last @param {boolean} isRelative */
function mergeBins({ best }, first, last, isRelative) {
  let value = best[first];
  for (let bin = first + 1; bin <= last; bin++) {
    const other = best[bin];
    if (value !== value || (isRelative ? Math.abs(other) > Math.abs(value) : other > value)) value = other;
  }
  return value;
}

/** @param {Uint8Array} isBad @param {number} first @param {number} last */
function hasBad(isBad, first, last) {
  for (let bin = first; bin <= last; bin++) if (isBad[bin]) return true;
  return false;
}

/** The furthest that a row goes: its value, its step, and how many cells are not finite. @param {Grid} grid @param {Float32Array} values @param {number} row @param {Mode} mode */
export function findFurthest(grid, values, row, mode) {
  const bins = grid.step.length;
  let best = -1;
  let badCount = 0;
  let badStep = null;
  for (let bin = 0; bin < bins; bin++) {
    const at = row * bins + bin;
    if (grid.bad[at]) {
      badCount++;
      badStep ??= grid.step[bin];
    }
    if (Number.isNaN(values[at])) continue;
    const isFurther = best < 0 || (mode === "relative"
      ? Math.abs(values[at]) > Math.abs(values[row * bins + best]) : values[at] > values[row * bins + best]);
    if (isFurther) best = bin;
  }
  return { value: best < 0 ? NaN : grid.cells[row * bins + best], change: best < 0 ? NaN : values[row * bins + best],
    step: best < 0 ? null : grid.step[best], bad: badCount, badStep };
}
