// @ts-check
/** Metrics by namespace; only groups that are open are built, only charts in sight are read. */

import { html } from "../data/html.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { useTile } from "./drawing.js";
import { useLate } from "./late.js";
import { change } from "./links.js";
import { groupMetrics, listMarks } from "./metrics.js";
import { writeMany } from "./texts.js";

// One metric's chart, made when it first comes near to being seen and read while it is.

const loadCharts = () => import("../charts/metric_chart.js");

/** @param {{ metric: any, chart: any }} props */
export function MetricTile({ metric, chart }) {
  const charts = useLate(loadCharts);
  const { host, drawn, width, isNear } = useTile();
  const { store, view } = chart;
  const xKey = view.x.startsWith("metric:") ? view.x.slice("metric:".length) : null;
  useLayoutEffect(() => {
    if (!isNear) return;
    const ends = [metric.key, ...(xKey === null ? [] : [xKey])].map((key) => store.want(key));
    return () => ends.forEach((end) => end());
  }, [isNear, metric.key, xKey, store]);
  const kept = store.read(metric.key);
  const xCurve = xKey === null ? null : store.read(xKey)?.curves[0] ?? null;
  const marks = listMarks(chart.findings, metric);
  const marksText = JSON.stringify(marks);
  // Before the next picture, which would else be one without the chart.
  useLayoutEffect(() => {
    if (!host.current || !charts || !kept?.curves.length || (!isNear && !drawn.current)) return;
    const props = {
      title: metric.name, curves: kept.curves, window: view.window, whole: chart.wholeOf(),
      x: /** @type {any} */ (xKey === null ? view.x : "metric"), xCurve, start_s: chart.start_s,
      isLog: view.isLog, smooth: view.smooth, marks,
      onZoom: chart.zoom, onMark: (/** @type {string} */ id) => change({}, { hash: `alert-${id}` }), onStep: chart.chooseStep,
    };
    if (drawn.current) drawn.current.update(props);
    else drawn.current = new charts.MetricChart(host.current, { ...props, width: width.current });
  }, [charts, kept, isNear, xCurve, view, chart.wholeText, marksText, metric.name]);
  const says = kept?.state === "failed" ? kept.message : kept?.state === "missing" ? "no point in this part of the run" : "";
  return html`<div class="tile" data-metric=${metric.key}>
    <div ref=${host} class="tile-chart"></div>
    ${!kept?.curves.length && html`<h3 class="chart-title">${metric.name}</h3><p class="quiet">${says || "…"}</p>`}
  </div>`;
}

const MOST_AT_ONCE = 48;
const CHART_REM = 24;
const REM_PX = 16;
const TILE_PX = 270;
const FOLDED = new Set(["system"]);

/** @typedef {import("./metrics.js").Metric} Metric */

/** Which are open before anybody opens one: as many as hold the first charts, and not the system's. */
export function listOpen(/** @type {Map<string, Metric[]>} */ groups, /** @type {boolean} */ isSearch) {
  const open = new Set();
  let charts = 0;
  for (const [name, metrics] of groups) {
    const isFolded = FOLDED.has(name.split("/")[0]) && !isSearch && groups.size > 1;
    if (isFolded || charts >= MOST_AT_ONCE) continue;
    open.add(name);
    charts += metrics.length;
  }
  return open;
}

/**
 * Keys of the metrics that stand first, about as many as one sees at once.
 * @param {Metric[]} metrics @param {string} find @param {Set<string>} turned
 */
export function listFirst(metrics, find, turned) {
  const groups = groupMetrics(metrics, find);
  const open = listOpen(groups, find !== "");
  const shown = [...groups].flatMap(([name, items]) => open.has(name) !== turned.has(name) ? items.slice(0, MOST_AT_ONCE) : []);
  const beside = Math.max(1, Math.floor(innerWidth / (CHART_REM * REM_PX)));
  return shown.slice(0, Math.min(MOST_AT_ONCE, beside * Math.ceil(innerHeight / TILE_PX))).map((metric) => metric.key);
}

/** @param {string | null} text @returns {Set<string>} names that stand in the address */
export function readNames(text) {
  return new Set((text ?? "").split(",").filter((item) => item !== "").map((item) => {
    try {
      return decodeURIComponent(item.slice(1));
    } catch {
      return item;
    }
  }));
}

/** @param {Iterable<string>} names which may be empty texts */
export function writeNames(names) {
  return [...names].map((name) => `.${encodeURIComponent(name)}`).join(",");
}

/**
 * @param {{ metrics: Metric[], find: string, turned: Set<string>, turn: (group: string) => void,
 *   chart: any }} props turned: groups that are not as they are by default
 */
export function ChartList({ metrics, find, turned, turn, chart }) {
  const groups = useMemo(() => groupMetrics(metrics, find), [metrics, find]);
  const open = useMemo(() => listOpen(groups, find !== ""), [groups, find]);
  if (!metrics.length) return html`<p class="notice-line">No metric was logged yet.</p>`;
  if (!groups.size) return html`<p class="notice-line">No metric name contains ${find}.</p>`;
  /** Groups that are folded and follow one another share a line. @type {[string, Metric[]][][]} */
  const lines = [];
  for (const group of groups) {
    const isFolded = open.has(group[0]) === turned.has(group[0]);
    const last = lines[lines.length - 1];
    if (isFolded && last?.every(([name]) => open.has(name) === turned.has(name))) last.push(group);
    else lines.push([group]);
  }
  /** @param {[string, Metric[]]} group */
  const one = ([name, items]) => html`<${MetricGroup} key=${`group ${name}`} name=${name} metrics=${items}
    isOpen=${open.has(name) !== turned.has(name)} turn=${turn} chart=${chart} />`;
  return html`<div class="groups">${lines.map((line) => line.length > 1
    ? html`<div class="folded" key=${`line ${line[0][0]}`}>${line.map(one)}</div>` : one(line[0]))}</div>`;
}

/** @param {{ name: string, metrics: any[], isOpen: boolean, turn: (group: string) => void, chart: any, tile?: any }} props */
export function MetricGroup({ name, metrics, isOpen, turn, chart, tile = MetricTile }) {
  const [most, setMost] = useState(MOST_AT_ONCE);
  // Small groups stand beside one another; one of many metrics has the whole width.
  const wide = Math.min(metrics.length, most);
  const style = isOpen ? { flex: `${wide} 1 ${wide * CHART_REM}rem` } : { flex: "0 0 auto" };
  return html`<section class="group" style=${style}>
    <h2><button class="plain fold" aria-expanded=${isOpen} onClick=${() => turn(name)}>
      <span aria-hidden="true">${isOpen ? "▾" : "▸"}</span> ${name || "metrics"}
      <small>${metrics.length}</small></button></h2>
    ${isOpen && html`<div class="charts">${metrics.slice(0, most).map((metric) => html`
      <${tile} key=${metric.key} metric=${metric} chart=${chart} />`)}</div>
      ${metrics.length > most && html`<${Further} left=${metrics.length - most}
        show=${() => setMost(most + MOST_AT_ONCE)} />`}`}
  </section>`;
}

/** Comes into sight as one scrolls, and makes room for more charts. @param {{ left: number, show: () => void }} props */
function Further({ left, show }) {
  const button = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) show();
    }, { rootMargin: "300px" });
    if (button.current) watcher.observe(button.current);
    return () => watcher.disconnect();
  }, [left]);
  return html`<button ref=${button} class="plain more" onClick=${show}>and ${writeMany(left, "more chart")}</button>`;
}

export { groupMetrics };
