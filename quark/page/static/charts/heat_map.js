// @ts-check
/** One statistic of all layers over steps, on a canvas, with rows that fold and cells that can be asked. */

import { BAD, listDiverging, listSequential, packColour } from "../data/colours.js";
import { labelDecade, labelTicks, placeTicks } from "../data/ticks.js";
import { spell, writeNumber, writeStep } from "../pages/texts.js";
import { fillTable, makeElement } from "./data_table.js";
import { chooseScale, findEmpty, findFurthest, listShown, measureCells, shadePixels } from "./heat_cells.js";
import { findAt } from "./lines.js";
import { registerChart } from "./registry.js";
import { FONT, INKS } from "./inks.js";
import { readTheme, watchTheme } from "./theme.js";

/** @typedef {import("./heat_cells.js").Grid} Grid */
/** @typedef {import("./heat_cells.js").Mode} Mode */
/** @typedef {import("./heat_cells.js").ShownRow} ShownRow */
/**
 * @typedef {object} HeatMapProps
 * @property {string} title
 * @property {Grid} grid
 * @property {Mode} mode
 * @property {boolean} [isShare] its scale is from 0 to 1
 * @property {boolean} [hidesEmpty] rows without any figure are left out
 * @property {Set<string>} [folded] names of blocks
 * @property {string} [find] rows whose name holds this
 * @property {[number, number] | null} [window] steps; null is the whole
 * @property {[number, number]} whole
 * @property {string} [chosen] name of the row that is open below
 * @property {(low: number | null, high: number | null) => void} [onZoom]
 * @property {(row: import("./heat_cells.js").GridRow, step: number) => void} [onPick]
 * @property {(group: string) => void} [onFold]
 * @property {(step: number | null) => void} [onPoint]
 */

const ROW_PX = 15;
// A small model has higher rows, up to this.
const HIGH_ROW_PX = 26;
const SMALL_PX = 150;
const LABEL_PX = 11;
const NEAR_PX = 0.5;
const MOST_PX = 460;
const LEAST_MOST_PX = 220;
// Three maps are seen together, more or less.
const WINDOW_SHARE = 0.34;
const AXIS_PX = 24;
const MARGIN_RIGHT = 12;
const FOLD_PX = 16;
const TICK_PX = 90;
const DRAG_PX = 4;
const MARK_PX = 4;
const BAD_PX = 4;
const MOST_EDGES = 5000;
const NONE = { light: "#d4d8de", dark: "#2c323a" };
const TABLE_ROWS = 200;

export class HeatMap {
  /** @param {HTMLElement} host @param {HeatMapProps} props */
  constructor(host, props) {
    this.host = host;
    this.props = props;
    /** @type {ShownRow[]} */
    this.shown = [];
    /** @type {{ row: number, bin: number } | null} */
    this.cell = null;
    this.isTable = false;
    this.told = "";
    /** @type {Set<number>} */
    this.empty = new Set();
    this.hasNone = false;
    this.drawnWidth = 0;
    /** @type {{ key: string, pixels: Uint32Array }} */
    this.shaded = { key: "", pixels: new Uint32Array(0) };
    /** @type {Float32Array} */
    this.values = new Float32Array(0);
    this.scale = { low: 0, high: 1, isLog: false };
    this.measured = /** @type {unknown[]} */ ([]);
    this.parts = this.build();
    this.watcher = new ResizeObserver(() => {
      if (this.drawnWidth !== this.parts.body.clientWidth) this.refresh();
    });
    this.watcher.observe(this.parts.body);
    this.unwatch = watchTheme(() => this.refresh());
    this.unregister = registerChart(this);
    this.listen();
    this.refresh();
  }

  build() {
    const figure = makeElement("figure", "", "map");
    const head = makeElement("figcaption", "", "map-head");
    const title = makeElement("h2", "", "map-title");
    const said = makeElement("span", "", "map-said");
    const legend = makeElement("span", "", "map-legend");
    const tools = makeElement("span", "", "map-tools");
    const table = makeElement("button", "as table", "chart-tool");
    table.setAttribute("type", "button");
    const readout = makeElement("span", "", "map-readout");
    const body = makeElement("div", "", "map-body");
    const canvas = document.createElement("canvas");
    const rows = makeElement("div");
    rows.setAttribute("aria-hidden", "true");
    const area = makeElement("div", "", "map-area");
    area.tabIndex = 0;
    area.setAttribute("role", "application");
    area.setAttribute("aria-roledescription", "map of layers over steps");
    const select = makeElement("div", "", "map-select");
    const cross = makeElement("div", "", "map-cross");
    const line = makeElement("div", "", "map-line");
    const below = makeElement("div");
    select.hidden = cross.hidden = line.hidden = true;
    tools.append(table);
    head.append(title, said, legend, tools, readout);
    area.append(line, cross, select);
    body.append(canvas, rows, area);
    figure.append(head, body, below);
    this.host.replaceChildren(figure);
    return { title, said, legend, table, readout, body, canvas, rows, area, select, cross, line, below };
  }

