// @ts-check
/** One metric of all sides: a line for each, the band of its runs, or what it is beside the baseline. */

import { MetricChart } from "../charts/metric_chart.js";
import { subtractCurve } from "../data/differences.js";
import { html } from "../data/html.js";
import { useLayoutEffect } from "../vendor/hooks.js";
import { useTile } from "./drawing.js";

/** @typedef {import("../data/curves.js").Curve} Curve */

/**
 * Which curves are drawn and how: a side keeps its colour whatever other sides are hidden.
 * @param {Curve[]} curves @param {{ sides: any[], hidden: Set<number>, base: number, isDifference: boolean }} look
 */
export function chooseCurves(curves, { sides, hidden, base, isDifference }) {
  const baseline = curves.find((curve) => curve.side === base && !curve.run);
  const shown = curves.filter((curve) => !hidden.has(curve.side) && !(isDifference && curve.side === base));
  const drawn = isDifference && baseline ? shown.map((curve) => subtractCurve(curve, baseline)) : isDifference ? [] : shown;
  const faces = drawn.map((curve) => ({
    name: writeSide(sides[curve.side], curve.runs), index: curve.side, isThin: Boolean(curve.run),
  }));
  return { curves: drawn, faces };
}

/** @param {any} side @param {number} runs that have the metric */
function writeSide(side, runs) {
  if (side.runs.length === 1) return side.name;
  return `${side.name} (n=${runs}${runs < side.runs.length ? ` of ${side.runs.length}` : ""})`;
}

/** @param {{ metric: any, chart: any }} props */
export function CompareTile({ metric, chart }) {
  const { host, drawn, width, isNear } = useTile();
  const { store, view, look } = chart;
  useLayoutEffect(() => isNear ? store.want(metric.key) : undefined, [isNear, metric.key, store]);
  const kept = store.read(metric.key);
  const { curves, faces } = chooseCurves(kept?.curves ?? [], look);
  const hasCurves = curves.length > 0;
  useLayoutEffect(() => {
    if (!host.current || (!isNear && !drawn.current)) return;
    if (!hasCurves) {
      drawn.current?.destroy();
      drawn.current = null;
      return;
    }
    const props = {
      title: look.isDifference ? `${metric.name} less ${look.sides[look.base].name}` : metric.name,
      curves, faces, window: view.window, whole: chart.whole, x: /** @type {any} */ (view.x), start_s: 0,
      isLog: view.isLog && !look.isDifference, smooth: view.smooth, threshold: look.isDifference ? 0 : null,
      onZoom: chart.zoom,
    };
    if (drawn.current) drawn.current.update(props);
    else drawn.current = new MetricChart(host.current, { ...props, width: width.current });
  }, [kept, isNear, view, look, hasCurves, metric.name]);
  const says = kept?.message || (kept ? "no side that is shown has a value here" : "…");
  return html`<div class="tile" data-metric=${metric.key}>
    <div ref=${host} class="tile-chart"></div>
    ${!hasCurves && html`<h3 class="chart-title">${metric.name}</h3><p class="quiet">${says}</p>`}
  </div>`;
}
