// @ts-check
/** The observation that a finding rests on, drawn beside it, read when it comes near to being seen. */

import { readCurves } from "../data/curves.js";
import { decodePack } from "../data/pack.js";
import { html } from "../data/html.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { ask } from "./connection.js";
import { watchSight } from "./sight.js";

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
        if (!found) return setSays("What it rests on is no longer in the store.");
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
