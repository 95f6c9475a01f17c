// @ts-check
/** Curves and maps of one run of a report; those of a run are zoomed together. */

import { suggestMode, readGrid } from "../charts/heat_cells.js";
import { HeatMap } from "../charts/heat_map.js";
import { MetricChart } from "../charts/metric_chart.js";
import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useDrawn } from "../pages/drawing.js";
import { nameOffered } from "../pages/layer_maps.js";
import { groupMetrics, listMarks } from "../pages/metrics.js";
import { useMemo } from "../vendor/hooks.js";
import { findAnswer } from "./answers.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
const CHART_REM = 20;

/** The curves of a run by metric. @param {any} data @returns {Map<string, Curve[]>} */
export function readRunCurves(data) {
  /** @type {Map<string, Curve[]>} */
  const found = new Map();
  for (const name of data.curves) {
    const pack = findAnswer(name);
    for (const curve of pack ? readCurves(decodePack(pack)) : []) {
      found.set(curve.key, [...found.get(curve.key) ?? [], curve]);
    }
  }
  return found;
}

/** The maps of a run. @param {any} data */
export function readRunMaps(data) {
  return data.maps.flatMap((/** @type {string} */ name) => {
    const found = findAnswer(name);
    if (!found) return [];
    const pack = decodePack(found);
    return [{ statistic: nameOffered(pack.head.kind, pack.head.fields.find((/** @type {any} */ one) => (
      one.kind === pack.head.kind && one.field === pack.head.field && one.summary === pack.head.summary)) ?? pack.head), grid: readGrid(pack) }];
  });
}

/**
 * Where all charts of a run begin and end.
 * @param {any} data @param {Map<string, Curve[]>} curves @returns {[number, number] | null}
 */
export function findWhole(data, curves) {
  let low = 0;
  let high = data.run.newest_step ?? 0;
  for (const curve of [...curves.values()].flat()) {
    if (curve.unit !== "step") continue;
    for (const step of curve.step) {
      if (step < low) low = step;
      if (step > high) high = step;
    }
  }
  return low < high ? [low, high] : null;
}

/** @param {{ data: any, metrics: any[], curves: Map<string, Curve[]>, view: any }} props */
export function CurveGroups({ data, metrics, curves, view }) {
  const groups = useMemo(() => groupMetrics(metrics, ""), [metrics]);
  return html`<div class="groups">${[...groups].map(([name, items]) => html`
    <section class="group" key=${name} style=${{ flex: `${items.length} 1 ${items.length * CHART_REM}rem` }}>
      <h3>${name || "metrics"} <small>${items.length}</small></h3>
      <div class="charts">${items.map((metric) => html`<${Curves} key=${metric.key} metric=${metric}
        curves=${curves.get(metric.key) ?? []} view=${view} findings=${data.analysis.findings} />`)}</div></section>`)}</div>`;
}

/** @param {{ metric: any, curves: Curve[], view: any, findings: any[] }} props */
function Curves({ metric, curves, view, findings }) {
  const host = useDrawn(MetricChart, () => {
    if (!curves.length) return null;
    const isStep = curves.every((curve) => curve.unit === "step");
    return {
      title: metric.name, curves, window: isStep ? view.window : null, whole: isStep ? view.whole : null,
      isLog: view.isLog, marks: listMarks(findings, metric), onZoom: isStep ? view.zoom : undefined,
      onMark: (/** @type {string} */ id) => document.getElementById(`alert-${id}`)?.scrollIntoView(),
    };
  }, [view]);
  return html`<div class="tile" data-metric=${metric.key}><div ref=${host}></div>
    ${!curves.length && html`<p class="chart-title">${metric.name}</p><p class="quiet">no point</p>`}</div>`;
}

/** @param {{ map: any, view: any }} props */
export function LayerMap({ map, view }) {
  const { statistic, grid } = map;
  const host = useDrawn(HeatMap, () => {
    const whole = view.whole ?? [grid.step[0] ?? 0, Math.max(grid.last, (grid.step[0] ?? 0) + 1)];
    return {
      title: statistic.title, grid, mode: statistic.isShare ? "absolute" : suggestMode(grid), isShare: statistic.isShare,
      hidesEmpty: statistic.kind === "layer", window: view.window, whole, onZoom: view.zoom,
    };
  }, [view]);
  return html`<div ref=${host} data-map=${statistic.id}></div>`;
}
