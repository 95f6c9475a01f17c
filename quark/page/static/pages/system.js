// @ts-check
/** What steps took and what the machine did: ranks that lag or are silent first, then each figure over steps. */

import { HeatMap } from "../charts/heat_map.js";
import { readGrid } from "../charts/heat_cells.js";
import { MetricChart } from "../charts/metric_chart.js";
import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useAnswer } from "./answers.js";
import { ask } from "./connection.js";
import { useDrawn } from "./drawing.js";
import { change } from "./links.js";
import { useRarely } from "./pace.js";
import { writeNumber, writeStep } from "./texts.js";

const BINS = 600;
const MOST_LISTED = 20;
const MOST_LINES = 16;
const LAGS = 1.1;
const RATES = ["tokens_per_s", "samples_per_s", "flops_per_s", "mfu_percent"].map((name) => `system/runtime/${name}`);

/** @typedef {import("../data/pack.js").Pack} Pack */

/** A line for each rank; of many those that are listed first. @param {Pack} pack */
export function readRankCurves({ head, columns }) {
  const steps = columns.get("step") ?? new Float64Array(0);
  const cells = columns.get("cells") ?? new Float32Array(0);
  const names = head.rows.map((/** @type {any} */ row) => row.name);
  const listed = head.ranks.slice(0, MOST_LINES).map((/** @type {any} */ rank) => `rank ${rank.rank}`);
  /** @type {Map<string, any>} */
  const own = new Map();
  const said = names.filter((/** @type {string} */ name) => listed.includes(name)).map((/** @type {string} */ name, /** @type {number} */ at) => {
    const row = names.indexOf(name);
    const values = cells.subarray(row * steps.length, (row + 1) * steps.length);
    const kept = [...values.keys()].filter((i) => Number.isFinite(values[i]));
    own.set(`${at}.step`, Float64Array.from(kept, (i) => steps[i]));
    own.set(`${at}.mean`, Float64Array.from(kept, (i) => values[i]));
    return { key: head.field, name: head.title, rank: Number(name.slice("rank ".length)), points: kept.length, exact: head.exact };
  });
  return readCurves({ head: { ...head, curves: said }, columns: own });
}

/** @param {string} run @param {[number, number] | null} window @param {number} version @returns {{ value: Pack[] | null, mistake: string }} */
function useFigures(run, window, version) {
  return useAnswer(async (signal) => {
    const path = `api/runs/${encodeURIComponent(run)}/system`;
    const query = { bins: BINS, low: window && Math.floor(window[0]), high: window && Math.ceil(window[1]) };
    /** @param {string} [field] */
    const read = async (field) => decodePack(await (await ask(path, { ...query, field }, signal)).arrayBuffer());
    const first = await read();
    const fields = first.head.fields.map((/** @type {any} */ each) => each.field);
    const rest = await Promise.all(fields.filter((/** @type {string} */ field) => field !== first.head.field).map(read));
    const found = new Map([first, ...rest].map((pack) => [pack.head.field, pack]));
    return fields.map((/** @type {string} */ field) => /** @type {Pack} */ (found.get(field)));
  }, [run, String(window), version]);
}

/** Of each rate that was measured the curves of its ranks. @param {string} run @param {[number, number] | null} window @param {number} version */
function useRates(run, window, version) {
  const { value } = useAnswer(async (signal) => {
    const query = { key: RATES, ranks: "each", entries: BINS, low: window && Math.floor(window[0]), high: window && Math.ceil(window[1]) };
    const curves = readCurves(decodePack(await (await ask(`api/runs/${encodeURIComponent(run)}/series`, query, signal)).arrayBuffer()));
    return RATES.map((key) => curves.filter((curve) => curve.key === key && curve.step.length > 0)).filter((found) => found.length > 0);
  }, [run, String(window), version]);
  return value;
}

