// @ts-check
/** Text samples of a run: found, sorted, paged, opened in full beside what the curves are at their step. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { change, makeLink } from "./links.js";
import { useRarely } from "./pace.js";
import { writeMany, writeNumber, writeStep, writeValue } from "./texts.js";

const PAGE_ROWS = 50;
const NEAREST = 3;
const WAIT_MS = 200;
const OWN = ["step", "reward", "prompt", "completion"];

/** What is typed, once the typing rests. @param {string} text */
function useRested(text) {
  const [rested, setRested] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setRested(text), WAIT_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return rested;
}

/** A number as the address has it, or null. @param {string | null} text */
function readNumber(text) {
  return text !== null && /^[0-9]{1,15}$/.test(text) ? Number(text) : null;
}

/** What the address asks for. @param {URLSearchParams} query */
function readAsked(query) {
  const sort = query.get("sort") ?? "";
  return {
    text: query.get("text") ?? "", where: query.get("where") ?? "", set: query.get("set") ?? "", sort,
    near: readNumber(query.get("near")), first: readNumber(query.get("first")) ?? 0,
  };
}

/** @param {{ run: string, query: URLSearchParams, version: number, absent: Record<string, string> }} props */
export function Samples({ run, query, version, absent }) {
  const asked = readAsked(query);
  const text = useRested(asked.text);
  const where = useRested(asked.where);
  const { sort, near, first } = asked;
  const wanted = { text: text || null, where: where.split(/\s+and\s+/).filter(Boolean), set: asked.set || null, near,
    sort: sort.replace(/^-/, "") || null, descending: sort.startsWith("-") ? 1 : null, first, limit: PAGE_ROWS };
  const { value: data, mistake } = useAnswer((signal) => askJson(`api/runs/${encodeURIComponent(run)}/samples`, wanted, signal),
    [run, JSON.stringify(wanted), useRarely(version)]);
  return html`<${Filters} asked=${asked} sets=${data?.sets ?? []} />
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${data ? html`<${Found} run=${run} data=${data} asked=${asked} absent=${absent} />` : !mistake && html`<p class="quiet">…</p>`}`;
}

/** @typedef {ReturnType<typeof readAsked>} Asked */

/** @param {{ asked: Asked, sets: string[] }} props */
function Filters({ asked, sets }) {
  /** @param {string} name @param {any} event */
  const type = (name, event) => change({ [name]: event.currentTarget.value, first: null }, { together: true });
  const hasSets = sets.length > 1 || asked.set !== "";
  return html`<div class="bar">
    <label>text <input id="find-sample" type="text" value=${asked.text} onInput=${(/** @type {any} */ event) => type("text", event)} /></label>
    <label>where <input id="where-sample" type="text" placeholder="reward > 0.5 and task == math" value=${asked.where} onInput=${(/** @type {any} */ event) => type("where", event)} /></label>
    ${hasSets && html`<label>set <select value=${asked.set} onChange=${(/** @type {any} */ event) => type("set", event)}>
      <option value="">all</option>${sets.map((item) => html`<option key=${item} value=${item}>${item}</option>`)}</select></label>`}
    <label>near step <input id="near-sample" type="number" min="0" value=${asked.near ?? ""} onInput=${(/** @type {any} */ event) => type("near", event)} /></label></div>`;
}

/** @param {{ run: string, data: any, asked: Asked, absent: Record<string, string> }} props */
function Found({ run, data, asked, absent }) {
  if (!data.total) return html`<p class="notice-line">${absent?.sample ?? "No sample was logged. quark.SampleLogger records prompts, completions, rewards and custom columns."}</p>`;
  const many = data.count < data.total ? `${writeMany(data.count, "sample")} of ${writeStep(data.total)}` : writeMany(data.total, "sample");
  const says = asked.near === null ? many : `${many}, the nearest to step ${writeStep(asked.near)} first`;
  return html`<p class="quiet" role="status">${says}</p>
    ${data.rows.length > 0 && html`<${Rows} run=${run} data=${data} label="Samples" sort=${asked.near === null ? asked.sort : ""} />`}
    <${Pager} first=${asked.first} count=${data.count} />`;
}

/** @param {{ run: string, data: any, label: string, sort?: string }} props sort: where columns can be sorted by */
function Rows({ run, data, label, sort }) {
  return html`<div class="scrolls" tabindex="0" role="region" aria-label=${label}><table class="plain-table samples"><thead><tr>
      ${[...OWN, ...data.columns].map((name) => sort === undefined ? html`<th key=${name} scope="col">${name}</th>` : html`<${Head} key=${name} name=${name} sort=${sort} />`)}
      <th scope="col"><span class="hidden">whole</span></th></tr></thead>
    <tbody>${data.rows.map((/** @type {any} */ row) => html`<${Row} key=${row.id} run=${run} row=${row} columns=${data.columns} />`)}</tbody></table></div>`;
}

