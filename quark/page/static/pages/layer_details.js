// @ts-check
/** One layer or parameter: its figures over steps, and how its values spread. */

import { MetricChart } from "../charts/metric_chart.js";
import { needsLog } from "../charts/fitting.js";
import { makeLine } from "../charts/lines.js";
import { Ridges } from "../charts/ridges.js";
import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { SignInNeeded, ask } from "./connection.js";
import { useDrawn } from "./drawing.js";
import { change } from "./links.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {import("../charts/ridges.js").Ridge} Ridge */

const MOST_CHARTS = 12;
const ENTRIES = 600;
const FIELDS = {
  layer: ["norm", "dead_unit_ratio", "std", "mean", "saturation_ratio", "sample_variation_ratio"],
  parameter: ["gradient_norm", "update_to_parameter_ratio", "value_norm", "update_norm", "value_std", "gradient_near_zero_ratio"],
};

/** Curves of one figure together. @param {Curve[]} curves @returns {{ title: string, curves: Curve[] }[]} */
export function groupFigures(curves) {
  /** @type {Map<string, Curve[]>} */
  const grouped = new Map();
  for (const curve of curves) {
    const title = [curve.summary, curve.field].filter(Boolean).join(" ").replaceAll("_", " ");
    grouped.set(title, [...grouped.get(title) ?? [], curve]);
  }
  return [...grouped].map(([title, own]) => ({ title, curves: own }));
}

/** Histograms as the server packs them. @param {import("../data/pack.js").Pack} pack @returns {Map<string, Ridge[]>} by what they are of */
export function readRidges({ head, columns }) {
  /** @type {Map<string, Ridge[]>} */
  const grouped = new Map();
  for (const { parameter, type, step, edges, counts } of head.ridges ?? []) {
    const title = `${type} of ${parameter}`;
    const ridge = { parameter, type, step, edges: columns.get(edges) ?? [], counts: columns.get(counts) ?? [] };
    grouped.set(title, [...grouped.get(title) ?? [], ridge]);
  }
  return grouped;
}

/**
 * What there is of a layer, of its parameters besides, or of a parameter.
 * @param {string} run @param {string} name @param {"layer" | "parameter"} kind @param {[number, number] | null} window @param {AbortSignal} signal
 */
async function readLayer(run, name, kind, window, signal) {
  const kinds = kind === "layer" ? /** @type {const} */ (["layer", "parameter"]) : /** @type {const} */ (["parameter"]);
  const packs = await Promise.all(kinds.map(async (one, at) => {
    const answer = await ask(`api/runs/${encodeURIComponent(run)}/module`, {
      kind: one, name, field: FIELDS[one], entries: ENTRIES, ridges: at === kinds.length - 1 ? 1 : null,
      low: window && Math.floor(window[0]), high: window && Math.ceil(window[1]),
    }, signal);
    return decodePack(await answer.arrayBuffer());
  }));
  const curves = packs.flatMap(readCurves).filter((curve) => curve.step.length > 0);
  return { figures: groupFigures(curves), ridges: readRidges(packs[packs.length - 1]) };
}

/** @param {{ run: string, view: any, whole: [number, number], findings: any[] }} props */
export function OpenLayer({ run, view, whole, findings }) {
  const [read, setRead] = useState(/** @type {any} */ (null));
  const [mistake, setMistake] = useState("");
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const { layer, kind, window: shown } = view;
  useEffect(() => {
    const ended = new AbortController();
    readLayer(run, layer, kind, shown, ended.signal).then(setRead, (error) => {
      if (!ended.signal.aborted && !(error instanceof SignInNeeded)) setMistake(error.message);
    });
    return () => ended.abort();
  }, [run, layer, kind, String(shown)]);
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }), [layer, read !== null]);
  const own = findings.filter((finding) => finding.culprit === layer || finding.culprit?.startsWith(`${layer}.`) || finding.affected?.includes(layer));
  const marks = own.filter((finding) => typeof finding.step === "number")
    .map((finding) => ({ step: finding.step, text: finding.title, severity: finding.severity, id: finding.id }));
  return html`<section class="layers-open" ref=${place} aria-label=${layer}>
    <div class="title"><h2>${layer}</h2><button type="button" onClick=${() => change({ layer: null, kind: null, at: null })}>Close</button></div>
    ${own.map((finding) => html`<p key=${finding.id}><b>${finding.severity}</b> ${finding.title}${finding.fact ? `: ${finding.fact}` : ""}</p>`)}
    ${mistake && html`<pre class="mistake" role="alert">${mistake}</pre>`}
    <div class="layers-grid">
      ${read?.figures.slice(0, MOST_CHARTS).map((/** @type {any} */ figure) => html`<${FigureChart} key=${figure.title} ...${figure}
        window=${shown} whole=${whole} marks=${marks} layer=${layer} />`)}
      ${[...read?.ridges ?? []].map(([title, ridges]) => html`<${RidgesChart} key=${title} title=${title} ridges=${ridges} at=${view.at} />`)}
    </div></section>`;
}

/** @param {any} props */
function FigureChart({ title, curves, window: shown, whole, marks, layer }) {
  const host = useDrawn(MetricChart, () => ({
    title: `${title} of ${layer}`, curves, window: shown, whole, marks, height: 150,
    isLog: needsLog(curves.map((/** @type {Curve} */ curve) => makeLine(curve))),
    onZoom: (/** @type {number | null} */ low, /** @type {number | null} */ high) =>
      change({ from: low === null ? null : String(low), to: high === null ? null : String(high) }),
  }), [curves, String(shown), String(whole), marks.length]);
  return html`<div ref=${host}></div>`;
}

/** @param {{ title: string, ridges: Ridge[], at: number | null }} props */
function RidgesChart({ title, ridges, at }) {
  const host = useDrawn(Ridges, () => {
    const near = at === null ? null : ridges.reduce((best, { step }) => (Math.abs(step - at) < Math.abs(best - at) ? step : best), ridges[0].step);
    return { title, ridges, chosen: near };
  }, [ridges, at]);
  return html`<div ref=${host}></div>`;
}
