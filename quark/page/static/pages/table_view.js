// @ts-check
/** A table out of a payload: rows come in pages, and only those in sight are in the document. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { Refused, SignInNeeded, askJson } from "./connection.js";
import { change, root } from "./links.js";
import { Gap, useRowWindow } from "./row_window.js";
import { writeBytes, writeMany, writeStep, writeValue } from "./texts.js";

const ROW_PX = 26;
const PAGE_ROWS = 100;
const MOST_PAGES = 12;
const WAIT_MS = 150;

/** @typedef {{ sha256: string, kind: string, sort: string | null, descending: 1 | null, text: string | null }} Asked */

/** Which table the address names, as the server wants it. @param {URLSearchParams} query @returns {Asked | null} */
export function readAsked(query) {
  const [kind, sha256] = (query.get("table") ?? "").split(".");
  if (!kind || !sha256) return null;
  const sort = query.get("sort") ?? "";
  return {
    sha256, kind, sort: sort.replace("-", "") || null, descending: sort.startsWith("-") ? 1 : null,
    text: query.get("rows") || null,
  };
}

/** The pages that are kept: those nearest to what is in sight. @template T @param {Map<number, T>} pages @param {number} at */
export function keepNear(pages, at) {
  const near = [...pages].sort((a, b) => Math.abs(a[0] - at) - Math.abs(b[0] - at));
  return new Map(near.slice(0, MOST_PAGES));
}

/** @param {string} run @param {Asked} asked @param {number} first @param {number} last rows in sight */
function usePages(run, asked, first, last) {
  const key = JSON.stringify(asked);
  const [found, setFound] = useState(/** @type {{ key: string, head: any, pages: Map<number, any>, mistake: string }} */ (
    { key: "", head: null, pages: new Map(), mistake: "" }));
  const isSame = found.key === key;
  const from = Math.floor(first / PAGE_ROWS);
  const to = Math.floor(Math.max(first, Math.min(last, (found.head?.count ?? 1) - 1)) / PAGE_ROWS);
  const missing = [];
  // Of another order the first page tells how many rows there are.
  for (let page = isSame ? from : 0; page <= (isSame ? to : 0); page += 1) {
    if (!isSame || !found.pages.has(page)) missing.push(page);
  }
  const wanted = missing.join();
  useEffect(() => {
    if (!wanted || (isSame && found.mistake)) return undefined;
    const ended = new AbortController();
    const timer = setTimeout(() => void Promise.all(wanted.split(",").map(Number).map(async (page) => {
      const query = { ...asked, first: page * PAGE_ROWS, limit: PAGE_ROWS };
      try {
        const { rows, numbers, ...head } = await askJson(`api/runs/${encodeURIComponent(run)}/table`, query, ended.signal);
        setFound((old) => ({ key, head, mistake: "", pages: keepNear(new Map([
          ...(old.key === key ? old.pages : []), [page, { rows, numbers }]]), page) }));
      } catch (error) {
        if (ended.signal.aborted || error instanceof SignInNeeded) return;
        const mistake = error instanceof Refused ? error.message : "The server does not answer.";
        setFound((old) => ({ key, head: old.head, pages: old.key === key ? old.pages : new Map(), mistake }));
      }
    })), isSame ? 0 : WAIT_MS);
    return () => {
      clearTimeout(timer);
      ended.abort();
    };
  }, [run, key, wanted]);
  return { ...found, isSame };
}

/** What of the table is there, and what is not. @param {any} head @param {Asked} asked */
function describe(head, asked) {
  const all = head.is_whole ? writeMany(head.row_count, "row") : `the first ${writeMany(head.row_count, "row")}`;
  const cut = head.searched < head.row_count ? `, of the first ${writeStep(head.searched)}` : "";
  const parts = [asked.text ? `${writeMany(head.count, "row")} with ${asked.text}${cut}, of ${all}` : asked.sort !== null && cut
    ? `sorted${cut}, of ${all}` : all, writeBytes(head.size_bytes)];
  if (head.column_count > head.columns.length) parts.push(`${head.columns.length} of ${head.column_count} columns`);
  if (!head.is_whole) parts.push("download it to see all");
  return parts.join(" · ");
}

