// @ts-check
/** Runs of a comparison as points: any setting against any metric, or over several axes at once. */

import { styleLine } from "../data/colours.js";
import { html } from "../data/html.js";
import { labelTicks, placeTicks } from "../data/ticks.js";
import { readTheme } from "../charts/theme.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { change, go } from "./links.js";
import { compareNames, writeValue } from "./texts.js";

const WIDTH = 720;
const HEIGHT = 340;
const EDGE = { left: 70, right: 20, top: 16, bottom: 44 };
const MOST_AXES = 8;
const DOT = 5;
const INSET = 10;
// Settings that are this far apart were chosen by factors.
const LOG_FROM = 20;

/** @typedef {{ title: string, low: number, high: number, ticks: { at: number, text: string }[], place: (value: unknown) => number | null }} Axis */

/**
 * An axis of what runs have: numbers from low to high, anything else by its names.
 * @param {string} title @param {unknown[]} values
 * @returns {Axis}
 */
export function makeAxis(title, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const isNumeric = known.length > 0 && known.every((value) => typeof value === "number" || value === "NaN" || value === "Infinity" || value === "-Infinity");
  if (isNumeric) {
    const numbers = known.filter((value) => typeof value === "number" && Number.isFinite(value)).map(Number);
    let low = Math.min(...numbers);
    let high = Math.max(...numbers);
    if (!(low < high)) [low, high] = Number.isFinite(low) ? [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1] : [0, 1];
    const isLog = low > 0 && high / low >= LOG_FROM;
    /** @param {number} value */
    const scale = (value) => isLog ? Math.log10(value / low) / Math.log10(high / low) : (value - low) / (high - low);
    const places = isLog ? [...new Set(numbers)].sort((a, b) => a - b) : placeTicks(low, high, 5);
    const few = isLog && places.length > 7 ? [low, high] : places;
    const texts = isLog ? few.map(String) : labelTicks(few);
    return { title, low, high, ticks: few.map((value, at) => ({ at: scale(value), text: texts[at] })),
      place: (value) => typeof value === "number" && Number.isFinite(value) ? scale(value) : null };
  }
  const names = [...new Set(known.map(writeValue))].sort(compareNames);
  const last = Math.max(1, names.length - 1);
  return { title, low: 0, high: last, ticks: names.map((name, at) => ({ at: names.length > 1 ? at / last : 0.5, text: name })),
    place: (value) => value === null || value === undefined ? null : names.length > 1 ? names.indexOf(writeValue(value)) / last : 0.5 };
}

/**
 * What each run has of some columns; a setting is `config.` with its name, all else a metric.
 * @param {string[]} runs @param {string[]} columns @param {number} version
 */
function useValues(runs, columns, version) {
  const { value, mistake } = useAnswer(async (signal) => {
    const { standings } = columns.length ? await askJson("api/standings", { run: runs, column: columns }, signal) : { standings: {} };
    return new Map(Object.entries(standings).map(([id, said]) => [id, /** @type {unknown[]} */ (/** @type {any} */ (said).values)]));
  }, [JSON.stringify([runs, columns]), version]);
  return { values: value ?? new Map(), mistake };
}

/** @param {any} data @returns {{ text: string, title: string }[]} what can stand on an axis */
function listColumns(data) {
  return [
    ...data.settings.map((/** @type {any} */ each) => ({ text: each.written, title: each.name })),
    ...data.metrics.flatMap((/** @type {any} */ metric) => ["last", "min", "max"].map((word) => (
      { text: `${word}(${metric.written})`, title: word === "last" ? metric.name : `${word}(${metric.name})` }))),
  ];
}

/** Settings that part the runs, as columns. @param {any} data @returns {string[]} */
function listGroupColumns(data) {
  return data.settings.filter((/** @type {any} */ each) => data.group_keys.includes(each.name)).map((/** @type {any} */ each) => each.written);
}

/** @param {{ label: string, value: string, columns: { text: string, title: string }[], choose: (text: string) => void }} props */
function ColumnSelect({ label, value, columns, choose }) {
  return html`<label>${label} <select value=${value} onChange=${(/** @type {any} */ event) => choose(event.currentTarget.value)}>
    ${!columns.some((column) => column.text === value) && html`<option value=${value}>${value}</option>`}
    ${columns.map((column) => html`<option key=${column.text} value=${column.text}>${column.title}</option>`)}</select></label>`;
}

