// @ts-check
/** One metric over steps, epochs, time or another metric: band, lines, what lies beyond and what is marked. */

import { styleLine } from "../data/colours.js";
import { spell, writeCount, writeNumber, writeStep } from "../pages/texts.js";
import { makeElement, makeTable } from "./data_table.js";
import { findCarets, findShown, fitRange } from "./fitting.js";
import { findExtent, findNearest, makeLine, nameLines, placeStep } from "./lines.js";
import { groupMarks, paintBad, paintBand, paintCarets, paintInside, paintLine, paintMarks } from "./painting.js";
import { Plot } from "./plot.js";
import { registerChart } from "./registry.js";
import { INKS } from "./inks.js";
import { readTheme } from "./theme.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {import("./lines.js").Line} Line */
/** @typedef {import("./painting.js").Frame} Frame */
/** @typedef {import("./fitting.js").Caret} Caret */
/** @typedef {{ step: number, text: string, severity: string, id?: string }} Mark */
/** @typedef {{ name: string, index: number, isThin?: boolean }} Face how a curve is called, and which style it has */
/**
 * @typedef {object} MetricChartProps
 * @property {string} title
 * @property {Curve[]} curves of one metric: attempts and ranks are lines of their own
 * @property {Face[]} [faces] one of each curve; by default they are numbered, and called by what differs
 * @property {[number, number] | null} [window] in the unit of x; null is the whole
 * @property {[number, number] | null} [whole] what all charts of the page show; by default what the curves have
 * @property {"step" | "epoch" | "time" | "relative" | "metric"} [x]
 * @property {Curve | null} [xCurve] with x `metric`: whose values x is
 * @property {number} [start_s] with x `relative`: when the run began, seconds since 1970
 * @property {boolean} [isLog]
 * @property {number} [smooth] 0 to below 1: what is left of an entry after a thousandth of the window
 * @property {boolean} [isFull] y to the lowest and the highest of all
 * @property {Mark[]} [marks]
 * @property {number | null} [threshold] a dashed line
 * @property {[number, number] | null} [shade] steps that are shaded
 * @property {number} [height] of the plot in pixels
 * @property {number} [width] of the host in pixels, where it is known
 * @property {"metric" | "evidence"} [type]
 * @property {boolean} [isPlain] without title, table and footer
 * @property {(low: number | null, high: number | null) => void} [onZoom] null and null for the whole
 * @property {(isFull: boolean) => void} [onFull] where the page keeps it; else the chart does
 * @property {(id: string) => void} [onMark] a mark was clicked
 * @property {(step: number) => void} [onStep] a place was clicked where nothing else is
 */

const HEIGHT = 190;
const MARK_PX = 70;
const CARET_PX = 14;
const HIT_PX = 9;
const RAW_ALPHA = 0.38;

export class MetricChart {
  /** @param {HTMLElement} host @param {MetricChartProps} props */
  constructor(host, props) {
    this.host = host;
    /** @type {MetricChartProps} */
    this.props = props;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {{ carets: (Caret & { left: number, top: number, text: string })[], bad: { x: number, text: string }[],
     *   marks: import("./painting.js").MarkGroup[] }} */
    this.painted = { carets: [], bad: [], marks: [] };
    this.isFull = props.isFull ?? false;
    this.isTable = false;
    this.parts = this.build();
    this.plot = new Plot(this.parts.plot, props.height ?? HEIGHT, {
      paint: (frame) => this.paint(frame),
      point: (x) => this.say(x),
      zoom: (low, high) => this.props.onZoom?.(low, high),
      click: (left, top) => this.click(left, top),
    }, Boolean(props.marks?.length), props.width);
    this.unregister = registerChart(this);
    this.refresh();
  }

