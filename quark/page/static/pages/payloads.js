// @ts-check
/** Payloads of artifacts that can be looked at here: images by step, texts and JSON as text. */

import { html } from "../data/html.js";
import { useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { change } from "./links.js";
import { Picture } from "./pictures.js";
import { writeBytes, writeMany, writeStep } from "./texts.js";

/** Images by step, with one slider for all of them. @param {{ run: string, query: URLSearchParams, version: number }} props */
export function Images({ run, query, version }) {
  const at = query.get("at");
  const { value, mistake } = useAnswer((signal) => askJson(`api/runs/${encodeURIComponent(run)}/images`,
    { at, text: query.get("text") || null }, signal), [run, at, query.get("text"), version]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!value?.images.length && !value?.steps.length) return null;
  const { steps, images } = value;
  const place = at === null ? steps.length - 1 : Math.max(0, steps.findLastIndex((/** @type {number} */ step) => step <= Number(at)));
  return html`${steps.length > 1 && html`<div class="bar"><label>images at step <input id="at" type="range" min="0" max=${steps.length - 1} step="1" value=${place}
      aria-valuetext=${`step ${writeStep(steps[place])}`}
      onInput=${(/** @type {any} */ event) => change({ at: String(steps[Number(event.currentTarget.value)]) }, { together: true })} />
      <output>${writeStep(steps[place])} of ${writeMany(value.step_count, "step")}</output></label></div>`}
    <ul class="images">${images.map((/** @type {any} */ row) => html`<li key=${row.key}><${Picture} run=${run} row=${row} /></li>`)}</ul>
    ${value.count > images.length && html`<p class="quiet">${images.length} of ${writeMany(value.count, "name")}: the text above chooses others</p>`}
    ${value.left_out > 0 && html`<p class="quiet">of the newest artifacts; ${writeStep(value.left_out)} older ones were not looked at</p>`}`;
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
