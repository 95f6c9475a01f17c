// @ts-check
/** Payloads of artifacts that can be looked at here: images by step, texts and JSON as text. */

import { html } from "../data/html.js";
import { useState } from "../vendor/hooks.js";
import { askJson } from "./connection.js";
import { change, root } from "./links.js";
import { writeBytes, writeMany, writeStep } from "./texts.js";

/** Of each name the newest image up to a step, and all steps there are. @param {any[]} rows @param {number} at */
export function chooseImages(rows, at) {
  const images = rows.filter((row) => row.is_image && row.url);
  const steps = [...new Set(images.map((row) => row.step).filter((step) => step !== null))].sort((a, b) => a - b);
  /** @type {Map<string, any>} */
  const shown = new Map();
  for (const row of [...images].sort((a, b) => (a.step ?? -1) - (b.step ?? -1))) {
    if (row.step === null || row.step <= at) shown.set(row.name, row);
  }
  return { steps, shown: [...shown.values()] };
}

/** Images by step, with one slider for all of them. @param {{ rows: any[], query: URLSearchParams }} props */
export function Images({ rows, query }) {
  const asked = Number(query.get("at") ?? NaN);
  const { steps, shown } = chooseImages(rows, Number.isFinite(asked) ? asked : Infinity);
  if (!rows.some((row) => row.is_image && row.url)) return null;
  const place = Number.isFinite(asked) ? steps.findLastIndex((step) => step <= asked) : steps.length - 1;
  return html`${steps.length > 1 && html`<div class="bar"><label>images at step <input id="at" type="range" min="0" max=${steps.length - 1} step="1" value=${Math.max(0, place)}
      aria-valuetext=${`step ${writeStep(steps[Math.max(0, place)])}`}
      onInput=${(/** @type {any} */ event) => change({ at: String(steps[Number(event.currentTarget.value)]) }, { together: true })} />
      <output>${writeStep(steps[Math.max(0, place)])} of ${writeMany(steps.length, "step")}</output></label></div>`}
    <ul class="images">${shown.map((row) => html`<li key=${row.name}><figure><img loading="lazy" alt=${`picture ${row.name}${row.step === null ? "" : ` at step ${row.step}`}`}
      src=${new URL(row.url, root).href} /><figcaption>${row.name}${row.step === null ? "" : ` · step ${writeStep(row.step)}`}</figcaption></figure></li>`)}</ul>`;
}

/** Whether a payload is shown as text. @param {any} row */
export function isText(row) {
  const type = row.media_type ?? "";
  return Boolean(row.url) && (type.startsWith("text/plain") || type.startsWith("application/json"));
}

/** A text as it is, read when it is asked for. @param {{ run: string, row: any }} props */
export function TextPayload({ run, row }) {
  const [text, setText] = useState(/** @type {string | null} */ (null));
  const [says, setSays] = useState("");
  const read = async () => {
    if (text !== null) return;
    try {
      const found = await askJson(`api/runs/${encodeURIComponent(run)}/text`, { sha256: row.sha256 });
      setText(found.text);
      setSays(found.is_cut ? `the beginning of ${writeBytes(found.size_bytes)}; the download has all` : "");
    } catch (error) {
      setSays(error instanceof Error ? error.message : String(error));
    }
  };
  return html`<details onToggle=${read}><summary>Show<span class="hidden"> ${row.name}</span></summary>
    ${text !== null && html`<pre class="payload" tabindex="0">${text}</pre>`}${says && html`<p class="quiet">${says}</p>`}</details>`;
}