  build() {
    const figure = makeElement("figure", "", "chart");
    const head = makeElement("figcaption", "", "chart-head");
    const title = makeElement("h3", "", "chart-title");
    const readout = makeElement("span", "", "chart-readout");
    const full = this.makeButton("full range", () => this.setFull(!this.isFull));
    const table = this.makeButton("as table", () => {
      this.isTable = !this.isTable;
      this.refreshTable();
    });
    const plot = makeElement("div", "", "chart-plot");
    const legend = makeElement("div", "", "chart-legend");
    const foot = makeElement("div", "", "chart-foot");
    const rows = makeElement("div");
    const tools = makeElement("span", "", "chart-tools");
    const badge = makeElement("span", "", "chart-badge");
    plot.setAttribute("role", "img");
    tools.append(full, table);
    head.append(title, readout);
    foot.append(badge, tools);
    figure.append(head, plot, legend, foot, rows);
    if (this.props.isPlain) head.hidden = foot.hidden = true;
    this.host.replaceChildren(figure);
    return { figure, title, readout, full, table, plot, legend, badge, rows };
  }

  /** @param {string} text @param {() => void} act */
  makeButton(text, act) {
    const button = makeElement("button", text, "chart-tool");
    button.setAttribute("type", "button");
    button.addEventListener("click", act);
    return button;
  }

  /** Show something else, or in another way. @param {Partial<MetricChartProps>} changes */
  update(changes) {
    this.props = { ...this.props, ...changes };
    if (changes.isFull !== undefined) this.isFull = changes.isFull;
    this.refresh();
  }

  destroy() {
    this.unregister();
    this.plot.destroy();
    this.host.replaceChildren();
  }

  /** @param {boolean} isFull */
  setFull(isFull) {
    this.isFull = isFull;
    this.props.onFull?.(isFull);
    this.refresh();
  }

  get kind() {
    return this.props.x ?? "step";
  }

  /** What x is called. */
  get xName() {
    if (this.kind === "metric") return this.props.xCurve?.name ?? "metric";
    return this.kind === "relative" ? "seconds" : this.kind;
  }

  refresh() {
    const { props } = this;
    const x = this.kind === "metric"
      ? props.xCurve ? { kind: /** @type {const} */ ("metric"), curve: props.xCurve } : { kind: /** @type {const} */ ("step") }
      : { kind: /** @type {"step"} */ (this.kind) };
    const start_s = props.start_s ?? Math.min(...props.curves.map((curve) => curve.time?.[0] ?? Infinity));
    const names = nameLines(props.curves);
    const faces = props.faces ?? names.map((name, index) => ({ name, index }));
    const range = props.window ? props.window[1] - props.window[0] : 0;
    this.lines = props.curves.map((curve, index) => makeLine(curve, {
      x, start_s: Number.isFinite(start_s) ? start_s : 0, smooth: props.smooth ?? 0, range, ...faces[index],
    }));
    const shown = props.window ?? props.whole ?? findExtent(this.lines) ?? [0, 1];
    /** @type {[number, number]} */
    const window = shown[1] > shown[0] ? [shown[0], shown[1]] : [shown[0] - 0.5, shown[0] + 0.5];
    const isLog = (props.isLog ?? false) && this.lines.some((line) => line.mean.some((value) => value > 0));
    const y = fitRange(this.lines, {
      low: window[0], high: window[1], isLog, isFull: this.isFull,
      include: typeof props.threshold === "number" ? [props.threshold] : [],
    });
    const kind = this.kind === "step" && props.curves[0]?.unit === "epoch" ? "epoch" : this.kind;
    this.plot.show({ x: window, y, isLog, kind }, Boolean(props.marks?.length));
    this.refreshTexts();
    this.refreshTable();
  }

  refreshTexts() {
    const { title, full, plot } = this.parts;
    title.title = title.textContent = spell(this.props.title);
    full.hidden = !this.isFull && this.listCarets().length === 0;
    full.setAttribute("aria-pressed", String(this.isFull));
    const badge = this.writeBadge();
    this.parts.badge.textContent = badge;
    this.say(null);
    plot.setAttribute("aria-label", `${title.textContent}: ${this.parts.readout.textContent}; ${badge}`);
    this.refreshLegend();
  }

  refreshLegend() {
    const { legend } = this.parts;
    const lines = this.lines.filter((line) => !line.isThin);
    legend.hidden = lines.length < 2;
    if (legend.hidden) return;
    legend.replaceChildren(...lines.map((line) => {
      const { colour, dash } = styleLine(line.index, readTheme());
      const item = makeElement("span", line.name, "chart-legend-item");
      const swatch = makeElement("span", "", "chart-swatch");
      swatch.style.borderTopColor = colour;
      swatch.style.borderTopStyle = dash.length ? "dashed" : "solid";
      item.prepend(swatch);
      return item;
    }));
  }

