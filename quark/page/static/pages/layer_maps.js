// @ts-check
/** Which statistics of layers there are to see, and how their grids are asked for. */

import { fillRows, readGrid } from "../charts/heat_cells.js";
import { decodePack } from "../data/pack.js";
import { Refused, ask } from "./connection.js";

/** @typedef {import("../charts/heat_cells.js").Grid} Grid */
/**
 * @typedef {object} Statistic
 * @property {string} id
 * @property {string} title
 * @property {"layer" | "parameter"} kind
 * @property {string} field
 * @property {string} [summary]
 * @property {boolean} [isShare] 0 to 1: its size tells, not how many times its beginning it is
 */
/** @typedef {{ statistic: Statistic, grid: Grid }} LayerMap */

/** In the order in which they are preferred. @type {Statistic[]} */
export const STATISTICS = [
  { id: "gradient", title: "gradient norm", kind: "layer", field: "norm", summary: "gradient" },
  { id: "parameter-gradient", title: "gradient norm of parameters", kind: "parameter", field: "gradient_norm" },
  { id: "update", title: "update ratio", kind: "parameter", field: "update_to_parameter_ratio" },
  { id: "dead", title: "dead units", kind: "layer", field: "dead_unit_ratio", summary: "activation", isShare: true },
  { id: "activation", title: "activation norm", kind: "layer", field: "norm", summary: "activation" },
  { id: "saturation", title: "saturation", kind: "layer", field: "saturation_ratio", summary: "activation", isShare: true },
  { id: "value", title: "weight norm", kind: "parameter", field: "value_norm" },
];
export const SHOWN_AT_ONCE = 3;
const MOST_ROWS = 1000;
const MOST_BINS = 1000;

/**
 * A statistic by its ID; what is not on the list is `kind field summary`.
 * @param {string} id @returns {Statistic | null}
 */
export function findStatistic(id) {
  const known = STATISTICS.find((statistic) => statistic.id === id);
  if (known) return known;
  const [kind, field, summary] = id.split(" ");
  if ((kind !== "layer" && kind !== "parameter") || !field) return null;
  const title = [summary, field].filter(Boolean).join(" ").replaceAll("_", " ");
  return { id, title, kind, field, ...(summary ? { summary } : {}), isShare: field.endsWith("_ratio") && kind === "layer" };
}

/** The statistic that a reply offers besides. @param {string} kind @param {{ kind?: string, field: string, summary?: string | null, title?: string }} offered @returns {Statistic} */
export function nameOffered(kind, { kind: own = kind, field, summary, title }) {
  const known = STATISTICS.find((one) => one.kind === own && one.field === field && (one.summary ?? "") === (summary ?? ""));
  if (known) return known;
  const made = /** @type {Statistic} */ (findStatistic([own, field, summary].filter(Boolean).join(" ")));
  return title ? { ...made, title } : made;
}

/** Maps of parameters all have the rows of the one that has most. @template {LayerMap} T @param {T[]} maps @returns {T[]} */
export function alignParameters(maps) {
  const own = maps.filter(({ statistic }) => statistic.kind === "parameter");
  const rows = own.reduce((most, { grid }) => (grid.rows.length > most.length ? grid.rows : most), /** @type {import("../charts/heat_cells.js").GridRow[]} */ ([]));
  return maps.map((map) => (map.statistic.kind === "parameter" ? { ...map, grid: fillRows(map.grid, rows) } : map));
}

/** Whether a map has anything to show. @param {Grid} grid */
export function hasCells(grid) {
  return grid.cells.some((value) => !Number.isNaN(value)) || grid.bad.includes(1);
}

/**
 * The grid of a statistic, and what else its kind offers; null where the run has none.
 * @param {string} run @param {Statistic} statistic @param {[number, number] | null} window @param {AbortSignal} signal
 * @returns {Promise<{ grid: Grid, offered: Statistic[] } | null>}
 */
export async function askGrid(run, { kind, field, summary }, window, signal) {
  try {
    const answer = await ask(`api/runs/${encodeURIComponent(run)}/grid`, {
      kind, field, summary, rows: MOST_ROWS, bins: MOST_BINS,
      low: window && Math.floor(window[0]), high: window && Math.ceil(window[1]),
    }, signal);
    const pack = decodePack(await answer.arrayBuffer());
    const offered = (pack.head.fields ?? []).map((/** @type {any} */ one) => nameOffered(kind, one));
    return { grid: readGrid(pack), offered };
  } catch (error) {
    // What a run has nothing of is no mistake of the reader's.
    if (error instanceof Refused && error.status === 404) return null;
    throw error;
  }
}