  /** @param {Partial<HeatMapProps>} changes */
  update(changes) {
    this.props = { ...this.props, ...changes };
    this.refresh();
  }

  destroy() {
    this.watcher.disconnect();
    this.unwatch();
    this.unregister();
    this.host.replaceChildren();
  }

  get window() {
    const [low, high] = this.props.window ?? this.props.whole;
    return /** @type {[number, number]} */ (high > low ? [low, high] : [low - 0.5, low + 0.5]);
  }

  /** Where the cells are, in CSS pixels. */
  get area() {
    const width = Math.max(160, this.parts.body.clientWidth);
    const left = Math.round(Math.min(230, width * 0.28));
    const tall = Math.max(ROW_PX, Math.min(HIGH_ROW_PX, SMALL_PX / Math.max(1, this.shown.length)));
    const most = Math.max(LEAST_MOST_PX, Math.min(MOST_PX, Math.round(innerHeight * WINDOW_SHARE)));
    const height = Math.max(HIGH_ROW_PX, Math.min(most, this.shown.length * tall));
    return { left, width: width - left - MARGIN_RIGHT, height, row: height / Math.max(1, this.shown.length) };
  }

  refresh() {
    const { grid, mode, title, folded = new Set(), find = "" } = this.props;
    if (this.measured[0] !== grid || this.measured[1] !== mode) {
      this.values = measureCells(grid, mode);
      this.scale = chooseScale(this.values, mode, this.props.isShare);
      this.measured = [grid, mode];
      this.shaded.key = "";
      this.empty = this.props.hidesEmpty ? findEmpty(grid) : new Set();
      this.hasNone = grid.cells.some((value, at) => value !== value && !grid.bad[at] && !this.empty.has(Math.floor(at / grid.step.length)));
      this.told = this.tell();
    }
    this.shown = listShown(grid.rows, folded, find, this.empty);
    this.parts.title.textContent = title;
    const full = grid.rows.length - this.empty.size;
    const rows = grid.rows.length < grid.rowCount ? `${grid.rows.length} of ${grid.rowCount} rows` : `${full} ${full === 1 ? "row" : "rows"}`;
    this.parts.said.textContent = mode === "relative" ? `relative to each row's start · ${rows}` : `recorded values · ${rows}`;
    this.paint();
    this.placeRows();
    this.drawLegend();
    this.showCell(this.cell);
    this.refreshTable();
    this.parts.area.setAttribute("aria-label", `${title}: ${spell(this.told)}. Arrows walk, Enter opens a layer, Space folds its block.`);
  }

  get palette() {
    return this.props.mode === "relative" ? listDiverging(readTheme()) : listSequential();
  }

  paint() {
    const { canvas, body } = this.parts;
    const { left, width, height } = this.area;
    const scale = devicePixelRatio || 1;
    this.drawnWidth = body.clientWidth;
    body.style.height = `${height + AXIS_PX}px`;
    canvas.width = Math.round((left + width + MARGIN_RIGHT) * scale);
    canvas.height = Math.round((height + AXIS_PX) * scale);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const wide = Math.max(1, Math.round(width * scale));
    const tall = Math.max(1, Math.min(this.shown.length, Math.round(height * scale)));
    if (this.shown.length) {
      const pixels = this.shade(wide, tall);
      const image = new ImageData(wide, tall);
      new Uint32Array(image.data.buffer).set(pixels);
      const sheet = new OffscreenCanvas(wide, tall);
      /** @type {OffscreenCanvasRenderingContext2D} */ (sheet.getContext("2d")).putImageData(image, 0, 0);
      context.imageSmoothingEnabled = false;
      context.drawImage(sheet, Math.round(left * scale), 0, wide, Math.round(height * scale));
      this.paintBad(context, pixels, wide, tall, scale);
    }
    this.paintAxis(context, scale);
    this.paintMarks(context, scale);
  }

