// @ts-check
/** Histograms of one parameter over steps, the oldest at the back: how its values, gradients or updates spread. */

import { labelTicks, placeTicks } from "../data/ticks.js";
import { spell, writeNumber, writeStep } from "../pages/texts.js";
import { fillTable, makeElement } from "./data_table.js";
import { registerChart } from "./registry.js";
import { FONT, INKS } from "./inks.js";
import { readTheme, watchTheme } from "./theme.js";
import { styleLine } from "../data/colours.js";

/** @typedef {{ parameter: string, type: string, step: number, edges: ArrayLike<number>, counts: ArrayLike<number> }} Ridge */
/** @typedef {{ title: string, ridges: Ridge[], chosen?: number | null, height?: number }} RidgesProps */

const HEIGHT = 260;
const AXIS_PX = 24;
const LEFT_PX = 70;
const RIGHT_PX = 12;
const LABEL_PX = 13;
const OVERLAP = 3.2;

/** Least and greatest value that any histogram counts, or null. @param {Ridge[]} ridges @returns {[number, number] | null} */
export function findSpread(ridges) {
  let low = Infinity;
  let high = -Infinity;
  for (const { edges, counts } of ridges) {
    for (let i = 0; i < counts.length; i++) {
      if (!(counts[i] > 0)) continue;
      low = Math.min(low, edges[i]);
      high = Math.max(high, edges[i + 1]);
    }
  }
  if (!(low <= high)) return null;
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

/** How dense each bin is against the densest: counts over widths, 0 to 1. @param {Ridge} ridge */
export function measureDensity({ edges, counts }) {
  const density = Float64Array.from(counts, (count, i) => {
    const width = edges[i + 1] - edges[i];
    return width > 0 ? count / width : count > 0 ? Infinity : 0;
  });
  let most = 0;
  for (const value of density) if (Number.isFinite(value) && value > most) most = value;
  return density.map((value) => (value === Infinity ? 1 : most > 0 ? value / most : 0));
}

export class Ridges {
  /** @param {HTMLElement} host @param {RidgesProps} props */
  constructor(host, props) {
    this.host = host;
    this.props = props;
    this.isTable = false;
    this.parts = this.build();
    this.watcher = new ResizeObserver(() => this.paint());
    this.watcher.observe(this.parts.body);
    this.unwatch = watchTheme(() => this.paint());
    this.unregister = registerChart(this);
    this.refresh();
  }

  build() {
    const figure = makeElement("figure", "", "chart");
    const head = makeElement("figcaption", "", "chart-head");
    const title = makeElement("h3", "", "chart-title");
    const readout = makeElement("span", "", "chart-readout");
    const body = makeElement("div", "", "ridges");
    body.setAttribute("role", "img");
    const canvas = document.createElement("canvas");
    const foot = makeElement("div", "", "chart-foot");
    const badge = makeElement("span", "", "chart-badge");
    const tools = makeElement("span", "", "chart-tools");
    const table = makeElement("button", "as table", "chart-tool");
    table.setAttribute("type", "button");
    table.addEventListener("click", () => {
      this.isTable = !this.isTable;
      this.refresh();
    });
    const below = makeElement("div");
    head.append(title, readout);
    body.append(canvas);
    tools.append(table);
    foot.append(badge, tools);
    figure.append(head, body, foot, below);
    this.host.replaceChildren(figure);
    return { title, readout, body, canvas, badge, table, below };
  }

  /** @param {Partial<RidgesProps>} changes */
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

  refresh() {
    const { title, ridges } = this.props;
    const { parts } = this;
    parts.title.textContent = spell(title);
    parts.badge.textContent = `${ridges.length} ${ridges.length === 1 ? "histogram" : "histograms"}, each scaled to its densest bin; the oldest at the back`;
    const last = ridges.at(-1);
    const spread = last && findSpread([last]);
    parts.readout.textContent = last && spread ? `step ${writeStep(last.step)}: ${writeNumber(spread[0])} .. ${writeNumber(spread[1])}` : "";
    parts.body.setAttribute("aria-label", `${parts.title.textContent}: ${parts.readout.textContent}`);
    parts.table.setAttribute("aria-pressed", String(this.isTable));
    parts.below.replaceChildren(...(this.isTable ? [this.makeTable()] : []));
    this.paint();
  }

  makeTable() {
    const box = makeElement("div", "", "chart-table");
    box.tabIndex = 0;
    const rows = this.props.ridges.map((ridge) => {
      const spread = findSpread([ridge]);
      const densest = measureDensity(ridge).reduce((best, value, i, all) => (value > all[best] ? i : best), 0);
      return [writeStep(ridge.step), ...(spread ? spread.map(writeNumber) : ["", ""]),
        `${writeNumber(ridge.edges[densest])} .. ${writeNumber(ridge.edges[densest + 1])}`];
    });
    box.append(fillTable(this.props.title, ["step", "lowest", "highest", "densest"], rows));
    return box;
  }

  paint() {
    const { canvas, body } = this.parts;
    const { ridges } = this.props;
    const height = this.props.height ?? HEIGHT;
    const width = Math.max(160, body.clientWidth);
    const scale = devicePixelRatio || 1;
    body.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const spread = findSpread(ridges);
    if (!spread) return;
    context.scale(scale, scale);
    const theme = readTheme();
    const inks = INKS[theme];
    const [low, high] = spread;
    const across = width - LEFT_PX - RIGHT_PX;
    /** @param {number} value */
    const toX = (value) => LEFT_PX + ((value - low) / (high - low)) * across;
    const ground = height - AXIS_PX;
    const apart = (ground - 14) / (ridges.length - 1 + OVERLAP);
    const tall = apart * OVERLAP;
    context.font = `11px ${FONT}`;
    this.paintAxis(context, toX, ground, width);
    let labelled = -Infinity;
    ridges.forEach((ridge, at) => {
      const base = 14 + tall + at * apart;
      const isChosen = this.props.chosen === ridge.step;
      context.save();
      context.beginPath();
      context.rect(LEFT_PX, 0, across, ground);
      context.clip();
      this.paintRidge(context, ridge, toX, base, tall, isChosen ? inks.bad : styleLine(0, theme).colour, inks.ground);
      context.restore();
      if (base - labelled < LABEL_PX && at < ridges.length - 1) return;
      if (at < ridges.length - 1 && ground - base < LABEL_PX) return;
      labelled = base;
      context.fillStyle = isChosen ? inks.bad : inks.muted;
      context.textAlign = "right";
      context.textBaseline = "alphabetic";
      context.fillText(writeStep(ridge.step), LEFT_PX - 8, base);
    });
  }

  /** @param {CanvasRenderingContext2D} context @param {(value: number) => number} toX @param {number} ground @param {number} width */
  paintAxis(context, toX, ground, width) {
    const inks = INKS[readTheme()];
    const spread = findSpread(this.props.ridges);
    if (!spread) return;
    const ticks = placeTicks(spread[0], spread[1], Math.max(2, Math.floor(width / 90)));
    const labels = labelTicks(ticks);
    context.textAlign = "center";
    context.textBaseline = "top";
    ticks.forEach((tick, at) => {
      context.fillStyle = inks.grid;
      context.fillRect(toX(tick), 14, 1, ground - 14);
      context.fillStyle = inks.muted;
      context.fillText(labels[at], toX(tick), ground + 6);
    });
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Ridge} ridge @param {(value: number) => number} toX
   * @param {number} base @param {number} tall @param {string} colour @param {string} ground
   */
  paintRidge(context, ridge, toX, base, tall, colour, ground) {
    const density = measureDensity(ridge);
    const { edges } = ridge;
    if (density.length === 0) return;
    context.beginPath();
    context.moveTo(toX(edges[0]), base);
    density.forEach((value, i) => context.lineTo((toX(edges[i]) + toX(edges[i + 1])) / 2, base - value * tall));
    context.lineTo(toX(edges[density.length]), base);
    context.fillStyle = ground;
    context.globalAlpha = 0.85;
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.stroke();
  }

  get type() {
    return "ridges";
  }

  get name() {
    return this.props.title;
  }

  /** For `window.quark.charts`. */
  describe() {
    return { name: this.props.title, type: this.type, steps: this.props.ridges.map(({ step }) => step), spread: findSpread(this.props.ridges) };
  }
}
