// @ts-check
/** One metric's chart, made when it first comes near to being seen and read while it is. */

import { html } from "../data/html.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { useLate } from "./late.js";
import { change } from "./links.js";
import { listMarks } from "./metrics.js";
import { watchSight } from "./sight.js";

const loadCharts = () => import("../charts/metric_chart.js");

/** @param {{ metric: any, chart: any }} props */
export function MetricTile({ metric, chart }) {
  const charts = useLate(loadCharts);
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const drawn = useRef(/** @type {import("../charts/metric_chart.js").MetricChart | null} */ (null));
  const [isNear, setNear] = useState(false);
  const width = useRef(0);
  const { store, view } = chart;
  const xKey = view.x.startsWith("metric:") ? view.x.slice("metric:".length) : null;
  useEffect(() => host.current ? watchSight(host.current, (isSeen, wide) => {
    width.current = wide;
    setNear(isSeen);
  }) : undefined, []);
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
  useEffect(() => () => {
    drawn.current?.destroy();
    drawn.current = null;
  }, []);
  const says = kept?.state === "failed" ? kept.message : kept?.state === "missing" ? "no point in this part of the run" : "";
  return html`<div class="tile" data-metric=${metric.key}>
    <div ref=${host} class="tile-chart"></div>
    ${!kept?.curves.length && html`<h3 class="chart-title">${metric.name}</h3><p class="quiet">${says || "…"}</p>`}
  </div>`;
}
