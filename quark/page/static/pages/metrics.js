// @ts-check
/** The metrics of a run as a list: read, grouped, and which findings are about which. */

import { isGrave } from "./findings.js";

/** @typedef {{ key: string, name: string, group: string, count: number, non_finite: number,
 *   last: unknown, last_step: number | null }} Metric */

/** @type {WeakMap<object, Metric[]>} */
const read = new WeakMap();

/** Rows of the answer as objects, the same for the same answer. @param {{ fields: string[], rows: unknown[][] }} table @returns {Metric[]} */
export function readMetrics(table) {
  const known = read.get(table);
  if (known) return known;
  const metrics = table.rows.map((row) => {
    /** @type {any} */
    const metric = {};
    for (let place = 0; place < row.length; place++) metric[table.fields[place]] = row[place];
    return metric;
  });
  read.set(table, metrics);
  return metrics;
}

/**
 * Groups in the order of their first metric.
 * @param {Metric[]} metrics @param {string} find
 * @returns {Map<string, Metric[]>}
 */
export function groupMetrics(metrics, find) {
  const words = find.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map();
  for (const metric of metrics) {
    const name = metric.name.toLowerCase();
    if (!words.every((word) => name.includes(word))) continue;
    const group = groups.get(metric.group);
    if (group) group.push(metric);
    else groups.set(metric.group, [metric]);
  }
  return groups;
}

/** Findings about this metric, to be marked in its chart. @param {any[]} findings @param {any} metric */
export function listMarks(findings, metric) {
  return findings.filter((finding) => isGrave(finding) && finding.step !== null && finding.step !== undefined
    && (finding.culprit === metric.name || finding.culprit === metric.key
      || finding.evidence?.some((/** @type {any} */ piece) => piece.kind === "metric" && (piece.source === metric.key || piece.name === metric.name))))
    .map((finding) => ({ step: finding.step, text: finding.title, severity: finding.severity, id: finding.id }));
}
