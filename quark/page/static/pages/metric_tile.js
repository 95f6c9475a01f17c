// @ts-check
/** One metric's chart, made when it first comes near to being seen and read while it is. */

import { html } from "../data/html.js";
import { useLayoutEffect } from "../vendor/hooks.js";
import { useTile } from "./drawing.js";
import { useLate } from "./late.js";
import { change } from "./links.js";
import { listMarks } from "./metrics.js";

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
