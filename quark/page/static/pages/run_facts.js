// @ts-check
/** What a run was made with and what it said, as it stands on its page and in a report. */

import { html } from "../data/html.js";
import { FreeText } from "./badges.js";
import { writeSeconds, writeStep, writeTime, writeValue } from "./texts.js";

/** @param {{ text: string | null }} props */
export function Traceback({ text }) {
  return text && html`<details class="traceback"><summary>Traceback</summary><pre>${text}</pre></details>`;
}

/** @param {{ rows: any[] }} props */
export function EventRows({ rows }) {
  return html`<ol class="events">${rows.map((row) => html`<li key=${row.id} class=${`level-${row.severity}`}>
      <time datetime=${row.at} title=${row.at}>${writeTime(row.at)}</time>
      <b>${row.severity}</b> <span class="quiet">${row.logger || row.type}${row.step === null ? "" : ` · step ${writeStep(row.step)}`}${row.rank ? ` · rank ${row.rank}` : ""}</span>
      <p><${FreeText} text=${row.message ?? ""} /></p>
      <${Traceback} text=${row.traceback} />
      ${row.payload && Object.keys(row.payload).length > 0 && html`<details><summary>Payload</summary><pre>${JSON.stringify(row.payload, null, 2)}</pre></details>`}
    </li>`)}</ol>`;
}

/** Nested values as one line each. @param {unknown} value @param {string} [path] @returns {[string, unknown][]} */
export function flatten(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[path, value]];
  const entries = Object.entries(value);
  if (!entries.length) return path ? [[path, "{}"]] : [];
  return entries.flatMap(([key, item]) => flatten(item, path ? `${path}.${key}` : key));
}

/** Source and place. @param {any} origin */
const writeOrigin = (origin) => (origin.place ? `${origin.source} (${origin.place})` : origin.source);

/** What gave a setting its value, and on hover what that replaced. @param {{ chain: any[] }} props */
function Origin({ chain }) {
  const [newest, ...older] = chain;
  const story = older.map((each) => `before: ${writeValue(each.value)} by ${writeOrigin(each)}`).join("\n");
  return html`<span class="quiet" title=${story || null}>${writeOrigin(newest)}${older.length > 0 && ` · ${older.length} before`}</span>`;
}

/** @param {{ title: string, id: string, values: unknown, by?: string, origins?: Record<string, any[]> }} props */
function Values({ title, id, values, by = "", origins = {} }) {
  const rows = flatten(values ?? {});
  const told = Object.keys(origins).length > 0;
  return html`<section aria-labelledby=${id + by}><h2 id=${id}>${title}</h2>
    ${rows.length ? html`<table class="plain-table values"><tbody>${rows.map(([key, value]) => html`<tr key=${key}><th scope="row">${key}</th>
      <td>${typeof value === "string" ? html`<${FreeText} text=${value} />` : writeValue(value)}</td>
      ${told && html`<td>${Object.hasOwn(origins, key) && html`<${Origin} chain=${origins[key]} />`}</td>`}</tr>`)}</tbody></table>`
      : html`<p class="quiet">None.</p>`}</section>`;
}

/** Time by block. @param {{ rows: any[], id: string, by?: string }} props */
function Timers({ rows, id, by = "" }) {
  return html`<section aria-labelledby=${id + by}><h2 id=${id}>Timers</h2><div class="scrolls" tabindex="0" role="region" aria-label="Time by block"><table class="plain-table">
    <thead><tr><th scope="col">timer</th>${["share", "count", "mean", "p50", "p99", "first"].map((name) => html`<th key=${name} scope="col" class="number">${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.key}><th scope="row">${row.key}</th>
      <td class="number">${row.share === null ? "–" : `${(100 * row.share).toFixed(1)} %`}</td><td class="number">${row.count}</td>
      ${[row.mean, row.p50, row.p99, row.first].map((seconds, place) => html`<td key=${place} class="number">${writeSeconds(seconds)}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

/**
 * @param {{ data: any, prefix?: string, by?: string }} props where several runs are on a page: what
 *   the headings' IDs begin with, and the ID of the run's own heading, with a space before it
 */
export function Config({ data, prefix = "", by = "" }) {
  const { run } = data;
  const facts = { id: run.id, path: run.path, command: run.user_command, host: run.host, commit: run.git_commit,
    branch: run.branch, parent: run.parent, groups: run.groups?.length ? run.groups.join(", ") : null,
    forked: Number.isFinite(run.fork_step) ? `from ${run.parent} at step ${run.fork_step}` : null };
  return html`${run.notes && html`<section aria-labelledby=${`${prefix}notes${by}`}><h2 id=${`${prefix}notes`}>Notes</h2><p class="free"><${FreeText} text=${run.notes} /></p></section>`}
    ${data.timers?.length > 0 && html`<${Timers} rows=${data.timers} id=${`${prefix}timers`} by=${by} />`}
    <${Values} title="Configuration" id=${`${prefix}config`} by=${by} values=${data.config} origins=${data.config_origins ?? {}} />
    ${data.config_notes?.length > 0 && html`<p class="free"><${FreeText} text=${[data.config_notes].flat().map(writeValue).join("\n")} /></p>`}
    ${Object.keys(data.fields ?? {}).length > 0 && html`<${Values} title="Fields" id=${`${prefix}fields`} by=${by} values=${data.fields} />`}
    <${Values} title="The run" id=${`${prefix}facts`} by=${by} values=${Object.fromEntries(Object.entries(facts).filter(([, value]) => value !== null && value !== undefined))} />
    <${Values} title="Environment" id=${`${prefix}environment`} by=${by} values=${data.environment} />`;
}