  /** The pixels of what is shown, kept until something of it changes. @param {number} width @param {number} height */
  shade(width, height) {
    const { grid, mode, folded, find } = this.props;
    const theme = readTheme();
    const key = JSON.stringify([width, height, this.window, mode, theme, find, [...folded ?? []]]);
    if (this.shaded.key !== key) {
      this.shaded = { key, pixels: shadePixels(grid, this.values, this.shown, {
        width, height, window: this.window, mode, scale: this.scale,
        palette: this.palette, bad: packColour(BAD), none: packColour(NONE[theme]),
      }) };
    }
    return this.shaded.pixels;
  }

  /**
   * What is not finite, large enough to be seen and with an edge, on whatever colour it lies.
   * @param {CanvasRenderingContext2D} context @param {Uint32Array} pixels @param {number} wide @param {number} tall @param {number} scale
   */
  paintBad(context, pixels, wide, tall, scale) {
    const bad = packColour(BAD);
    const { left, height } = this.area;
    const row = (height * scale) / tall;
    const least = BAD_PX * scale;
    /** @type {[number, number, number, number][]} */
    const places = [];
    for (let y = 0; y < tall && places.length < MOST_EDGES; y++) {
      for (let x = pixels.indexOf(bad, y * wide) - y * wide; x >= 0 && x < wide;) {
        let end = x;
        while (end < wide && pixels[y * wide + end] === bad) end++;
        const width = Math.max(least, end - x);
        const tallness = Math.max(least, row);
        places.push([left * scale + (x + end - width) / 2, (y + 0.5) * row - tallness / 2, width, tallness]);
        const next = pixels.indexOf(bad, y * wide + end);
        x = next < 0 ? -1 : next - y * wide;
      }
    }
    context.fillStyle = "#ffffff";
    for (const [x, y, width, tallness] of places) context.fillRect(x - scale, y - scale, width + 2 * scale, tallness + 2 * scale);
    context.fillStyle = BAD;
    for (const [x, y, width, tallness] of places) context.fillRect(x, y, width, tallness);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} scale */
  paintAxis(context, scale) {
    const { left, width, height } = this.area;
    const inks = INKS[readTheme()];
    const [low, high] = this.window;
    const ticks = placeTicks(low, high, Math.max(2, Math.floor(width / TICK_PX)), 1);
    const labels = labelTicks(ticks);
    context.font = `${11 * scale}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "top";
    context.fillStyle = inks.muted;
    ticks.forEach((tick, at) => {
      const x = (left + this.placeX(tick)) * scale;
      context.fillRect(x, height * scale, scale, 4 * scale);
      context.fillText(labels[at], x, (height + 6) * scale);
    });
    context.strokeStyle = inks.grid;
    context.lineWidth = scale;
    context.strokeRect(left * scale - 0.5, 0.5, width * scale + 1, height * scale);
  }

  /** Diamonds on the cells that alerts name. @param {CanvasRenderingContext2D} context @param {number} scale */
  paintMarks(context, scale) {
    const { left } = this.area;
    const inks = INKS[readTheme()];
    for (const { x, y } of this.placeMarks()) {
      const size = MARK_PX * scale;
      context.beginPath();
      context.moveTo((left + x) * scale, y * scale - size);
      context.lineTo((left + x) * scale + size, y * scale);
      context.lineTo((left + x) * scale, y * scale + size);
      context.lineTo((left + x) * scale - size, y * scale);
      context.closePath();
      context.fillStyle = inks.ground;
      context.strokeStyle = inks.ink;
      context.lineWidth = 1.5 * scale;
      context.fill();
      context.stroke();
    }
  }

  placeMarks() {
    const { row } = this.area;
    const [low, high] = this.window;
    return this.props.grid.marks.flatMap((mark) => {
      const at = this.shown.findIndex(({ rows }) => rows.includes(mark.row));
      if (at < 0 || mark.step < low || mark.step > high) return [];
      return [{ ...mark, x: this.placeX(mark.step), y: (at + 0.5) * row, name: this.shown[at].name }];
    });
  }

  /** @param {number} step in CSS pixels from the left of the cells */
  placeX(step) {
    const [low, high] = this.window;
    return ((step - low) / (high - low)) * this.area.width;
  }

  /** Names of rows, and of blocks where a row is too thin for one. */
  placeRows() {
    const { rows, area } = this.parts;
    const { left, width, height, row } = this.area;
    area.style.left = `${left}px`;
    area.style.top = "0";
    area.style.width = `${width}px`;
    area.style.height = `${height}px`;
    const marked = new Set(this.placeMarks().map((mark) => mark.name));
    const isThin = row < LABEL_PX;
    /** @type {HTMLElement[]} */
    const made = [];
    let end = 0;
    for (let at = 0; at < this.shown.length; at++) {
      const { group, isGroup, name, rows: members } = this.shown[at];
      const top = at * row;
      const size = this.countBlock(at);
      if (isGroup || size > 1) {
        if (top < end - NEAR_PX) continue;
        const text = isGroup ? `▸ ${group} (${members.length})` : isThin ? `▾ ${group}` : "▾";
        const tall = isThin ? LABEL_PX : row;
        made.push(this.makeRow(text, top, tall, 0, isThin || isGroup ? left : FOLD_PX, true,
          `${isGroup ? "unfold" : "fold"} ${group}`, () => this.props.onFold?.(group)));
        end = top + tall;
      }
      const isHidden = size > 1 || top < end - NEAR_PX || this.isNextNear(at, row);
      if (isGroup || (isThin && isHidden)) continue;
      const text = marked.has(name) ? `◆ ${name}` : name;
      made.push(this.makeRow(text, top, isThin ? LABEL_PX : row, FOLD_PX, left - FOLD_PX, false, name, () => this.pick(at, null)));
      end = top + (isThin ? LABEL_PX : row);
    }
    rows.replaceChildren(...made);
  }

  /** How many rows the block has that begins here; 0 within one. @param {number} at */
  countBlock(at) {
    const { group, isGroup } = this.shown[at];
    if (!group || isGroup) return 0;
    if (this.shown[at - 1]?.group === group) return 0;
    let size = 1;
    while (this.shown[at + size]?.group === group) size++;
    return size;
  }

  /** Whether a block begins so near below that its name needs the room. @param {number} at @param {number} row height */
  isNextNear(at, row) {
    if (this.countBlock(at) === 0 && this.shown[at].group) return true;
    for (let next = at + 1; next < this.shown.length && (next - at) * row < LABEL_PX; next++) {
      if (this.shown[next].isGroup || this.countBlock(next) > 1) return true;
    }
    return false;
  }

  /**
   * A name beside its row. It is for the pointer: keys walk over the cells, and the table has a button for each row.
   * @param {string} text @param {number} top @param {number} height @param {number} left @param {number} width
   * @param {boolean} isGroup @param {string} label @param {() => void} act
   */
  makeRow(text, top, height, left, width, isGroup, label, act) {
    const row = makeElement("div", "", "map-row");
    row.title = spell(label);
    // Where a name is cut, its end is what tells it from its neighbours.
    const inner = makeElement("span");
    const isolate = document.createElement("bdi");
    isolate.textContent = spell(text);
    inner.append(isolate);
    row.append(inner);
    row.dataset.group = String(isGroup);
    row.dataset.chosen = String(label === this.props.chosen);
    Object.assign(row.style, { top: `${top}px`, height: `${height}px`, left: `${left}px`, width: `${width}px` });
    row.addEventListener("click", act);
    return row;
  }

  drawLegend() {
    const { legend } = this.parts;
    const { low, high, isLog } = this.scale;
    const isRelative = this.props.mode === "relative";
    const bar = document.createElement("canvas");
    bar.width = 256;
    bar.height = 1;
    const image = new ImageData(256, 1);
    new Uint32Array(image.data.buffer).set(this.palette);
    bar.getContext("2d")?.putImageData(image, 0, 0);
    /** @param {number} value */
    const write = (value) => isRelative ? `×${labelDecade(10 ** value)}` : isLog ? labelDecade(10 ** value) : writeNumber(value);
    const parts = [makeElement("span", write(low)), bar, makeElement("span", write(high))];
    if (this.props.grid.bad.includes(1)) parts.push(makeElement("span", "", "map-bad"), makeElement("span", "not finite"));
    if (this.hasNone) parts.push(makeElement("span", "", "map-none"), makeElement("span", "no value"));
    legend.replaceChildren(...parts);
  }

  listen() {
    const { area, table, select } = this.parts;
    table.addEventListener("click", () => {
      this.isTable = !this.isTable;
      this.refreshTable();
    });
    let from = NaN;
    area.addEventListener("pointerdown", (event) => {
      from = event.offsetX;
      area.setPointerCapture(event.pointerId);
    });
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const x = event.clientX - box.left;
      this.point(x, event.clientY - box.top);
      const isDrag = Math.abs(x - from) > DRAG_PX;
      select.hidden = !isDrag;
      if (isDrag) Object.assign(select.style, { left: `${Math.min(x, from)}px`, width: `${Math.abs(x - from)}px` });
    });
    area.addEventListener("pointerup", (event) => {
      const box = area.getBoundingClientRect();
      const x = event.clientX - box.left;
      const start = from;
      from = NaN;
      select.hidden = true;
      if (Math.abs(x - start) > DRAG_PX) this.props.onZoom?.(...this.readRange(start, x));
      else if (this.cell) this.pick(this.cell.row, this.props.grid.step[this.cell.bin] ?? null);
    });
    area.addEventListener("pointercancel", () => {
      from = NaN;
      select.hidden = true;
    });
    area.addEventListener("pointerleave", () => this.showCell(null));
    area.addEventListener("dblclick", () => this.props.onZoom?.(null, null));
    area.addEventListener("keydown", (event) => this.walk(event));
  }

  /** @param {number} a @param {number} b @returns {[number, number]} */
  readRange(a, b) {
    const [low, high] = this.window;
    const { width } = this.area;
    const places = [a, b].map((x) => low + (Math.max(0, Math.min(width, x)) / width) * (high - low));
    return [Math.min(...places), Math.max(...places)];
  }

  /** @param {number} x @param {number} y */
  point(x, y) {
    this.parts.readout.setAttribute("aria-live", "off");
    const [step] = this.readRange(x, x);
    const bin = Math.max(0, findAt(this.props.grid.step, step));
    const row = Math.max(0, Math.min(this.shown.length - 1, Math.floor(y / this.area.row)));
    this.showCell({ row, bin });
  }

  /** Arrows walk over the cells, Enter opens the row, Space folds its block. @param {KeyboardEvent} event */
  walk(event) {
    const moves = new Map([["ArrowLeft", [0, -1]], ["ArrowRight", [0, 1]], ["ArrowUp", [-1, 0]], ["ArrowDown", [1, 0]]]);
    const move = moves.get(event.key);
    const { row, bin } = this.cell ?? { row: 0, bin: 0 };
    // What keys reach is said; what the pointer passes over is not.
    this.parts.readout.setAttribute("aria-live", "polite");
    if (event.key === "Enter") this.pick(row, this.props.grid.step[bin] ?? null);
    else if (event.key === " ") {
      if (this.shown[row]?.group) this.props.onFold?.(this.shown[row].group);
    } else if (!move) return;
    else {
      this.showCell({ row: Math.max(0, Math.min(this.shown.length - 1, row + move[0])),
        bin: Math.max(0, Math.min(this.props.grid.step.length - 1, bin + move[1])) });
    }
    event.preventDefault();
  }

  /** @param {number} at of the shown row @param {number | null} step */
  pick(at, step) {
    const shown = this.shown[at];
    if (!shown) return;
    if (shown.isGroup) return this.props.onFold?.(shown.group);
    const row = this.props.grid.rows[shown.rows[0]];
    this.props.onPick?.(row, step ?? findFurthest(this.props.grid, this.values, shown.rows[0], this.props.mode).step ?? this.window[0]);
  }

  /** @param {{ row: number, bin: number } | null} cell */
  showCell(cell) {
    const { cross, readout } = this.parts;
    this.cell = cell && this.shown[cell.row] && cell.bin < this.props.grid.step.length ? cell : null;
    readout.textContent = spell(this.cell ? this.sayCell(this.cell.row, this.cell.bin) : this.told);
    cross.hidden = !this.cell;
    if (this.cell) {
      Object.assign(cross.style, { top: `${this.cell.row * this.area.row}px`, height: `${Math.max(2, this.area.row)}px` });
    }
    const step = this.cell ? this.props.grid.step[this.cell.bin] : null;
    this.showStep(step);
    this.props.onPoint?.(step);
  }

  /** The place of the cursor, of this map or of one beside it. @param {number | null} step */
  showStep(step) {
    const { line } = this.parts;
    const [low, high] = this.window;
    line.hidden = step === null || step < low || step > high;
    if (step !== null) line.style.left = `${this.placeX(step)}px`;
  }

  /** @param {number} at @param {number} bin */
  sayCell(at, bin) {
    const { grid } = this.props;
    const shown = this.shown[at];
    const bins = grid.step.length;
    let best = shown.rows[0];
    for (const row of shown.rows) {
      if (Math.abs(this.values[row * bins + bin]) > Math.abs(this.values[best * bins + bin])) best = row;
    }
    const value = grid.cells[best * bins + bin];
    const isBad = shown.rows.some((row) => grid.bad[row * bins + bin]);
    const name = shown.isGroup ? `${shown.name} (most: ${grid.rows[best].name})` : shown.name;
    return `${name}  step ${writeStep(grid.step[bin])}  ${isBad ? "not finite" : this.sayValue(value, this.values[best * bins + bin])}`;
  }

  /** What stands out most, in words. */
  tell() {
    const { grid, mode } = this.props;
    let best = null;
    for (let row = 0; row < grid.rows.length; row++) {
      const found = findFurthest(grid, this.values, row, mode);
      if (found.badStep !== null) return `not finite: ${grid.rows[row].name} at ${writeStep(found.badStep)}`;
      if (Number.isNaN(found.change)) continue;
      // From nothing and to nothing have no ratio that could be compared.
      const size = Number.isFinite(found.change) ? Math.abs(found.change) : mode === "relative" ? 0 : Infinity;
      if (!best || size > best.size) best = { ...found, size, name: grid.rows[row].name };
    }
    if (!best || best.step === null) return "no values";
    return `${mode === "relative" ? "largest change" : "maximum"}: ${best.name}  ${this.sayValue(best.value, best.change)} at ${writeStep(best.step)}`;
  }

  /** @param {number} value @param {number} change in decades, with relative colours */
  sayValue(value, change) {
    if (Number.isNaN(value)) return "no value";
    if (this.props.mode === "absolute" || !Number.isFinite(change)) return writeNumber(value);
    return `${writeNumber(value)} (×${writeNumber(Number((10 ** change).toPrecision(3)))})`;
  }

  refreshTable() {
    const { below, table } = this.parts;
    table.setAttribute("aria-pressed", String(this.isTable));
    if (!this.isTable) return below.replaceChildren();
    const { grid, mode, title } = this.props;
    const found = this.shown.flatMap(({ rows }) => rows).map((row) => ({ row, ...findFurthest(grid, this.values, row, mode) }));
    found.sort((a, b) => b.bad - a.bad || Math.abs(b.change) - Math.abs(a.change));
    const cells = found.slice(0, TABLE_ROWS).map(({ row, value, step, bad }) => [
      grid.rows[row].name, writeNumber(grid.base[row]), writeNumber(value), step === null ? "" : writeStep(step), String(bad),
    ]);
    const box = makeElement("div", "", "chart-table");
    box.tabIndex = 0;
    const made = fillTable(`${title}: ${cells.length} of ${found.length} rows, largest difference first`, ["row", "beginning", "furthest", "at step", "not finite"], cells);
    [...made.tBodies[0].rows].forEach((line, at) => {
      const { row, step } = found[at];
      const open = makeElement("button", grid.rows[row].name, "chart-tool");
      open.setAttribute("type", "button");
      open.addEventListener("click", () => this.props.onPick?.(grid.rows[row], step ?? this.window[0]));
      line.cells[0].replaceChildren(open);
    });
    box.append(made);
    below.replaceChildren(box);
  }

  get type() {
    return "map";
  }

  get name() {
    return this.props.title;
  }

  /** For `window.quark.charts`. */
  describe() {
    const { grid, mode, title } = this.props;
    const bins = grid.step.length;
    return {
      name: title, type: this.type, mode, x: { kind: "step", min: this.window[0], max: this.window[1] }, scale: this.scale,
      box: this.area, bins, rows: this.shown.map(({ name, rows }) => {
        const best = findFurthest(grid, this.values, rows[0], mode);
        return { name, isGroup: rows.length > 1, furthest: best.value, step: best.step, bad: best.bad };
      }),
      steps: [...grid.step], marks: this.placeMarks(), cells: grid.rows.length * bins, readout: this.parts.readout.textContent,
    };
  }
}
