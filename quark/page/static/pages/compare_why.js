// @ts-check
/** Why one side's result is not that of another: verdict, since when, and what is to blame. */

import { html } from "../data/html.js";
import { useSaid } from "./answers.js";

const CAUSES = new Set(["Probably", "Possibly", "Unlikely", "Differs"]);

/** @param {string} text */
function capitalise(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** @param {{ judged: string, baseline: string, names: [string, string], version: number }} props */
export function Explanation({ judged, baseline, names, version }) {
  const said = useSaid("api/compare/why", { side: [judged, baseline] }, version);
  if (!said) return html`<p class="quiet" aria-busy="true">It is being looked into …</p>`;
  if (said.state === "failed") return html`<p class="mistake" role="alert">${said.note}</p>`;
  const { result } = said;
  const causes = result.rows.filter((/** @type {any} */ row) => CAUSES.has(row.label));
  const others = result.rows.filter((/** @type {any} */ row) => !CAUSES.has(row.label));
  return html`<section class="why" aria-labelledby="why-title"><h2 id="why-title">Why ${names[0]} is not as ${names[1]}</h2>
    <p class="why-verdict" data-verdict=${result.verdict}><strong>${result.headline}</strong></p>
    <p>${capitalise(result.reason)}.</p>
    <p>${capitalise(result.first_difference.summary)}.</p>
    ${causes.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Causes"><table class="plain-table causes"><thead><tr>
      <th scope="col">standing</th><th scope="col">kind</th><th scope="col">what differs</th><th scope="col">why</th></tr></thead>
      <tbody>${causes.map((/** @type {any} */ row, /** @type {number} */ number) => html`<tr key=${number} data-standing=${row.label}>
        <th scope="row">${row.label}</th><td>${row.kind}</td><td><code>${row.place}</code></td><td>${row.words}</td></tr>`)}</tbody></table></div>`}
    ${others.length > 0 && html`<dl class="why-rest">${others.map((/** @type {any} */ row, /** @type {number} */ number) => html`<dt key=${`t${number}`}>${row.label}</dt>
      <dd key=${`d${number}`}>${row.label === "To be sure" ? html`<code>${row.place}</code>` : row.place}${row.words && html` <span class="quiet">${row.words}</span>`}</dd>`)}</dl>`}
    ${result.notes.length > 0 && html`<ul class="remarks">${result.notes.map((/** @type {string} */ note) => html`<li key=${note} class="quiet">${note}</li>`)}</ul>`}
  </section>`;
}