/** @param {{ first: number, count: number }} props */
function Pager({ first, count }) {
  if (first === 0 && count <= PAGE_ROWS) return null;
  return html`<div class="bar">
    <button disabled=${first === 0} onClick=${() => change({ first: String(Math.max(0, first - PAGE_ROWS)) })}>Back</button>
    <span class="quiet">${writeStep(Math.min(first + 1, count))} to ${writeStep(Math.min(first + PAGE_ROWS, count))} of ${writeStep(count)}</span>
    <button disabled=${first + PAGE_ROWS >= count} onClick=${() => change({ first: String(first + PAGE_ROWS) })}>Further</button></div>`;
}

/** @param {{ name: string, sort: string }} props */
function Head({ name, sort }) {
  const way = sort === name ? "ascending" : sort === `-${name}` ? "descending" : undefined;
  const next = way === undefined ? `-${name}` : way === "descending" ? name : null;
  return html`<th scope="col" aria-sort=${way}><button class="plain" onClick=${() => change({ sort: next, near: null, first: null })}>${name}
    <span aria-hidden="true">${way === "ascending" ? "▲" : way === "descending" ? "▼" : ""}</span></button></th>`;
}

/** @param {{ run: string, row: any, columns: string[] }} props */
function Row({ run, row, columns }) {
  const [isOpen, setOpen] = useState(false);
  const long = new Set(row.long);
  /** @param {string} name @param {any} value */
  const cell = (name, value) => html`<td key=${name} class=${typeof value === "number" ? "number" : "sample-text"}>${
    value === null || value === undefined ? "" : typeof value === "number" ? writeNumber(value) : writeValue(value)}${long.has(name) ? "…" : ""}</td>`;
  return html`<tr><td class="number">${writeStep(row.step)}${row.rank ? ` (rank ${row.rank})` : ""}</td>${cell("reward", row.reward)}${cell("prompt", row.prompt)}${cell("completion", row.completion)}
      ${columns.map((name) => cell(`.${name}`, row.columns[name]))}
      <td><button class="plain" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${isOpen ? "Close" : "Open"}<span class="hidden"> sample of step ${writeStep(row.step)}</span></button></td></tr>
    ${isOpen && html`<tr class="whole"><td colspan=${5 + columns.length}><${Whole} run=${run} row=${row} /></td></tr>`}`;
}

/** One sample in full. @param {{ run: string, row: any }} props */
function Whole({ run, row }) {
  const { value, mistake } = useAnswer((signal) => askJson(`api/runs/${encodeURIComponent(run)}/sample`, { id: row.id, step: row.step }, signal), [run, row.id]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!value) return html`<p class="quiet">…</p>`;
  const { sample, values } = value;
  const cut = sample.cut ?? {};
  const parts = [["prompt", sample.prompt], ["completion", sample.completion], ...Object.entries(sample.columns)];
  return html`<div class="whole-sample"><div>${parts.filter(([, item]) => item !== null).map(([name, item]) => html`<section key=${name}><h3>${name}</h3>
      <pre class="payload" tabindex="0">${typeof item === "string" ? item : JSON.stringify(item, null, 1)}</pre>
      ${cut[name] !== undefined && html`<p class="quiet">shortened when it was logged; it had ${writeMany(cut[name], "character")}</p>`}</section>`)}</div>
    ${values.length > 0 && html`<section><h3>Curves at step ${writeStep(sample.step)}</h3><table class="plain-table"><tbody>
      ${values.map((/** @type {any} */ each) => html`<tr key=${each.key}><th scope="row">${each.name}</th><td class="number">${writeNumber(each.value)}</td>
        <td class="quiet">${each.step === sample.step ? "" : `of step ${writeStep(each.step)}`}</td></tr>`)}</tbody></table>
      <a href=${makeLink(["run", run], { near: String(sample.step) })}>Show the curves</a></section>`}</div>`;
}

/** Beside the charts: the samples nearest to a step that was chosen in one. @param {{ run: string, near: string | null, version: number }} props */
export function NearSamples({ run, near, version }) {
  const step = readNumber(near);
  const bar = useRef(/** @type {HTMLElement | null} */ (null));
  const { value, mistake } = useAnswer(async (signal) => step === null ? null
    : askJson(`api/runs/${encodeURIComponent(run)}/samples`, { near: step, limit: NEAREST }, signal), [run, step, useRarely(version)]);
  useEffect(() => bar.current?.scrollIntoView({ block: "nearest" }), [step]);
  if (step === null) return html`<p class="quiet near-samples">Click in a chart to show the samples of that step.</p>`;
  return html`<section class="near-samples" aria-labelledby="near-title" ref=${bar}><div class="bar"><h2 id="near-title">Samples nearest to step ${writeStep(step)}</h2>
      <a href=${makeLink(["run", run], { tab: "samples", near: String(step) })}>All samples</a>
      <button onClick=${() => change({ near: null })}>Close</button></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${value && html`<${Rows} run=${run} data=${value} label="Nearest samples" />`}</section>`;
}
