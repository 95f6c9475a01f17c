// @ts-check
/** What may be said of one side against another: metrics with intervals, alerts, health, phases, layers. */

import { html } from "../data/html.js";
import { SeverityBadge } from "./badges.js";
import { compareNames, writeMany, writeNumber, writeStep } from "./texts.js";

const MOST_METRICS = 12;
const MOST_LAYERS = 20;
const RANKS = new Map([["worse", 0], ["better", 1], ["equivalent", 2], ["inconclusive", 3]]);
const WORDS = new Map([
  ["better", "▲ better"], ["worse", "▼ worse"], ["equivalent", "= equivalent"],
  ["inconclusive", "○ inconclusive"],
]);

/** The headline first, then what differs. @param {any[]} diffs */
export function orderMetrics(diffs) {
  return [...diffs].sort((a, b) => Number(b.headline) - Number(a.headline)
    || (RANKS.get(a.verdict) ?? 4) - (RANKS.get(b.verdict) ?? 4) || compareNames(a.name, b.name));
}

/** Whether a metric is told without being asked for. @param {any} diff */
function isTold(diff) {
  return diff.headline || diff.verdict === "better" || diff.verdict === "worse" || !diff.metric_key.startsWith("system/");
}

/** @param {any} diff @returns {string} the difference of the ends with its interval */
export function writeEffect(diff) {
  const { difference } = diff.last;
  if (difference === null || difference === undefined) return "";
  const sign = difference > 0 ? "+" : difference < 0 ? "−" : "";
  const said = `${sign}${writeNumber(Math.abs(difference))}`;
  if (diff.interval_low === null || diff.interval_low === undefined) return said;
  return `${said} [${writeNumber(diff.interval_low)}, ${writeNumber(diff.interval_high)}]`;
}

/** @param {{ verdict: any, names: [string, string] }} props names: of the side that is judged, and of its baseline */
export function Verdict({ verdict, names }) {
  if (!verdict || verdict.state === "computing") {
    return html`<section aria-labelledby="verdict-title" aria-busy="true"><h2 id="verdict-title">Verdict</h2>
      <p class="quiet">The sides are being compared …</p></section>`;
  }
  if (verdict.state === "failed") {
    return html`<section aria-labelledby="verdict-title"><h2 id="verdict-title">Verdict</h2>
      <p class="mistake" role="alert">${verdict.note}</p></section>`;
  }
  const { result } = verdict;
  const metrics = orderMetrics(result.metric_diffs);
  const told = metrics.filter(isTold);
  const first = told.slice(0, MOST_METRICS);
  const rest = [...told.slice(MOST_METRICS), ...metrics.filter((diff) => !isTold(diff))];
  return html`<section class="verdict" aria-labelledby="verdict-title"><h2 id="verdict-title">${names[0]} against ${names[1]}</h2>
    ${!metrics.length && html`<p class="notice-line">Neither side has metrics.</p>`}
    ${metrics.length > 0 && html`<${MetricTable} diffs=${first} names=${names} />`}
    ${rest.length > 0 && html`<details><summary>${writeMany(rest.length, "more metric")}</summary><${MetricTable} diffs=${rest} names=${names} /></details>`}
    ${result.notes.length > 0 && html`<ul class="remarks">${result.notes.map((/** @type {string} */ note) => html`<li key=${note} class="quiet">${note}</li>`)}</ul>`}
    <${Health} result=${result} names=${names} />
    <${Alerts} result=${result} names=${names} />
  </section>`;
}