  refreshTable() {
    const { table, rows } = this.parts;
    table.setAttribute("aria-pressed", String(this.isTable));
    const [low, high] = this.plot.scales.x;
    rows.replaceChildren(...(this.isTable ? [makeTable(this.props.title, this.lines, low, high, this.xName)] : []));
  }

  /** How many points there are, and whether all of them are drawn. */
  writeBadge() {
    if (this.lines.length === 0) return "no points";
    const points = this.lines.reduce((sum, line) => sum + line.points, 0);
    const [low, high] = this.plot.scales.x;
    const entries = this.lines.reduce((sum, line) => {
      const [first, last] = findShown(line, low, high);
      return sum + last - first;
    }, 0);
    const isExact = this.lines.every((line) => line.exact);
    const bad = this.props.curves.reduce((sum, curve) => sum + curve.nonFinite, 0);
    const noun = points === 1 ? "point" : "points";
    const said = isExact ? `${writeStep(points)} ${noun}, exact` : `${writeStep(entries)} of ${writeCount(points)} ${noun}, with min and max`;
    return bad ? `${said} · ${writeStep(bad)} not finite` : said;
  }

  /** The value at a place, or the last one. @param {number | null} x */
  say(x) {
    const { readout } = this.parts;
    const told = this.lines.filter((line) => line.xs.length && !line.isThin);
    const said = told.slice(0, 4).map((line) => {
      const at = x === null ? line.xs.length - 1 : findNearest(line.xs, x);
      const smoothed = x !== null && line.smoothed ? ` ~ ${writeNumber(line.smoothed[at])}` : "";
      const band = line.low && line.high && line.low[at] < line.high[at]
        ? ` [${writeNumber(line.low[at])} .. ${writeNumber(line.high[at])}]` : "";
      const name = told.length > 1 ? `${line.name}: ` : "";
      const runs = x !== null && line.count ? ` of ${line.count[at]} runs` : "";
      return `${name}${writeNumber(line.mean[at])}${smoothed}${runs} at ${this.writePlace(line.xs[at])}${x === null && !name ? "" : band}`;
    });
    readout.textContent = spell(said.join("   "));
  }

  /** @param {number} x */
  writePlace(x) {
    if (this.kind === "time") return new Date(x * 1000).toLocaleTimeString("en-GB", { timeZoneName: "short" });
    if (this.kind === "relative") return `${writeNumber(x)} s`;
    return Number.isInteger(x) ? writeStep(x) : writeNumber(x);
  }

  listCarets() {
    const { x, y } = this.plot.scales;
    const near = (x[1] - x[0]) * CARET_PX / Math.max(1, this.plot.width);
    return findCarets(this.lines, { low: x[0], high: x[1], bottom: y[0], top: y[1], near });
  }

  /** @param {Frame} frame */
  paint(frame) {
    const theme = readTheme();
    const inks = INKS[theme];
    const { props } = this;
    paintInside(frame, () => {
      this.paintShade(frame, inks.shade);
      for (const line of this.lines) if (!line.isThin) paintBand(frame, line, styleLine(line.index, theme));
      for (const line of this.lines) {
        const isFaint = line.smoothed || line.isThin;
        paintLine(frame, line, line.mean, styleLine(line.index, theme), isFaint ? { width: 1, alpha: RAW_ALPHA } : { width: 1.6, alpha: 1 });
      }
      for (const line of this.lines) {
        if (line.smoothed && !line.isThin) paintLine(frame, line, line.smoothed, styleLine(line.index, theme), { width: 2.2, alpha: 1, isDotted: false });
      }
      if (typeof props.threshold === "number") this.paintThreshold(frame, props.threshold, inks.bad);
    });
    this.painted.bad = paintBad(frame, this.lines, inks);
    this.painted.carets = paintCarets(frame, this.listCarets(), inks, (caret) => this.sayCaret(caret));
    this.painted.marks = groupMarks(this.placeMarks(frame), MARK_PX * frame.scale);
    paintMarks(frame, this.painted.marks, inks);
  }

