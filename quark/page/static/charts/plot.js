// @ts-check
/** Axes, cursor and selection by uPlot; what lies between them is painted by whoever made the plot. */

import { labelDecade, labelDurations, labelTicks, labelTimes, placeDecades, placeDurations, placeTicks, placeTimes } from "../data/ticks.js";
import { uPlot } from "../vendor/uplot.js";
import { makeFrame } from "./painting.js";
import { FONT, INKS } from "./inks.js";
import { readTheme, watchTheme } from "./theme.js";

/** @typedef {import("./painting.js").Frame} Frame */
/** @typedef {{ x: [number, number], y: [number, number], isLog: boolean, kind: string }} Scales */
/**
 * @typedef {object} PlotCalls
 * @property {(frame: Frame) => void} paint
 * @property {(x: number | null) => void} point where the cursor is, on this plot or on one beside it
 * @property {(low: number | null, high: number | null) => void} zoom null and null for the whole
 * @property {(left: number, top: number) => void} click in CSS pixels from the corner of the canvas
 */

export const AXIS_LEFT = 58;
export const MARGIN_RIGHT = 12;
const AXIS_BOTTOM = 26;
const AXIS_BOTTOM_TIMES = 38;
const MARGIN_TOP = 8;
const MARGIN_TOP_MARKS = 20;
const LEAST_WIDTH = 160;
const TICK_X_PX = 90;
const TICK_Y_PX = 34;
const CLICK_PX = 4;
const SYNC = "quark";

export class Plot {
  /**
   * @param {HTMLElement} host @param {number} height @param {PlotCalls} calls @param {boolean} [hasMarks]
   * @param {number} [width] of the host, where it is known: to ask for it has the whole page laid out
   */
  constructor(host, height, calls, hasMarks = false, width = 0) {
    this.known = width;
    this.host = host;
    this.height = height;
    this.calls = calls;
    /** @type {Scales} */
    this.scales = { x: [0, 1], y: [0, 1], isLog: false, kind: "step" };
    this.hasMarks = hasMarks;
    this.made = "";
    /** @type {any} */
    this.plot = null;
    this.watcher = new ResizeObserver((entries) => {
      this.known = entries[entries.length - 1].contentRect.width;
      this.fit();
    });
    this.watcher.observe(host);
    this.unwatchTheme = watchTheme(() => this.remake());
  }

  get width() {
    return Math.max(LEAST_WIDTH, Math.floor(this.known || this.host.clientWidth));
  }

  destroy() {
    this.watcher.disconnect();
    this.unwatchTheme();
    this.plot?.destroy();
    this.plot = null;
  }

  /** Show these scales; what is between them is painted anew. @param {Scales} scales @param {boolean} [hasMarks] */
  show(scales, hasMarks = this.hasMarks) {
    this.scales = scales;
    this.hasMarks = hasMarks;
    // uPlot fixes these when it is made.
    const needed = `${scales.isLog} ${scales.kind === "time"} ${hasMarks}`;
    if (!this.plot || needed !== this.made) {
      this.made = needed;
      return this.remake();
    }
    // A batch paints once, also where no scale has changed.
    this.plot.batch(() => {
      this.plot.setScale("x", { min: scales.x[0], max: scales.x[1] });
      this.plot.setScale("y", { min: scales.y[0], max: scales.y[1] });
    });
  }

  fit() {
    if (!this.plot || this.plot.width === this.width) return;
    this.plot.setSize({ width: this.width, height: this.height });
  }

  remake() {
    if (!this.made) return;
    this.plot?.destroy();
    const { x, y } = this.scales;
    this.plot = new uPlot(this.listOptions(), [[x[0], x[1]], [y[0], y[1]]], this.host);
  }

  /** Where the box is, in CSS pixels from the corner of the canvas. */
  get box() {
    const scale = devicePixelRatio || 1;
    const { left, top, width, height } = this.plot?.bbox ?? { left: 0, top: 0, width: 0, height: 0 };
    return { left: left / scale, top: top / scale, width: width / scale, height: height / scale };
  }

