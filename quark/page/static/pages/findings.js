// @ts-check
/** What is wrong with a run: causes above what follows from them, each with what shows it. */

import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { renderMarkdown } from "../data/markdown.js";
import { decodePack } from "../data/pack.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { FreeText, HealthBadge, SeverityBadge } from "./badges.js";
import { ask } from "./connection.js";
import { watchSight } from "./sight.js";
import { writeMany, writeNumber, writeStep } from "./texts.js";

// The observation that a finding rests on, drawn beside it, read when it comes near to being seen.

/** @typedef {import("../data/curves.js").Curve} Curve */

const ENTRIES = 600;
const NEARLY = 0.01;

/**
 * What can be drawn, the best first: a rule says the weightiest first, and where it says the same
 * figure of the culprit, that one is meant.
 * @param {any} finding @returns {any[]}
 */
export function listPieces(finding) {
  const drawable = (finding.evidence ?? []).filter((/** @type {any} */ piece) => piece.read);
  const { culprit } = finding;
  const isOwn = (/** @type {any} */ piece) => [piece.source, piece.name].some((name) => (
    name === culprit || (typeof name === "string" && piece.kind !== "metric" && name.startsWith(`${culprit}.`))));
  const own = drawable.find((/** @type {any} */ piece) => isOwn(piece) && piece.field === drawable[0].field);
  return own ? [own, ...drawable.filter((/** @type {any} */ piece) => piece !== own)] : drawable;
}

/** What the curves are of. @param {any} piece @param {Curve[]} curves */
export function nameCurves(piece, curves) {
  const { kind, name, field, summary } = curves[0];
  if (!field) return name || piece.name;
  const figure = [summary, field].filter(Boolean).join(" ").replaceAll("_", " ");
  return name ? `${figure} of ${kind === "telemetry" ? "rank" : kind} ${name}` : figure;
}

/**
 * A piece without its threshold where that is of something else than the curve, such as of a
 * ratio: what was observed is then none of the curve's values.
 * @param {any} piece @param {Curve[]} curves
 */
export function dropForeignLimit(piece, curves) {
  const { observed } = piece;
  const isOwn = typeof observed === "number" && curves.some((curve) => (
    curve.lowest !== null && curve.highest !== null
    && observed >= curve.lowest[0] - NEARLY * Math.abs(curve.lowest[0])
    && observed <= curve.highest[0] + NEARLY * Math.abs(curve.highest[0])));
  return isOwn ? piece : { ...piece, threshold: null };
}

/** The first piece that the store has a curve of. @param {string} run @param {any[]} pieces @param {AbortSignal} signal */
async function readPiece(run, pieces, signal) {
  for (const piece of pieces) {
    const separator = piece.read.includes("?") ? "&" : "?";
    const path = `api/runs/${encodeURIComponent(run)}/${piece.read}${separator}entries=${ENTRIES}`;
    const answer = await ask(path, {}, signal);
    const curves = answer.status === 204 ? [] : readCurves(decodePack(await answer.arrayBuffer()));
    if (curves.some((curve) => curve.step.length)) return { piece, curves };
  }
  return null;
}

/** @param {{ run: string, finding: any, version: number }} props version: it is read anew with each */
export function Evidence({ run, finding, version }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const chart = useRef(/** @type {import("../charts/evidence_chart.js").EvidenceChart | null} */ (null));
  const [isNear, setNear] = useState(false);
  const [says, setSays] = useState("");
  const pieces = listPieces(finding);
  const reads = pieces.map((piece) => piece.read).join("\n");
  useEffect(() => host.current ? watchSight(host.current, setNear) : undefined, []);
  useLayoutEffect(() => {
    if (!isNear || !pieces.length) return;
    const ended = new AbortController();
    Promise.all([readPiece(run, pieces, ended.signal), import("../charts/evidence_chart.js")])
      .then(([found, charts]) => {
        if (ended.signal.aborted || !host.current) return;
        if (!found) return setSays("Its evidence is no longer in the store.");
        setSays("");
        const { piece, curves } = found;
        const props = { curves, finding, evidence: dropForeignLimit(piece, curves), title: nameCurves(piece, curves) };
        if (chart.current) chart.current.update(props);
        else chart.current = new charts.EvidenceChart(host.current, props);
      })
      .catch((error) => {
        if (!ended.signal.aborted) setSays(`It cannot be drawn: ${error.message}`);
      });
    return () => ended.abort();
  }, [isNear, reads, run, finding.id, version]);
  useEffect(() => () => {
    chart.current?.destroy();
    chart.current = null;
  }, []);
  if (!pieces.length) return null;
  return html`<div class="evidence" data-finding=${finding.id}><div ref=${host} class="evidence-chart"></div>
    ${says && html`<p class="quiet">${says}</p>`}</div>`;
}

