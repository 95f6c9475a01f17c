// @ts-check
/** The trials of a sweep as a table, of which only the rows in sight are in the document. */

import { html } from "../data/html.js";
import { nameValue, readCell } from "../data/trial_axes.js";
import { StateBadge } from "./badges.js";
import { makeLink } from "./links.js";
import { Gap, useRowWindow } from "./row_window.js";
import { writeMany, writeNumber, writeStep, writeTime } from "./texts.js";

const ROW_PX = 34;

/** @param {unknown} value */
export function writeCell(value) {
  return typeof value === "number" ? writeNumber(value) : nameValue(value ?? null);
}

/** How often it was begun, and what went wrong. @param {any} trial */
function writeTries(trial) {
  return [
    trial.token > 1 ? `claimed ${trial.token} times` : "",
    trial.failures ? writeMany(trial.failures, "failure") : "",
    trial.losses ? `lost ${trial.losses} times` : "",
  ].filter(Boolean).join(", ");
}

/**
 * @param {{ trials: any[], total: number, columns: import("../data/trial_axes.js").Column[], order: string, best: Set<number>, chosen: number | null,
 *   constraints: string[], sort: (order: string) => void, choose: (number: number | null) => void }} props
 */
export function TrialTable({ trials, total, columns, order, best, chosen, constraints, sort, choose }) {
  const { box, range, look } = useRowWindow(ROW_PX, trials.length);
  const shown = trials.slice(range.first, range.last);
  const above = Math.min(range.first, trials.length);
  // What is measured stands before what it was made with.
  const ordered = [...columns.filter((column) => column.kind === "metric"), ...columns.filter((column) => column.kind !== "metric")];
  /** @param {string} title @param {string} key @param {boolean} isNumber */
  const head = (title, key, isNumber) => {
    const way = order === key ? "ascending" : order === `-${key}` ? "descending" : undefined;
    const next = way === "ascending" ? `-${key}` : way === "descending" ? "" : key;
    return html`<th key=${key} scope="col" aria-sort=${way} class=${isNumber ? "number" : ""}><button class="plain" onClick=${() => sort(next)}>${title}
      <span aria-hidden="true">${way === "ascending" ? "▲" : way === "descending" ? "▼" : ""}</span></button></th>`;
  };
  return html`<div class="table-box" ref=${box} onScroll=${look} tabindex="0" role="region" aria-label="Table of trials" onMouseLeave=${() => choose(null)}>
      <table class="runs trials" aria-rowcount=${trials.length + 1}>
        <thead><tr aria-rowindex="1">${head("trial", "number", false)}<th scope="col">state</th>
          ${ordered.map((column) => head(column.title, column.id, column.kind !== "parameter"))}
          ${constraints.map((text) => html`<th key=${`constraint ${text}`} scope="col" class="number" title=${`How far ${text} is broken; at most 0 where it is kept`}>${text}</th>`)}
          <th scope="col" class="number">step</th><th scope="col">tries</th><th scope="col">run</th><th scope="col">reason</th></tr></thead>
        <tbody><${Gap} rows=${above} height_px=${ROW_PX} />
          ${shown.map((trial, place) => html`<tr key=${trial.number} aria-rowindex=${range.first + place + 2} data-trial=${trial.number} class=${trial.number === chosen ? "chosen-row" : ""}
              onMouseEnter=${() => choose(trial.number)}>
            <th scope="row">${trial.number}${best.has(trial.number) && html` <b class="best-mark" title="The best one">★ best</b>`}</th>
            <td><${StateBadge} state=${trial.state} reason=${trial.reason} /></td>
            ${ordered.map((column) => {
              const value = readCell(trial, column);
              return html`<td key=${column.id} class=${typeof value === "number" ? "number" : ""} title=${typeof value === "string" ? value : undefined}>${writeCell(value)}</td>`;
            })}
            ${constraints.map((text, at) => html`<td key=${`constraint ${text}`} class="number">${writeCell(trial.constraints?.[at] ?? null)}</td>`)}
            <td class="number">${writeStep(trial.step)}</td><td>${writeTries(trial)}</td>
            <td>${trial.run_id && html`<a href=${makeLink(["run", trial.run_id])} title=${trial.run_id}>${trial.run_id.slice(0, 12)}</a>`}</td>
            <td title=${trial.reason ?? (trial.settled_at && writeTime(trial.settled_at))}>${trial.reason ?? ""}</td></tr>`)}
          <${Gap} rows=${Math.max(0, trials.length - above - shown.length)} height_px=${ROW_PX} /></tbody>
      </table></div>
    <p class="quiet" role="status">${trials.length === total ? writeMany(total, "trial") : `${writeStep(trials.length)} of ${writeMany(total, "trial")} fit`}</p>`;
}
