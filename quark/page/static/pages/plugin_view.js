// @ts-check
/** A tab that a plugin adds to a run: a table. */

import { html } from "../data/html.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { VIEW } from "./run_tabs.js";
import { spell, writeMany, writeValue } from "./texts.js";

/** @typedef {{ columns: string[], rows: unknown[][], count: number }} ViewTable */

/** @param {{ run: string, query: URLSearchParams, version: unknown }} props */
export function PluginView({ run, query, version }) {
  const name = String(query.get("tab")).slice(VIEW.length);
  const path = `api/runs/${encodeURIComponent(run)}/views/${encodeURIComponent(name)}`;
  const { value, mistake } = useAnswer((signal) => /** @type {Promise<ViewTable>} */ (askJson(path, {}, signal)), [path, version]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!value) return html`<p class="quiet">…</p>`;
  const { columns, rows, count } = value;
  const kinds = columns.map((_, at) => rows.some((row) => typeof row[at] === "number") ? "number" : "");
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table class="plain-table view"><thead><tr>
    ${columns.map((column, at) => html`<th key=${at} scope="col" class=${kinds[at]}>${spell(column)}</th>`)}</tr></thead>
    <tbody>${rows.map((row, line) => html`<tr key=${line}>${row.map((cell, at) => html`<td key=${at} class=${kinds[at]}>${spell(writeValue(cell))}</td>`)}</tr>`)}</tbody></table></div>
    ${count > rows.length && html`<p class="quiet">The first ${rows.length} of ${writeMany(count, "row")}</p>`}`;
}