const MOST = 6;
/** What `quark.watch` brings first, and nothing else does. */
const WATCHED = "parameter summaries";

/** @param {any} finding */
export function describePlace(finding) {
  const { step, step_end: end, epoch } = finding;
  if (step !== null && step !== undefined) {
    return end !== null && end !== undefined && end > step
      ? `steps ${writeStep(step)} to ${writeStep(end)}` : `since step ${writeStep(step)}`;
  }
  return epoch === null || epoch === undefined ? "the whole run" : `since epoch ${writeStep(epoch)}`;
}

const PARTS = new Set(["layer", "parameter", "module"]);

/** At what it is, such as `layer 2`; a metric's name says what it is. @param {any} finding */
export function describeCulprit({ culprit, evidence }) {
  const pieces = (evidence ?? []).filter((/** @type {any} */ piece) => PARTS.has(piece.kind));
  const isMetric = (evidence ?? []).some((/** @type {any} */ piece) => (
    piece.kind === "metric" && (piece.source === culprit || piece.name === culprit)));
  if (!pieces.length || isMetric) return culprit;
  const own = pieces.find((/** @type {any} */ piece) => piece.source === culprit);
  return `${own?.kind ?? "layer"} ${culprit}`;
}

/** Whether it is worth a place at the top: what only informs stands below, folded. @param {any} finding */
export function isGrave(finding) {
  return finding.severity !== "info" && !finding.is_note;
}

/**
 * @param {{ analysis: any, run: string, active: string, isRunning: boolean,
 *   zoomTo: (finding: any) => void, version: number, most?: number }} props
 *   most: so many at first, the others where they are asked for
 */
export function Findings({ analysis, run, active, isRunning, zoomTo, version, most = MOST }) {
  const [isAll, setAll] = useState(false);
  const grave = analysis.findings.filter(isGrave);
  const rest = analysis.findings.filter((/** @type {any} */ finding) => !isGrave(finding));
  const isBeyond = grave.slice(most).some((/** @type {any} */ finding) => `alert-${finding.id}` === active);
  useEffect(() => {
    if (isBeyond) setAll(true);
  }, [isBeyond]);
  const shown = isAll ? grave : grave.slice(0, most);
  const titles = new Map(analysis.findings.map((/** @type {any} */ finding) => [finding.id, finding.title]));
  /** @param {any} finding */
  const one = (finding) => html`<${Finding} key=${finding.id} finding=${finding} run=${run}
    titles=${titles} isActive=${`alert-${finding.id}` === active} zoomTo=${zoomTo}
    version=${version} />`;
  const titleId = `findings-${run}`;
  return html`<section class="findings" aria-labelledby=${titleId}>
    <h2 id=${titleId} class=${grave.length ? "hidden" : "quiet-title"}>${grave.length
      ? writeMany(grave.length, "finding") : writeNothing(analysis, isRunning)}</h2>
    ${!grave.length && html`<${Unseen} rules=${analysis.rules} />`}
    ${shown.map(one)}
    ${grave.length > shown.length && html`<button class="plain more" onClick=${() => setAll(true)}>
      and ${grave.length - shown.length} more</button>`}
    ${rest.length > 0 && html`<details class="remarks" open=${rest.some((/** @type {any} */ finding) => `alert-${finding.id}` === active)}>
      <summary>${writeMany(rest.length, "remark")} that ${rest.length === 1 ? "calls" : "call"} for nothing</summary>
      ${rest.map(one)}</details>`}
    ${grave.length > 0 && html`<${Unseen} rules=${analysis.rules} isFolded=${true} />`}
  </section>`;
}

/** @param {any} analysis @param {boolean} isRunning */
function writeNothing(analysis, isRunning) {
  if (analysis.state === "computing") return "The analysis is running …";
  if (analysis.state === "failed") return "The run could not be analyzed";
  const rules = analysis.rules;
  if (!rules || rules.with_data === 0) return "Not known: no rule had the data that it requires";
  const upToNow = isRunning ? " up to now" : "";
  return `No problem found${upToNow}; ${rules.with_data} of ${rules.count} checks ran`;
}