/** @param {{ run: string, query: URLSearchParams, asked: Asked }} props */
export function TableView({ run, query, asked }) {
  const title = useRef(/** @type {HTMLElement | null} */ (null));
  const [count, setCount] = useState(0);
  const { box, range, look } = useRowWindow(ROW_PX, count);
  const { head, pages, mistake, isSame } = usePages(run, asked, range.first, range.last);
  useEffect(() => setCount(head?.count ?? 0), [head?.count]);
  useEffect(() => box.current?.scrollTo(0, 0), [asked.sort, asked.descending, asked.text, asked.sha256]);
  useEffect(() => title.current?.focus(), [asked.sha256]);
  const close = () => change({ table: null, sort: null, rows: null });
  const rows = head ? Array.from({ length: Math.max(0, Math.min(range.last, head.count) - range.first) }, (_, i) => {
    const at = range.first + i;
    const page = pages.get(Math.floor(at / PAGE_ROWS));
    return { at, number: page?.numbers[at % PAGE_ROWS], values: page?.rows[at % PAGE_ROWS] };
  }) : [];
  return html`<section class="table-view" aria-labelledby="table-title"><div class="bar"><h2 id="table-title" tabindex="-1" ref=${title}>${head?.name ?? "Table"}</h2>
      <label>rows with <input id="find-row" type="text" value=${query.get("rows") ?? ""}
        onInput=${(/** @type {any} */ event) => change({ rows: event.currentTarget.value }, { together: true })} /></label>
      <button onClick=${close}>Close</button></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${head && html`<p class="quiet" role="status">${describe(head, asked)}${isSame ? "" : " …"}</p>
    <div class="table-box" ref=${box} onScroll=${look} tabindex="0" role="region" aria-label=${`Rows of ${head.name}`}>
      <table class="runs cells" aria-rowcount=${head.count + 1}><thead><tr aria-rowindex="1"><th scope="col" class="number">row</th>
        ${head.columns.map((/** @type {string} */ name, /** @type {number} */ column) => html`<${Head} key=${column} name=${name} column=${column} asked=${asked} isNumber=${isNumber(pages.values().next().value?.rows[0]?.[column])} />`)}</tr></thead>
      <tbody><${Gap} rows=${range.first} height_px=${ROW_PX} />
        ${rows.map(({ at, number, values }) => html`<tr key=${at} aria-rowindex=${at + 2}><th scope="row" class="number">${number === undefined ? "…" : writeStep(number + 1)}</th>
          ${head.columns.map((/** @type {string} */ _, /** @type {number} */ column) => html`<${Cell} key=${column} run=${run} value=${values?.[column]} />`)}</tr>`)}
        <${Gap} rows=${head.count - range.first - rows.length} height_px=${ROW_PX} /></tbody></table></div>`}
    ${!head && !mistake && html`<p class="quiet">…</p>`}</section>`;
}

/** @param {unknown} value */
function isNumber(value) {
  return typeof value === "number" || (typeof value === "string" && value.trim() !== "" && !Number.isNaN(Number(value)));
}

/** @param {{ run: string, value: any }} props */
function Cell({ run, value }) {
  const image = value !== null && typeof value === "object" && /^[0-9a-f]{64}$/.test(value.image) ? value.image : null;
  if (image) {
    const address = new URL(`artifacts/${encodeURIComponent(run)}/${image}`, root).href;
    return html`<td class="cell-image"><a href=${address} target="_blank" rel="noopener"><img loading="lazy" alt="picture in the table" src=${address} /></a></td>`;
  }
  return html`<td class=${isNumber(value) ? "number" : ""} title=${typeof value === "string" && value.length > 20 ? value : undefined}>${typeof value === "number" ? String(value) : writeValue(value)}</td>`;
}

/** @param {{ name: string, column: number, asked: Asked, isNumber: boolean }} props */
function Head({ name, column, asked, isNumber: isRight }) {
  const way = asked.sort !== String(column) ? undefined : asked.descending ? "descending" : "ascending";
  const next = way === undefined ? String(column) : way === "ascending" ? `-${column}` : null;
  return html`<th scope="col" class=${isRight ? "number" : ""} aria-sort=${way}><button class="plain" title=${name} onClick=${() => change({ sort: next })}>${name || `column ${column + 1}`}
    <span aria-hidden="true">${way === "ascending" ? "▲" : way === "descending" ? "▼" : ""}</span></button></th>`;
}
