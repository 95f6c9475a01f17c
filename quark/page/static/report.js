// @ts-check
/** A report of runs: one file that needs no server, made of the page's own modules. */

import { readGrid, suggestMode } from "./charts/heat_cells.js";
import { HeatMap } from "./charts/heat_map.js";
import { MetricChart } from "./charts/metric_chart.js";
import { frameRange } from "./charts/zooming.js";
import { readCurves } from "./data/curves.js";
import { html } from "./data/html.js";
import { decodePack } from "./data/pack.js";
import { StateBadge } from "./pages/badges.js";
import { useDrawn } from "./pages/drawing.js";
import { Findings, Health } from "./pages/findings.js";
import { nameOffered } from "./pages/layer_maps.js";
import { groupMetrics, listMarks, readMetrics } from "./pages/metrics.js";
import { Phases } from "./pages/phases.js";
import { Config, EventRows, Traceback } from "./pages/run_facts.js";
import { writeDuration, writeMany, writeStep, writeTime } from "./pages/texts.js";
import { findAnswer, keepAnswer } from "./report/answers.js";
import { useMemo, useState } from "./vendor/hooks.js";
import { render } from "./vendor/preact.js";

// Curves and maps of one run of a report; those of a run are zoomed together.

/** @typedef {import("./data/curves.js").Curve} Curve */
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

// What a report holds, out of the block of data in its file.

/** @param {string} text base 64 @returns {Uint8Array<ArrayBuffer>} */
function decodeText(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return bytes;
}

/**
 * The head of the report; its packs become answers.
 * @param {string} text JSON: `{"deflated": base 64}`
 * @returns {Promise<any>}
 */
export async function readContents(text) {
  const packed = new Blob([decodeText(JSON.parse(text).deflated)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
  const { head, columns } = decodePack(await new Response(stream).arrayBuffer());
  head.packs.forEach((/** @type {string} */ name, /** @type {number} */ place) => {
    keepAnswer(name, /** @type {Uint8Array} */ (columns.get(String(place))));
  });
  return head;
}

/** @param {{ data: any }} props */
function Facts({ data }) {
  const { run } = data;
  const facts = [
    run.project, run.newest_step === null ? "" : `step ${writeStep(run.newest_step)}`, writeDuration(run.duration_s),
    run.git_commit ? `commit ${run.git_commit.slice(0, 7)}${run.dirty ? "+changes" : ""}` : "",
    run.attempt ? `attempt ${run.attempt}` : "", `started ${writeTime(run.created_at)}`,
  ].filter(Boolean);
  return html`<span class="facts">${facts.join(" · ")}</span>
    ${run.tags?.map((/** @type {string} */ tag) => html`<span key=${tag} class="tag">${tag}</span>`)}`;
}

/** What is in here of a run, and what is not. @param {{ data: any }} props */
function Holds({ data }) {
  return html`<details class="holds" open><summary>Contents of this report</summary>
    <ul>${data.holds.map((/** @type {string} */ text) => html`<li key=${text}>${text}</li>`)}
      ${data.lacks.map((/** @type {string} */ text) => html`<li key=${text} class="lacks"><b>omitted:</b> ${text}</li>`)}</ul></details>`;
}

/** @param {{ data: any, place: number }} props */
function Run({ data, place }) {
  const [window, setWindow] = useState(/** @type {[number, number] | null} */ (null));
  const [isLog, setLog] = useState(false);
  const metrics = useMemo(() => readMetrics(data.metrics), []);
  const curves = useMemo(() => readRunCurves(data), []);
  const maps = useMemo(() => readRunMaps(data), []);
  const whole = useMemo(() => findWhole(data, curves), []);
  /** @param {number | null} low @param {number | null} high */
  const zoom = (low, high) => setWindow(low === null || high === null ? null : [low, high]);
  const view = useMemo(() => ({ window, whole, isLog, zoom }), [String(window), isLog]);
  const { analysis, run } = data;
  const of = ` of ${run.id}`;
  /** @param {any} finding */
  const zoomTo = (finding) => {
    if (!whole || finding.step === null || finding.step === undefined) return;
    const shown = frameRange(finding.step, finding.step_end ?? finding.step, whole);
    zoom(shown?.low ?? null, shown?.high ?? null);
  };
  return html`<section class="report-run" aria-labelledby=${`run-${place}`}>
    <div class="title"><h2 id=${`run-${place}`}>${run.name || run.id}</h2><${StateBadge} state=${run.state} />
      <${Facts} data=${data} /></div>
    ${run.ending && html`<p class=${`notice-line state-${run.state}`}>${run.ending.message}</p><${Traceback} text=${run.traceback} />`}
    <${Holds} data=${data} />
    <${Health} analysis=${analysis} of=${of} />
    <${Findings} analysis=${analysis} run=${run.id} active="" isRunning=${run.state === "running"} version=${0}
      zoomTo=${zoomTo} most=${Infinity} />
    <${Phases} phases=${analysis.phases ?? []} notes=${analysis.phase_notes ?? []} window=${window} zoom=${zoom} of=${of} />
    ${metrics.length > 0 && html`<div class="bar report-bar"><label><input type="checkbox" checked=${isLog}
        onChange=${(/** @type {any} */ event) => setLog(event.currentTarget.checked)} /> log y</label>
      ${window && html`<button class="plain" onClick=${() => zoom(null, null)}>Whole run</button>`}</div>
      <${CurveGroups} data=${data} metrics=${metrics} curves=${curves} view=${view} />`}
    ${maps.length > 0 && html`<section class="report-maps" aria-label=${`Layers${of}`}>${maps.map((/** @type {any} */ map) => html`
      <${LayerMap} key=${map.statistic.id} map=${map} view=${view} />`)}</section>`}
    ${data.config !== null && html`<details class="report-part" open><summary>Configuration and environment</summary>
      <div><${Config} data=${data} prefix=${`${place}-`} by=${` run-${place}`} /></div></details>`}
    ${data.events?.length > 0 && html`<details class="report-part"><summary>${writeMany(data.events.length, "newest event")} and log lines</summary>
      <${EventRows} rows=${data.events} /></details>`}
  </section>`;
}

/** @param {{ contents: any }} props */
function Report({ contents }) {
  return html`<div>${contents.runs.map((/** @type {any} */ data, /** @type {number} */ place) => html`
    <${Run} key=${data.run.id} data=${data} place=${place} />`)}</div>`;
}

const host = /** @type {HTMLElement} */ (document.getElementById("runs"));
const block = /** @type {HTMLElement} */ (document.getElementById("contents"));
readContents(block.textContent ?? "").then((contents) => {
  // What stands there until now is for readers without scripts.
  host.replaceChildren();
  render(html`<${Report} contents=${contents} />`, host);
  document.documentElement.dataset.drawn = "true";
}, (error) => {
  const said = document.createElement("p");
  said.className = "mistake";
  said.textContent = `The curves of this report cannot be read here: ${error.message}`;
  host.prepend(said);
});
