// @ts-check
/** Versions of artifacts: what this run has made and used, under which aliases, and who uses it besides. */

import { html } from "../data/html.js";
import { useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { makeLink } from "./links.js";
import { writeBytes, writeMany, writeTime } from "./texts.js";

/** Read when it is opened: it looks at each run of the project. @param {{ run: string }} props */
export function Lineage({ run }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details class="lineage" onToggle=${(/** @type {any} */ event) => setOpen(event.currentTarget.open)}><summary>Versions and lineage</summary>
    ${isOpen && html`<${Versions} run=${run} />`}</details>`;
}

/** @param {{ run: string }} props */
function Versions({ run }) {
  const { value, mistake } = useAnswer((signal) => askJson(`api/runs/${encodeURIComponent(run)}/lineage`, {}, signal), [run]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!value) return html`<p class="quiet">…</p>`;
  return html`<h3>Used by this run</h3>
    ${value.used.length === 0 && value.gone.length === 0 && html`<p class="quiet">It has used no artifact of another run, by session.use_artifact.</p>`}
    ${value.used.length > 0 && html`<${Table} rows=${value.used} isUsed=${true} />`}
    ${value.gone.map((/** @type {string} */ name) => html`<p key=${name} class="notice-line">${name} was used, and is no longer there.</p>`)}
    <h3>Made by this run</h3>
    ${value.made.length > 0 ? html`<${Table} rows=${value.made} isUsed=${false} />` : html`<p class="quiet">Nothing.</p>`}
    ${value.made_count > value.made.length && html`<p class="quiet">the newest of ${writeMany(value.made_count, "version")}</p>`}`;
}

/** @param {{ rows: any[], isUsed: boolean }} props */
function Table({ rows, isUsed }) {
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${isUsed ? "Used" : "Made"}><table class="plain-table"><thead><tr><th scope="col">version</th><th scope="col">aliases</th><th scope="col">type</th>
      <th scope="col" class="number">size</th><th scope="col">logged</th>${isUsed && html`<th scope="col">made by</th>`}<th scope="col">used by</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.name}><th scope="row">${row.name}</th><td>${row.aliases.join(", ")}</td><td>${row.type.replaceAll("_", " ")}</td>
      <td class="number">${writeBytes(row.size_bytes)}</td><td>${writeTime(row.at)}</td>
      ${isUsed && html`<td><${RunLink} run=${row.run_id} name=${row.run_name} /></td>`}
      <td>${row.used_by.map((/** @type {string} */ one) => html`<${RunLink} key=${one} run=${one} name=${null} /> `)}</td></tr>`)}</tbody></table></div>`;
}

/** @param {{ run: string, name: string | null }} props */
function RunLink({ run, name }) {
  return html`<a href=${makeLink(["run", run])}>${name ?? run}</a>`;
}