/** Why the other rules said nothing. @param {{ rules: any, isFolded?: boolean }} props */
function Unseen({ rules, isFolded = false }) {
  const missing = rules?.missing ?? [];
  if (!missing.length) return rules?.note ? html`<p class="unseen">${rules.note}</p>` : null;
  return html`<details class="unseen" open=${!isFolded && missing.length <= 3}>
    <summary>${`${isFolded ? `${rules.with_data} of ${rules.count} rules had data; ` : ""}why ${
      missing.length === 1 ? "one" : missing.length} had none`}</summary>
    <dl>${missing.map((/** @type {any} */ item) => html`<div key=${item.rule}><dt>${item.rule}</dt>
      <dd>${item.reason}${item.data?.length ? ` (${[item.data].flat().join(", ")})` : ""}</dd></div>`)}</dl>
    ${missing.some((/** @type {any} */ item) => [item.data].flat().includes(WATCHED)) && html`<p>Layers,
      parameters and gradients are seen once the script says <code>quark.watch(session, model, optimizer)</code>.</p>`}
  </details>`;
}

/** @param {{ finding: any, run: string, titles: Map<string, string>, isActive: boolean,
 *   zoomTo: (finding: any) => void, version: number }} props */
function Finding({ finding, run, titles, isActive, zoomTo, version }) {
  const cause = finding.caused_by && titles.get(finding.caused_by);
  const id = `alert-${finding.id}`;
  const depth = Math.min(finding.depth ?? 0, 3);
  return html`<article id=${id} tabindex="-1" aria-labelledby=${`${id}-title`}
    class=${`finding finding-${finding.severity} depth-${depth}${isActive ? " active" : ""}`}>
    <div class="finding-says">
      <h3 id=${`${id}-title`}><${SeverityBadge} severity=${finding.severity} isNote=${finding.is_note} />
        <span class="finding-title">${finding.title}</span>
        ${finding.culprit && html`<span class="culprit">${describeCulprit(finding)}</span>`}
        <span class="since">${describePlace(finding)}</span></h3>
      ${cause && html`<p class="follows">follows from: ${cause}</p>`}
      <p>${finding.fact}</p>
      ${finding.advice && html`<p class="advice"><span aria-hidden="true">→ </span><span class="hidden">What to do: </span>${finding.advice}</p>`}
      <div class="finding-foot"><button class="plain" onClick=${() => zoomTo(finding)}>Zoom all charts to it</button>
      <a href=${`#${id}`}>Link</a>
      <details><summary>Explanation and evidence</summary>
        <p>${finding.inference}</p>
        ${finding.affected?.length > 0 && html`<p>Also: ${finding.affected.join(", ")}</p>`}
        <ul>${(finding.evidence ?? []).map((/** @type {any} */ piece, /** @type {number} */ place) => html`
          <li key=${place}><b>${piece.name || piece.source}</b> ${piece.summary}
            ${piece.observed !== null && html` <small>seen ${writeNumber(piece.observed)}${piece.threshold === null ? "" : `, held against ${writeNumber(piece.threshold)}`}</small>`}
          </li>`)}</ul>
        <p class="quiet">Rule ${finding.rule}${finding.confidence !== null && finding.confidence < 1 ? `, ${Math.round(100 * finding.confidence)} % sure` : ""}</p>
      </details>
      ${finding.fix && html`<details class="fix"><summary>How to fix it</summary><div class="prose">${renderMarkdown(finding.fix)}</div></details>`}</div>
    </div>
    <${Evidence} run=${run} finding=${finding} version=${version} />
  </article>`;
}

/** @param {{ analysis: any, of?: string }} props of: the run, where there are several */
export function Health({ analysis, of = "" }) {
  const overall = analysis.scores.find((/** @type {any} */ score) => score.key === "overall");
  return html`<section class="health-row" aria-label=${`Health${of}`}>
    ${analysis.scores.map((/** @type {any} */ score) => html`<${HealthBadge} key=${score.key} name=${score.key}
      health=${{ ...score, reason: score.known ? score.summary : score.reason || score.summary }} />`)}
    ${!analysis.scores.length && html`<${HealthBadge} health=${null} name="overall" />`}
    ${overall && html`<p class="judged">${overall.known ? overall.summary : `Health is not known: ${(overall.reason || overall.summary).replace(/\.$/, "")}.`}</p>`}
    ${analysis.note && html`<p class="quiet"><${FreeText} text=${analysis.note} /></p>`}
  </section>`;
}
