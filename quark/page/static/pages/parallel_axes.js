// @ts-check
/** Trials over parallel axes: each axis has two handles that narrow it, by pointer or by keys. */

import { registerChart } from "../charts/registry.js";
import { readTheme, watchTheme } from "../charts/theme.js";
import { findLine, paintTrials } from "../charts/trial_lines.js";
import { html } from "../data/html.js";
import { nameValue, placeBrush, rateTrial, readCell } from "../data/trial_axes.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { writeNumber } from "./texts.js";

const HEIGHT = 320;
const TOP = 46;
const BOTTOM = 20;
const SIDE = 56;
const LEAST_GAP = 104;
const KEY_STEP = 0.02;
const KEY_LEAP = 0.1;
const CLICK = 0.015;

/**
 * @typedef {import("../data/trial_axes.js").Trial} Trial
 * @typedef {import("../data/trial_axes.js").Axis} Axis
 * @typedef {import("../data/trial_axes.js").Brush} Brush
 */

/** @param {Axis} axis @param {number} at */
function writePlace(axis, at) {
  const value = axis.read(at);
  return typeof value === "number" ? writeNumber(Number(value.toPrecision(4))) : nameValue(value);
}

/**
 * @param {{ axes: Axis[], colour: Axis | null, trials: Trial[], fit: Set<number>, best: Set<number>, chosen: number | null, brushes: Brush[],
 *   setBrushes: (brushes: Brush[], isDone: boolean) => void, choose: (number: number | null) => void, open: (trial: Trial) => void }} props
 */
export function ParallelAxes(props) {
  const { axes, colour, trials, fit, best, chosen, brushes, setBrushes, choose } = props;
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [width, setWidth] = useState(0);
  const [theme, setTheme] = useState(readTheme);
  const wide = Math.max(width, 2 * SIDE + LEAST_GAP * (axes.length - 1));
  const xs = axes.map((_, at) => axes.length > 1 ? SIDE + at / (axes.length - 1) * (wide - 2 * SIDE) : wide / 2);
  const tall = HEIGHT - TOP - BOTTOM;
  const lines = trials.map((trial) => ({
    places: axes.map((axis) => axis.place(readCell(trial, axis.column))),
    rate: colour ? rateTrial(colour, trial) : null,
    isFit: fit.has(trial.number),
    isLive: trial.state === "running",
    isBest: best.has(trial.number) && fit.has(trial.number),
    isChosen: trial.number === chosen,
  }));
  const known = useRef(/** @type {any} */ (null));
  known.current = { lines, xs, axes, trials, brushes };
  useEffect(() => watchTheme(() => setTheme(readTheme())), []);
  useEffect(() => {
    const watcher = new ResizeObserver((entries) => setWidth(Math.floor(entries[entries.length - 1].contentRect.width)));
    if (host.current) watcher.observe(host.current);
    return () => watcher.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (canvas.current && width) paintTrials(canvas.current, lines, { xs, top: TOP, height: tall, theme });
  });
  useEffect(() => registerChart({
    name: "trials", type: "parallel",
    describe: () => {
      const now = known.current;
      return { name: "trials", type: "parallel", axes: now.axes.map((/** @type {Axis} */ axis) => ({ id: axis.column.id, low: axis.low, high: axis.high, isLog: axis.isLog, names: axis.names })),
        xs: now.xs, top: TOP, height: tall, brushes: now.brushes,
        lines: now.lines.map((/** @type {any} */ line, /** @type {number} */ at) => ({ number: now.trials[at].number, ...line })) };
    },
  }), []);

  /** @param {string} id @param {{ low: number, high: number } | null} range @param {boolean} isDone */
  const brush = (id, range, isDone) => {
    const axis = axes.find((each) => each.column.id === id);
    const others = brushes.filter((each) => each.id !== id);
    // From end to end there is nothing that does not fit but what has no value.
    if (!axis || !range || (range.low <= 0 && range.high >= 1)) return setBrushes(others, isDone);
    setBrushes([...others, { id, low: axis.read(range.low), high: axis.read(range.high) }], isDone);
  };
  /** @param {PointerEvent} event */
  const point = (event) => {
    const area = /** @type {HTMLElement} */ (canvas.current).getBoundingClientRect();
    return findLine(lines, xs, event.clientX - area.left, event.clientY - area.top, TOP, tall);
  };
  /** @param {PointerEvent} event */
  const look = (event) => {
    const at = point(event);
    choose(at < 0 ? null : trials[at].number);
  };
  /** @param {PointerEvent} event */
  const click = (event) => {
    const at = point(event);
    if (at >= 0) props.open(trials[at]);
  };
  return html`<div class="scrolls parallel-axes" ref=${host} tabindex="0" role="region" aria-label="Trials over parallel axes">
    <div class="parallel-box" style=${{ width: `${wide}px`, height: `${HEIGHT}px` }}>
      <canvas ref=${canvas} role="img" aria-label=${`${trials.length} trials as lines over ${axes.map((axis) => axis.column.title).join(", ")}; the table below has the same values`}
        onPointerMove=${look} onPointerLeave=${() => choose(null)} onClick=${click}></canvas>
      ${axes.map((axis, at) => html`<${AxisStrip} key=${axis.column.id} axis=${axis} x=${xs[at]} gap=${xs.length > 1 ? xs[1] - xs[0] : wide} isEdge=${at === 0 || at === xs.length - 1} isLast=${at === xs.length - 1}
        range=${findRange(axis, brushes)} brush=${brush} />`)}
    </div></div>`;
}

