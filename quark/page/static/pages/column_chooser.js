// @ts-check
/** Which columns the table of runs has beside those that every run has. */

import { html } from "../data/html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { askJson } from "./connection.js";
import { quoteName } from "./texts.js";

const MOST = 100;
const FIELDS = ["tags", "groups", "notes", "duration", "attempt", "git_commit", "ended"];

/**
 * @param {{ project: string | null, columns: string[], choose: (columns: string[]) => void }} props
 */
export function ColumnChooser({ project, columns, choose }) {
  const [isOpen, setOpen] = useState(false);
  const [prefix, setPrefix] = useState("");
  const [names, setNames] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (!isOpen) return;
    const ended = new AbortController();
    askJson("api/names", { project, prefix, limit: MOST }, ended.signal)
      .then(setNames, () => undefined);
    return () => ended.abort();
  }, [isOpen, project, prefix]);
  /** @param {string} text */
  const turn = (text) => {
    choose(columns.includes(text) ? columns.filter((item) => item !== text) : [...columns, text]);
  };
  /** @param {string} text @param {unknown} label */
  const box = (text, label) => html`<label key=${text}><input type="checkbox"
    checked=${columns.includes(text)} onChange=${() => turn(text)} /> ${label}</label>`;
  const wanted = prefix.toLowerCase();
  return html`<details class="chooser" open=${isOpen}
    onToggle=${(/** @type {any} */ event) => setOpen(event.currentTarget.open)}>
    <summary>Columns</summary>
    ${isOpen && html`<div class="panel">
      <label>Find a column <input type="text" value=${prefix}
        onInput=${(/** @type {any} */ event) => setPrefix(event.currentTarget.value)} /></label>
      ${columns.length > 0 && html`<fieldset><legend>Shown</legend>
        ${columns.map((text) => box(text, text))}</fieldset>`}
      <fieldset><legend>Metrics</legend>
        ${(names?.metrics ?? []).map((/** @type {any} */ metric) => {
          const name = quoteName(metric.name);
          return html`<div class="figures" key=${metric.key}><span>${metric.name}</span>
            ${box(name, "last")} ${box(`min(${name})`, "min")} ${box(`max(${name})`, "max")}</div>`;
        })}</fieldset>
      <fieldset><legend>Configuration</legend>
        ${(names?.config ?? []).map((/** @type {any} */ entry) => (
          box(entry.written, entry.key)))}</fieldset>
      <fieldset><legend>Run</legend>
        ${FIELDS.filter((field) => field.includes(wanted)).map((field) => box(field, field))}
      </fieldset>
    </div>`}
  </details>`;
}