  /** @returns {any} */
  listOptions() {
    const inks = INKS[readTheme()];
    const isTime = this.scales.kind === "time";
    const font = `11px ${FONT}`;
    const axis = { stroke: inks.muted, font, labelFont: font, grid: { stroke: inks.grid, width: 1 }, ticks: { stroke: inks.grid, width: 1, size: 4 }, gap: 4 };
    return {
      width: this.width,
      height: this.height,
      padding: [this.hasMarks ? MARGIN_TOP_MARKS : MARGIN_TOP, MARGIN_RIGHT, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, auto: false, range: () => this.scales.x },
        y: { auto: false, distr: this.scales.isLog ? 3 : 1, range: () => this.scales.y },
      },
      series: [{}, { paths: () => null, points: { show: false } }],
      axes: [
        {
          ...axis, size: isTime ? AXIS_BOTTOM_TIMES : AXIS_BOTTOM,
          splits: () => this.placeX(),
          values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => this.labelX(ticks),
        },
        {
          ...axis, size: AXIS_LEFT,
          splits: () => this.placeY(),
          filter: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks,
          values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => this.scales.isLog ? ticks.map(labelDecade) : labelTicks(ticks),
        },
      ],
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false },
        sync: { key: SYNC, setSeries: false, scales: ["x", null] },
        bind: { dblclick: () => () => this.calls.zoom(null, null) },
      },
      hooks: {
        draw: [(/** @type {any} */ plot) => this.paint(plot)],
        setCursor: [(/** @type {any} */ plot) => this.calls.point(plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x"))],
        setSelect: [(/** @type {any} */ plot) => this.select(plot)],
        ready: [(/** @type {any} */ plot) => this.listenClicks(plot)],
      },
    };
  }

  /** @param {any} plot */
  paint(plot) {
    const { x, y, isLog } = this.scales;
    const scale = plot.bbox.width && plot.ctx.canvas.width / plot.width;
    // uPlot remembers which inks it has set, and sets them again only where its own change.
    plot.ctx.save();
    this.calls.paint(makeFrame(plot.ctx, plot.bbox, scale || 1, x, y, isLog));
    plot.ctx.restore();
  }

  /** @param {any} plot */
  select(plot) {
    const { left, width } = plot.select;
    if (width <= CLICK_PX) return;
    const low = plot.posToVal(left, "x");
    const high = plot.posToVal(left + width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.calls.zoom(low, high);
  }

  /** @param {any} plot */
  listenClicks(plot) {
    let from = 0;
    plot.over.addEventListener("mousedown", (/** @type {MouseEvent} */ event) => (from = event.clientX));
    plot.over.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      if (Math.abs(event.clientX - from) > CLICK_PX) return;
      const area = plot.root.getBoundingClientRect();
      this.calls.click(event.clientX - area.left, event.clientY - area.top);
    });
  }

  placeX() {
    const [low, high] = this.scales.x;
    const count = Math.max(2, Math.floor((this.width - AXIS_LEFT - MARGIN_RIGHT) / TICK_X_PX));
    if (this.scales.kind === "time") return placeTimes(low, high, count);
    if (this.scales.kind === "relative") return placeDurations(low, high, count);
    return placeTicks(low, high, count, this.scales.kind === "step" ? 1 : 0);
  }

  /** @param {number[]} ticks */
  labelX(ticks) {
    if (this.scales.kind === "time") return labelTimes(ticks);
    return this.scales.kind === "relative" ? labelDurations(ticks) : labelTicks(ticks);
  }

  placeY() {
    const [low, high] = this.scales.y;
    const count = Math.max(2, Math.floor((this.height - AXIS_BOTTOM) / TICK_Y_PX));
    return this.scales.isLog ? placeDecades(low, high, count) : placeTicks(low, high, count);
  }
}
