// @ts-check
/** What a finding rests on: its curve, the threshold dashed, the steps that it speaks of shaded. */

import { writeStep } from "../pages/texts.js";
import { needsLog } from "./fitting.js";
import { makeLine } from "./lines.js";
import { MetricChart } from "./metric_chart.js";

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {{ step?: number | null, step_end?: number | null, severity?: string, title?: string, fact?: string, summary?: string, id?: string }} Finding */
/** @typedef {{ name?: string | null, field?: string | null, statistics?: string | null, observed?: unknown,
 *   threshold?: unknown, from?: number | null, to?: number | null }} Evidence */
/** @typedef {import("./lines.js").Line} Line */
/** @typedef {{ curves: Curve[], finding: Finding, evidence: Evidence, title?: string, height?: number,
 *   onZoom?: (low: number | null, high: number | null) => void }} EvidenceChartProps */

const HEIGHT = 128;
// An observation is a point of the curve up to the digits that its text has.
const SAME_SHARE = 1e-3;

/** The chart of one piece of evidence. Its axis is chosen by the values: a log one where they span a thousandfold. */
export class EvidenceChart {
  /** @param {HTMLElement} host @param {EvidenceChartProps} props */
  constructor(host, props) {
    this.props = props;
    this.chart = new MetricChart(host, this.translate());
  }

  /** @param {Partial<EvidenceChartProps>} changes */
  update(changes) {
    this.props = { ...this.props, ...changes };
    this.chart.update(this.translate());
  }

  destroy() {
    this.chart.destroy();
  }

  /** @returns {import("./metric_chart.js").MetricChartProps} */
  translate() {
    const { finding, evidence, onZoom, title, height } = this.props;
    const curves = chooseCurves(this.props.curves, evidence, finding);
    const lines = curves.map((curve) => makeLine(curve));
    const limit = readLimit(evidence, lines);
    const since = finding.step ?? null;
    return {
      title: title && curves === this.props.curves ? title : nameEvidence(evidence, curves), curves, height: height ?? HEIGHT, onZoom, type: "evidence",
      isLog: needsLog(lines) && (limit === null || limit > 0), threshold: limit, shade: findShade(finding, evidence),
      marks: since === null ? [] : [{ step: since, text: `since ${writeStep(since)}`, severity: finding.severity ?? "info", id: finding.id }],
    };
  }
}

/** The steps that a finding speaks of: its own where its evidence is of one moment. @param {Finding} finding @param {Evidence} evidence @returns {[number, number] | null} */
function findShade({ step, step_end: end }, { from, to }) {
  const isMoment = from === to || typeof to !== "number";
  const first = isMoment ? step ?? from : from;
  const last = isMoment ? end ?? to ?? first : to;
  return typeof first === "number" && typeof last === "number" ? [first, last] : null;
}

/** Of activations and gradients those that the finding is about, where the evidence does not say. @param {Curve[]} curves @param {Evidence} evidence @param {Finding} finding */
export function chooseCurves(curves, { statistics, name }, { title = "", fact = "", summary = "" }) {
  const kinds = [...new Set(curves.map((curve) => curve.summary).filter(Boolean))];
  if (kinds.length < 2) return curves;
  const text = `${title} ${fact || summary} ${name ?? ""}`.toLowerCase();
  const places = kinds.map((kind) => ({ kind, at: text.indexOf(kind) })).filter(({ at }) => at >= 0);
  const wanted = statistics ?? places.sort((a, b) => a.at - b.at)[0]?.kind ?? kinds[0];
  const chosen = curves.filter((curve) => curve.summary === wanted);
  return chosen.length ? chosen : curves;
}

/** @param {Evidence} evidence @param {Curve[]} [curves] */
export function nameEvidence({ name, field, statistics }, curves = []) {
  const figure = [statistics ?? curves[0]?.summary, field ?? curves[0]?.field].filter(Boolean).join(" ").replaceAll("_", " ");
  return figure ? `${figure}${name ? ` of ${name}` : ""}` : name ?? "evidence";
}

/**
 * The threshold, where what was observed is a point of the curve: a limit of a count, a share or a ratio is
 * not one of its values.
 * @param {Evidence} evidence @param {Line[]} lines
 */
export function readLimit({ observed, threshold }, lines) {
  if (typeof threshold !== "number" || !Number.isFinite(threshold) || typeof observed !== "number" || observed === 0) return null;
  /** @param {number | undefined} value */
  const isSame = (value) => value !== undefined && Math.abs(value - observed) <= SAME_SHARE * Math.abs(observed);
  const isThere = lines.some(({ mean, low, high }) => mean.some((value, i) => isSame(value) || isSame(low?.[i]) || isSame(high?.[i])));
  return isThere ? threshold : null;
}