/** @param {{ run: string, query: URLSearchParams, version: number, absent: Record<string, string> }} props */
export function System({ run, query, version, absent }) {
  const [from, to] = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
  const window = /** @type {[number, number] | null} */ (from <= to && (query.get("x") ?? "step") === "step" ? [from, to] : null);
  const { value: packs, mistake } = useFigures(run, window, useRarely(version));
  const rates = useRates(run, window, useRarely(version));
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!packs) return html`<p class="quiet">…</p>`;
  if (!packs.length && !rates?.length) return html`<p class="notice-line">${absent?.telemetry ?? "No telemetry was logged. quark.SystemTelemetry records step times and system metrics."}</p>`;
  const pace = packs.find(({ head }) => head.field === "step_time_ms" && head.ranks.length > 1);
  return html`${pace && html`<${Ranks} pack=${pace} />`}
    ${rates && rates.length > 0 && html`<h2>Throughput by rank</h2><div class="charts">${rates.map((curves) => html`<${Tile} key=${curves[0].key} of=${curves} window=${window}
      describe=${() => ({ title: curves[0].name, curves: curves.slice(0, MOST_LINES) })} />`)}</div>`}
    <div class="charts">${packs.map((pack) => html`<${Tile} key=${pack.head.field} of=${pack} window=${window}
      describe=${() => ({ title: pack.head.title, curves: readRankCurves(pack), whole: pack.head.steps })} />`)}</div>
    ${packs.some(({ head }) => !head.exact) && html`<p class="quiet">Each entry is the maximum of its steps.</p>`}`;
}

/** @param {number | null} low @param {number | null} high */
function zoom(low, high) {
  change({ from: low === null ? null : String(Math.round(low)), to: high === null ? null : String(Math.round(high)) });
}

/** @param {{ pack: Pack }} props */
function Ranks({ pack }) {
  const { ranks, steps } = pack.head;
  const host = useDrawn(HeatMap, () => {
    if (!steps) return null;
    return {
      title: "step time by rank", grid: readGrid(pack), mode: /** @type {"absolute"} */ ("absolute"),
      whole: /** @type {[number, number]} */ (steps), window: null, onZoom: zoom,
    };
  }, [pack]);
  const grave = ranks.filter((/** @type {any} */ rank) => rank.is_silent || rank.ratio > LAGS);
  return html`<section aria-labelledby="ranks-title"><h2 id="ranks-title">${ranks.length} ranks${grave.length ? "" : ": all take about the same time and send data"}</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Ranks"><table class="plain-table ranks"><thead><tr><th scope="col">rank</th><th scope="col" class="number">step, ms (median)</th>
      <th scope="col" class="number">vs. usual</th><th scope="col" class="number">newest step</th><th scope="col">is</th></tr></thead>
      <tbody>${ranks.slice(0, MOST_LISTED).map((/** @type {any} */ rank) => html`<tr key=${rank.rank} data-rank=${rank.rank}><th scope="row">rank ${rank.rank}</th>
        <td class="number">${writeNumber(rank.median)}</td><td class="number">${rank.ratio === null ? "" : `× ${writeNumber(rank.ratio)}`}</td>
        <td class="number">${writeStep(rank.last_step)}</td><td>${rank.is_silent ? "? silent" : rank.ratio > LAGS ? "▲ slower" : ""}</td></tr>`)}</tbody></table></div>
    ${ranks.length > MOST_LISTED && html`<p class="quiet">and ${ranks.length - MOST_LISTED} more ranks</p>`}
    <div ref=${host}></div></section>`;
}

/** Of what the chart is tells whether it is drawn anew. @param {{ of: any, window: [number, number] | null, describe: () => any }} props */
function Tile({ of, window: shown, describe }) {
  const host = useDrawn(MetricChart, () => ({ ...describe(), window: shown, onZoom: zoom }), [of, String(shown)]);
  return html`<div class="tile"><div ref=${host} class="tile-chart"></div></div>`;
}