/** @param {{ diffs: any[], names: [string, string] }} props */
function MetricTable({ diffs, names }) {
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Metrics compared"><table class="plain-table verdicts"><thead><tr>
      <th scope="col">metric</th><th scope="col">${names[0]} is</th><th scope="col" class="number">difference [interval]</th>
      <th scope="col" class="number">${names[0]}</th><th scope="col" class="number">${names[1]}</th><th scope="col">why</th></tr></thead>
    <tbody>${diffs.map((diff) => html`<tr key=${diff.metric_key} data-metric=${diff.metric_key} class=${diff.headline ? "headline" : ""}>
      <th scope="row">${diff.name}</th>
      <td class=${`verdict-${diff.verdict ?? "none"}`}>${WORDS.get(diff.verdict) ?? writePresence(diff, names)}</td>
      <td class="number">${writeEffect(diff)}</td>
      <td class="number">${writeEnd(diff, "primary")}</td><td class="number">${writeEnd(diff, "reference")}</td>
      <td class="quiet">${diff.reason}${writeCommonStep(diff)}${diff.time_to_target ? html`<br />${diff.time_to_target.summary}` : ""}</td></tr>`)}</tbody></table></div>`;
}

/** What the sides had where the shorter runs end. @param {any} diff */
function writeCommonStep(diff) {
  const early = diff.at_last_common_step;
  if (!early || early.primary === null || early.reference === null) return "";
  return html`<br />at the last common ${diff.unit}, ${writeStep(diff.common_end)}: ${writeNumber(early.primary)} against ${writeNumber(early.reference)}`;
}

/** @param {any} diff @param {[string, string]} names */
function writePresence(diff, names) {
  if (diff.presence === "primary_only") return `only ${names[0]} has it`;
  if (diff.presence === "reference_only") return `only ${names[1]} has it`;
  return "no verdict: it is unknown if higher or lower is better";
}

/** @param {any} diff @param {"primary" | "reference"} side */
function writeEnd(diff, side) {
  const value = writeNumber(diff.last[side]);
  const deviation = diff.last[`${side}_deviation`];
  const bad = diff[`${side}_non_finite_count`];
  return html`${value}${deviation ? ` ± ${writeNumber(deviation)}` : ""}${bad ? `, ${writeMany(bad, "value")} not finite` : ""}
    ${diff.best && diff.best[side] !== null && html`<br /><small>best ${writeNumber(diff.best[side])}</small>`}`;
}

/** @param {{ result: any, names: [string, string] }} props */
function Health({ result, names }) {
  const isOfSome = result.primary.run_count > 1 || result.reference.run_count > 1;
  /** @type {any[]} */
  const diffs = result.health_score_diffs;
  const known = diffs.filter((diff) => diff.primary !== null || diff.reference !== null);
  if (!known.length) return null;
  /** @param {number | null} score */
  const write = (score) => score === null ? "not known" : String(Math.round(score));
  return html`<h3>Health${isOfSome ? ", of the median run" : ""}</h3><div class="scrolls" tabindex="0" role="region" aria-label="Health side by side"><table class="plain-table"><thead><tr><td></td>
      ${known.map((diff) => html`<th key=${diff.score_key} scope="col" class="number">${diff.score_key.replaceAll("_", " ")}</th>`)}</tr></thead>
    <tbody>${/** @type {const} */ (["primary", "reference"]).map((side, at) => html`<tr key=${side}><th scope="row">${names[at]}</th>
      ${known.map((diff) => html`<td key=${diff.score_key} class="number">${write(diff[side])}</td>`)}</tr>`)}</tbody></table></div>`;
}

/** @param {{ result: any, names: [string, string] }} props */
function Alerts({ result, names }) {
  const { primary_only: gained, reference_only: lost, shared } = result.alert_diff;
  const runs = [result.primary.run_count, result.reference.run_count];
  if (!gained.length && !lost.length && !shared.length) {
    const isKnown = result.primary.analysis !== "none" && result.reference.analysis !== "none";
    return html`<p class="quiet">${isKnown ? "No findings on either side." : "Findings are unknown."}</p>`;
  }
  /** @param {any} sighting @param {number} of @param {string} [more] */
  const row = (sighting, of, more = "") => html`<li><${SeverityBadge} severity=${sighting.severity} /> ${sighting.title}${
    sighting.culprit ? ` in ${sighting.culprit}` : ""}${sighting.step === null ? "" : `, step ${writeStep(Math.round(sighting.step))}`}${
    of > 1 ? `, in ${sighting.run_count} of ${of} runs` : ""}${more}</li>`;
  return html`
    ${gained.length > 0 && html`<h3>Only ${names[0]} has</h3><ul class="sightings">${gained.map((/** @type {any} */ item) => row(item, runs[0]))}</ul>`}
    ${lost.length > 0 && html`<h3>Only ${names[1]} has</h3><ul class="sightings">${lost.map((/** @type {any} */ item) => row(item, runs[1]))}</ul>`}
    ${shared.length > 0 && html`<h3>Both have</h3><ul class="sightings">${shared.map((/** @type {any} */ match) => row(match.primary, runs[0],
      match.severity_change === "same" ? "" : `, ${match.severity_change} than ${match.reference.severity}`))}</ul>`}`;
}

/** Phases of both sides over the same steps. @param {{ result: any, names: [string, string] }} props */
export function PhasePair({ result, names }) {
  const diffs = result.phase_diffs;
  if (!diffs.length) return html`<p class="notice-line">The phases of both sides are unknown.</p>`;
  const ends = diffs.flatMap((/** @type {any} */ diff) => [diff.primary_end, diff.reference_end]).filter((/** @type {any} */ end) => end !== null);
  const last = Math.max(1, ...ends);
  return html`${/** @type {const} */ (["primary", "reference"]).map((side, at) => {
    const own = diffs.filter((/** @type {any} */ diff) => diff[`${side}_start`] !== null)
      .sort((/** @type {any} */ a, /** @type {any} */ b) => a[`${side}_start`] - b[`${side}_start`]);
    const end = Math.max(0, ...own.map((/** @type {any} */ diff) => diff[`${side}_end`]));
    return html`<h3 key=${`${side} title`}>${names[at]}</h3><ol key=${side} class="phases" aria-label=${`Phases of ${names[at]}`}>
      ${own.map((/** @type {any} */ diff) => {
        const [from, to] = [diff[`${side}_start`], diff[`${side}_end`]];
        return html`<li key=${diff.phase_name} style=${{ flexGrow: Math.max(1, (to - from) / last * 100) }}>
          <span class=${`phase phase-${diff.phase_name}`} title=${`${diff.display_name}, ${diff.unit}s ${writeStep(from)} to ${writeStep(to)}`}>${diff.display_name}
            <small>${writeStep(Math.round(from))} to ${writeStep(Math.round(to))}</small></span></li>`;
      })}
      ${end < last && html`<li style=${{ flexGrow: (last - end) / last * 100 }}></li>`}</ol>`;
  })}`;
}

/** Layers and parameters by how much they differ. @param {{ result: any, names: [string, string] }} props */
export function LayerChanges({ result, names }) {
  const layers = result.layer_summary_diffs.map((/** @type {any} */ diff) => ({ ...diff, name: `${diff.module_name} (${diff.summary_type})` }));
  const parameters = result.parameter_diffs.map((/** @type {any} */ diff) => ({ ...diff, name: diff.parameter_name }));
  const all = [...layers, ...parameters];
  if (!all.length) return html`<p class="notice-line">Neither side has layers or parameters.</p>`;
  const notable = all.filter((diff) => diff.notable && diff.presence === "both");
  const lone = all.filter((diff) => diff.presence !== "both");
  const count = result.layer_summary_diffs_count + result.parameter_diffs_count;
  notable.sort((a, b) => Math.abs(b.log_ratio ?? 0) - Math.abs(a.log_ratio ?? 0));
  return html`<p class="quiet">${notable.length ? `${notable.length} of ${count} layers and parameters differ by more than they move by themselves.`
    : `None of the ${count} layers and parameters differs by more than its own variation.`}</p>
    ${notable.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Layers by change"><table class="plain-table"><thead><tr>
      <th scope="col">layer or parameter</th><th scope="col" class="number">factor</th><th scope="col">difference</th></tr></thead>
      <tbody>${notable.slice(0, MOST_LAYERS).map((diff) => html`<tr key=${diff.name}><th scope="row">${diff.name}</th>
        <td class="number">${diff.log_ratio === null ? "" : `× ${writeNumber(Math.exp(diff.log_ratio))}`}</td><td>${diff.summary}</td></tr>`)}</tbody></table></div>`}
    ${lone.length > 0 && html`<p>On one side only: ${lone.slice(0, MOST_LAYERS).map((diff) => `${diff.name} (${diff.presence === "primary_only" ? names[0] : names[1]})`).join(", ")}</p>`}`;
}