/** @param {Axis} axis @param {Brush[]} brushes */
function findRange(axis, brushes) {
  const own = brushes.find((each) => each.id === axis.column.id);
  return own ? placeBrush(axis, own) : null;
}

/**
 * @param {{ axis: Axis, x: number, gap: number, isEdge: boolean, isLast: boolean, range: { low: number, high: number } | null,
 *   brush: (id: string, range: { low: number, high: number } | null, isDone: boolean) => void }} props
 */
function AxisStrip({ axis, x, gap, isEdge, isLast, range, brush }) {
  const strip = useRef(/** @type {HTMLElement | null} */ (null));
  const tall = HEIGHT - TOP - BOTTOM;
  const { id, title, mode } = axis.column;
  const shown = range ?? { low: 0, high: 1 };
  /** @param {PointerEvent} event */
  const place = (event) => {
    const area = /** @type {HTMLElement} */ (strip.current).getBoundingClientRect();
    return Math.max(0, Math.min(1, 1 - (event.clientY - area.top) / area.height));
  };
  /** @param {PointerEvent} event @param {"low" | "high" | null} end the handle that is taken, null for a new range */
  const begin = (event, end) => {
    if (event.button) return;
    event.preventDefault();
    event.stopPropagation();
    const element = /** @type {HTMLElement} */ (event.currentTarget);
    if (end) element.focus();
    const fixed = end === "low" ? shown.high : end === "high" ? shown.low : place(event);
    let last = fixed;
    element.setPointerCapture(event.pointerId);
    /** @param {PointerEvent} moved */
    const move = (moved) => {
      last = place(moved);
      brush(id, { low: Math.min(fixed, last), high: Math.max(fixed, last) }, false);
    };
    const finish = () => {
      element.removeEventListener("pointermove", move);
      element.removeEventListener("pointerup", finish);
      element.removeEventListener("pointercancel", finish);
      const isClick = end === null && Math.abs(fixed - last) < CLICK;
      if (isClick || end === null || last !== fixed) brush(id, isClick ? null : { low: Math.min(fixed, last), high: Math.max(fixed, last) }, true);
    };
    element.addEventListener("pointermove", move);
    element.addEventListener("pointerup", finish);
    element.addEventListener("pointercancel", finish);
  };
  /** @param {KeyboardEvent} event @param {"low" | "high"} end */
  const press = (event, end) => {
    const one = axis.names ? 1 / Math.max(1, axis.names.length - 1) : KEY_STEP;
    const leap = Math.max(one, KEY_LEAP);
    const by = new Map([["ArrowUp", one], ["ArrowRight", one], ["ArrowDown", -one], ["ArrowLeft", -one], ["PageUp", leap], ["PageDown", -leap], ["Home", -1], ["End", 1]]).get(event.key);
    if (event.key === "Escape" || event.key === "Delete") brush(id, null, true);
    else if (by === undefined) return;
    else {
      const at = Math.max(0, Math.min(1, shown[end] + by));
      brush(id, end === "low" ? { low: Math.min(at, shown.high), high: shown.high } : { low: shown.low, high: Math.max(at, shown.low) }, true);
    }
    event.preventDefault();
  };
  const way = mode ? mode === "max" ? " ↑" : " ↓" : "";
  const wide = isEdge ? Math.min(gap, 2 * SIDE) : gap;
  const beyond = [axis.above && `${axis.above} above`, axis.below && `${axis.below} below`].filter(Boolean).join(", ");
  return html`<div class="axis-strip" role="group" aria-label=${title} style=${{ left: `${x - wide / 2}px`, width: `${wide}px`, height: `${HEIGHT}px` }}>
    <div class="axis-name" title=${`${title}${mode ? `, better ${mode === "max" ? "high" : "low"}` : ""}`}><b>${title}${way}</b>
      ${beyond && html`<small title="Outlier, drawn at the edge">${beyond}</small>`}</div>
    <div class="axis-line" ref=${strip} style=${{ top: `${TOP}px`, height: `${tall}px` }} onPointerDown=${(/** @type {PointerEvent} */ event) => begin(event, null)}>
      ${axis.ticks.map((tick) => html`<span key=${tick.text} class="axis-tick" style=${{ top: `${(1 - tick.at) * 100}%`, maxWidth: `${isLast ? SIDE - 8 : gap - 18}px` }} title=${tick.text}>${tick.text}</span>`)}
      ${range && html`<span class="axis-brush" style=${{ top: `${(1 - range.high) * 100}%`, height: `${(range.high - range.low) * 100}%` }}></span>`}
      ${/** @type {const} */ (["low", "high"]).map((end) => html`<span key=${end} class=${`axis-handle axis-${end}`} data-brushed=${range !== null} role="slider" tabindex="0"
        aria-orientation="vertical" aria-label=${`${title}, ${end === "low" ? "lowest" : "highest"} shown`} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(shown[end] * 100)}
        aria-valuetext=${writePlace(axis, shown[end])} style=${{ top: `${(1 - shown[end]) * 100}%` }}
        onPointerDown=${(/** @type {PointerEvent} */ event) => begin(event, end)} onKeyDown=${(/** @type {KeyboardEvent} */ event) => press(event, end)}></span>`)}
    </div></div>`;
}
