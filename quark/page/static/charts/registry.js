// @ts-check
/** The charts that are on the page, as data: `window.quark.charts`, for tests and for the curious. */

/** @typedef {{ name: string, type: string, describe(): Record<string, unknown> }} Described */

/** @type {Set<Described>} */
const charts = new Set();

/** @param {Described} chart @returns {() => void} takes it out again */
export function registerChart(chart) {
  charts.add(chart);
  return () => void charts.delete(chart);
}

/** Scales, lines and marks of all charts, in the order in which they were made. */
export function describeCharts() {
  return [...charts].map((chart) => chart.describe());
}

/** The chart of this name, before evidence that is drawn of the same; undefined where there is none. @param {string} name */
export function findChart(name) {
  const own = [...charts].filter((chart) => chart.name === name);
  return (own.find((chart) => chart.type !== "evidence") ?? own[0])?.describe();
}

/** @type {any} */
const page = globalThis;
page.quark = Object.assign(page.quark ?? {}, { charts: { describe: describeCharts, find: findChart } });