/** @param {{ data: any, query: URLSearchParams, hidden: Set<number>, version: number }} props */
export function Scatter({ data, query, hidden, version }) {
  const columns = listColumns(data);
  const main = data.metrics.find((/** @type {any} */ metric) => metric.key === data.main) ?? data.metrics[0];
  const x = query.get("ax") ?? listGroupColumns(data)[0] ?? columns[0]?.text ?? "";
  const y = query.get("ay") ?? (main ? `last(${main.written})` : columns[0]?.text ?? "");
  const runs = Object.keys(data.runs);
  const { values, mistake } = useValues(runs, [x, y].filter(Boolean), version);
  if (!columns.length) return html`<p class="notice-line">These runs have no config values and no metrics.</p>`;
  const all = runs.map((id) => values.get(id) ?? []);
  const axes = [0, 1].map((at) => makeAxis([x, y][at], all.map((row) => row[x === y ? 0 : at])));
  const [wide, tall] = [WIDTH - EDGE.left - EDGE.right, HEIGHT - EDGE.top - EDGE.bottom];
  // The outermost do not lie on the axes.
  const toX = (/** @type {number} */ at) => EDGE.left + INSET + at * (wide - 2 * INSET);
  const toY = (/** @type {number} */ at) => EDGE.top + INSET + (1 - at) * (tall - 2 * INSET);
  const theme = readTheme();
  const dots = data.sides.flatMap((/** @type {any} */ side, /** @type {number} */ number) => hidden.has(number) ? [] : side.runs.map((/** @type {string} */ id) => {
    const row = values.get(id) ?? [];
    const [across, up] = [axes[0].place(row[0]), axes[1].place(row[x === y ? 0 : 1])];
    return { id, side, number, row, x: across === null ? null : toX(across), y: up === null ? null : toY(up) };
  }));
  const drawn = dots.filter((/** @type {any} */ dot) => dot.x !== null && dot.y !== null);
  return html`<div class="bar"><${ColumnSelect} label="across" value=${x} columns=${columns} choose=${(/** @type {string} */ ax) => change({ ax })} />
      <${ColumnSelect} label="up" value=${y} columns=${columns} choose=${(/** @type {string} */ ay) => change({ ay })} /></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    <svg class="scatter" role="img" aria-label=${`${y} against ${x}, ${drawn.length} runs`} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`}>
      <path class="axis" d=${`M${EDGE.left} ${EDGE.top}V${HEIGHT - EDGE.bottom}H${WIDTH - EDGE.right}`} />
      ${axes[0].ticks.map((tick) => html`<text key=${`x${tick.text}`} x=${toX(tick.at)} y=${HEIGHT - EDGE.bottom + 16} text-anchor="middle">${tick.text}</text>`)}
      ${axes[1].ticks.map((tick) => html`<text key=${`y${tick.text}`} x=${EDGE.left - 6} y=${toY(tick.at) + 4} text-anchor="end">${tick.text}</text>`)}
      <text class="axis-title" x=${EDGE.left + wide / 2} y=${HEIGHT - 6} text-anchor="middle">${x}</text>
      ${drawn.map((/** @type {any} */ dot) => html`<circle key=${dot.id} data-run=${dot.id} cx=${dot.x} cy=${dot.y} r=${DOT} fill=${styleLine(dot.number, theme).colour}>
        <title>${`${data.runs[dot.id].name || dot.id} (${dot.side.name}): ${writeValue(dot.row[0])}, ${writeValue(dot.row[1] ?? dot.row[0])}`}</title></circle>`)}
    </svg>
    ${drawn.length < dots.length && html`<p class="quiet">${dots.length - drawn.length} of ${dots.length} runs do not have both values.</p>`}`;
}

/** @param {{ data: any, query: URLSearchParams, hidden: Set<number>, version: number }} props */
export function Parallel({ data, query, hidden, version }) {
  const columns = listColumns(data);
  const main = data.metrics.find((/** @type {any} */ metric) => metric.key === data.main) ?? data.metrics[0];
  const wanted = query.getAll("axis");
  const chosen = wanted.length ? wanted.slice(0, MOST_AXES) : [
    ...listGroupColumns(data).slice(0, MOST_AXES - 1),
    ...(main ? [`last(${main.written})`] : []),
  ];
  const runs = Object.keys(data.runs);
  const { values, mistake } = useValues(runs, chosen, version);
  const theme = readTheme();
  /** @param {string[]} next */
  const choose = (next) => {
    const url = new URL(location.href);
    url.searchParams.delete("axis");
    for (const text of next) url.searchParams.append("axis", text);
    go(url.href, { replace: true });
  };
  const axes = chosen.map((text, at) => makeAxis(text, runs.map((id) => values.get(id)?.[at])));
  const tall = HEIGHT - EDGE.top - EDGE.bottom;
  /** @param {number} at */
  const toX = (at) => EDGE.left + (chosen.length > 1 ? at / (chosen.length - 1) : 0.5) * (WIDTH - 2 * EDGE.left);
  const lines = data.sides.flatMap((/** @type {any} */ side, /** @type {number} */ number) => hidden.has(number) ? [] : side.runs.map((/** @type {string} */ id) => {
    const points = axes.map((axis, at) => ({ at, place: axis.place(values.get(id)?.[at]) })).filter((point) => point.place !== null);
    return { id, number, side, d: points.map((point, at) => `${at ? "L" : "M"}${toX(point.at)} ${EDGE.top + (1 - Number(point.place)) * tall}`).join("") };
  }));
  return html`<div class="bar"><${ColumnSelect} label="add an axis" value="" columns=${[{ text: "", title: "…" }, ...columns.filter((column) => !chosen.includes(column.text))]}
      choose=${(/** @type {string} */ text) => text && choose([...chosen, text])} />
      ${chosen.map((text) => html`<button key=${text} class="plain" onClick=${() => choose(chosen.filter((other) => other !== text))}>without ${text}</button>`)}</div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    <svg class="scatter" role="img" aria-label=${`${runs.length} runs over ${chosen.join(", ")}`} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`}>
      ${lines.map((/** @type {any} */ line) => html`<path key=${line.id} data-run=${line.id} class="parallel" d=${line.d} stroke=${styleLine(line.number, theme).colour}
        stroke-dasharray=${styleLine(line.number, theme).dash.join(" ") || undefined}><title>${`${data.runs[line.id].name || line.id} (${line.side.name})`}</title></path>`)}
      ${axes.map((axis, at) => html`<g key=${axis.title}><path class="axis" d=${`M${toX(at)} ${EDGE.top}V${HEIGHT - EDGE.bottom}`} />
        ${axis.ticks.map((tick) => html`<text key=${tick.text} x=${toX(at) + 5} y=${EDGE.top + (1 - tick.at) * tall + 4}>${tick.text}</text>`)}
        <text class="axis-title" x=${toX(at)} y=${HEIGHT - 12} text-anchor="middle">${axis.title}</text></g>`)}
    </svg>`;
}
