// @ts-check
/** A report of runs: one file that needs no server, made of the page's own modules. */

import { html } from "./data/html.js";
import { frameRange } from "./charts/zooming.js";
import { StateBadge } from "./pages/badges.js";
import { Findings, Health } from "./pages/findings.js";
import { readMetrics } from "./pages/metrics.js";
import { Phases } from "./pages/phases.js";
import { Config, EventRows, Traceback } from "./pages/run_facts.js";
import { writeDuration, writeMany, writeStep, writeTime } from "./pages/texts.js";
import { CurveGroups, LayerMap, findWhole, readRunCurves, readRunMaps } from "./report/charts.js";
import { readContents } from "./report/contents.js";
import { useMemo, useState } from "./vendor/hooks.js";
import { render } from "./vendor/preact.js";

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
  return html`<details class="holds" open><summary>What this report holds of the run</summary>
    <ul>${data.holds.map((/** @type {string} */ text) => html`<li key=${text}>${text}</li>`)}
      ${data.lacks.map((/** @type {string} */ text) => html`<li key=${text} class="lacks"><b>left out:</b> ${text}</li>`)}</ul></details>`;
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