  /** @param {Caret} caret */
  sayCaret(caret) {
    return `${writeNumber(caret.value)} at ${writeStep(caret.step)}`;
  }

  /** @param {Frame} frame */
  placeMarks(frame) {
    return (this.props.marks ?? []).flatMap((mark) => {
      const x = placeStep(this.lines, mark.step, this.kind === "step");
      return x >= frame.low && x <= frame.high ? [{ ...mark, x: frame.toX(x) }] : [];
    });
  }

  /** @param {Frame} frame @param {string} colour */
  paintShade(frame, colour) {
    const { shade } = this.props;
    if (!shade) return;
    const [from, to] = shade.map((step) => placeStep(this.lines, step, this.kind === "step"));
    if (Number.isNaN(from) || Number.isNaN(to)) return;
    const left = frame.toX(from);
    frame.context.fillStyle = colour;
    frame.context.fillRect(left, frame.box.top, Math.max(2 * frame.scale, frame.toX(to) - left), frame.box.height);
  }

  /** @param {Frame} frame @param {number} value @param {string} colour */
  paintThreshold({ context, box, scale, toY }, value, colour) {
    const y = toY(value);
    if (Number.isNaN(y)) return;
    context.strokeStyle = colour;
    context.lineWidth = 1.2 * scale;
    context.setLineDash([6 * scale, 4 * scale]);
    context.beginPath();
    context.moveTo(box.left, y);
    context.lineTo(box.left + box.width, y);
    context.stroke();
    context.setLineDash([]);
  }

  /** @param {number} left @param {number} top */
  click(left, top) {
    const scale = devicePixelRatio || 1;
    const isHit = this.painted.carets.some((caret) => Math.abs(caret.left / scale - left) < HIT_PX && Math.abs(caret.top / scale - top) < HIT_PX * 2);
    if (isHit) return this.setFull(true);
    const mark = this.painted.marks.find((group) => Math.abs(group.x / scale - left) < HIT_PX);
    if (mark?.ids[0]) return this.props.onMark?.(mark.ids[0]);
    const step = this.findStep(left);
    if (step !== null) this.props.onStep?.(step);
  }

  /** The step at a place in the plot; null where there is none. @param {number} left in CSS pixels */
  findStep(left) {
    const { box, scales } = this.plot;
    const x = scales.x[0] + (left - box.left) / Math.max(1, box.width) * (scales.x[1] - scales.x[0]);
    if (this.kind === "step") return this.props.curves[0]?.unit === "epoch" ? null : Math.max(0, Math.round(x));
    const at = this.lines.findIndex((line) => line.xs.length > 0);
    if (this.kind === "metric" || at < 0) return null;
    const step = this.props.curves[at].step[findNearest(this.lines[at].xs, x)];
    return Number.isFinite(step) ? step : null;
  }

  get type() {
    return this.props.type ?? "metric";
  }

  get name() {
    return this.props.title;
  }

  /** For `window.quark.charts`. */
  describe() {
    const { x, y, isLog, kind } = this.plot.scales;
    const scale = devicePixelRatio || 1;
    return {
      name: this.props.title, type: this.type, x: { kind, min: x[0], max: x[1] }, y: { isLog, min: y[0], max: y[1] },
      box: this.plot.box, isFull: this.isFull, smooth: this.props.smooth ?? 0, badge: this.parts.badge.textContent,
      lines: this.lines.map((line) => ({
        name: line.name, isThin: line.isThin, count: line.count && [...line.count], entries: line.xs.length, points: line.points, exact: line.exact,
        xs: [...line.xs], mean: [...line.mean], low: line.low && [...line.low], high: line.high && [...line.high],
        smoothed: line.smoothed && [...line.smoothed], bad: line.bad, ...styleLine(line.index, readTheme()),
      })),
      carets: this.listCarets(),
      bad: this.painted.bad.map((bad) => ({ text: bad.text, left: bad.x / scale })),
      marks: this.props.marks ?? [],
      labels: this.painted.marks.map(({ x, text, severity, ids }) => ({ left: x / scale, text, severity, ids })),
      threshold: this.props.threshold ?? null, shade: this.props.shade ?? null,
    };
  }
}
