// @ts-check
/** What a run has beside its charts: events and logs, artifacts, configuration, delivery. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { Refused, askJson, isPassing } from "./connection.js";
import { change as place, root } from "./links.js";
import { Lineage } from "./lineage.js";
import { MediaPanel } from "./media.js";
import { Images, TextPayload, isText } from "./payloads.js";
import { useRarely } from "./pace.js";
import { EventRows } from "./run_facts.js";
import { TableView, readAsked } from "./table_view.js";
import { writeBytes, writeCount, writeStep, writeTime } from "./texts.js";

const PAGE_ROWS = 100;
const WAIT_MS = 200;
const AGAIN_MS = 2000;
const LEVELS = ["debug", "info", "warning", "error", "critical"];

/** @typedef {{ name: string, title: string, kind?: string }} Tab kind: of records without which there is nothing to show */
/** @type {Tab[]} */
export const TABS = [
  { name: "charts", title: "Charts" }, { name: "system", title: "System and ranks", kind: "telemetry" },
  { name: "batches", title: "Batches", kind: "batch" }, { name: "samples", title: "Samples", kind: "sample" }, { name: "events", title: "Events and logs" },
  { name: "console", title: "Console", kind: "console" },
  { name: "artifacts", title: "Artifacts" }, { name: "code", title: "Code" }, { name: "config", title: "Config" },
  { name: "delivery", title: "Delivery" },
];

/** What the name of a tab begins with that a plugin adds. */
export const VIEW = "view-";

/** @param {{ active: string, contents: Record<string, number | null>, absent: Record<string, string>, views: Tab[], show: (name: string) => void }} props */
export function TabBar({ active, contents, absent, views, show }) {
  const tabs = TABS.filter(({ name, kind }) => name === active || !kind || contents?.[kind] !== 0 || absent?.[kind])
    .concat(views.map(({ name, title }) => ({ name: VIEW + name, title })));
  const bar = useRef(/** @type {HTMLElement | null} */ (null));
  /** @param {KeyboardEvent} event */
  const press = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex((tab) => tab.name === active);
    const next = tabs[(at + step + tabs.length) % tabs.length];
    show(next.name);
    /** @type {HTMLElement | null} */ (bar.current?.querySelector(`#tab-${next.name}`))?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label="Parts of the run" ref=${bar} onKeyDown=${press}>
    ${tabs.map(({ name, title }) => html`<button key=${name} id=${`tab-${name}`} role="tab"
      aria-selected=${name === active} aria-controls="panel" tabindex=${name === active ? 0 : -1}
      onClick=${() => show(name)}>${title}</button>`)}</div>`;
}

/**
 * Pages of a list: the first anew whenever `version` changes, further ones on demand.
 * @param {string} path @param {Record<string, unknown>} query @param {string} field
 * @param {string} cursorName @param {unknown} version
 */
export function usePages(path, query, field, cursorName, version) {
  // `of` is the query that the rows fit, which may be another one than is asked for by now.
  const [pages, setPages] = useState(/** @type {{ of: string, rows: any[], next: string | null, mistake: string, isReady: boolean }} */ (
    { of: "", rows: [], next: null, mistake: "", isReady: false }));
  const isOlder = cursorName === "before";
  const key = JSON.stringify(query);
  const last = useRef("");
  useEffect(() => {
    const ended = new AbortController();
    const isNew = last.current !== key;
    last.current = key;
    const load = async () => {
      try {
        const page = await askJson(path, { ...query, limit: PAGE_ROWS }, ended.signal);
        const first = { of: key, rows: page[field], next: page.next, mistake: "", isReady: true };
        setPages((old) => {
          if (old.of !== key || !isOlder) return first;
          const fresh = new Set(page[field].map((/** @type {any} */ row) => row.id));
          const before = old.rows.filter((row) => !fresh.has(row.id));
          const joins = before.length < old.rows.length;
          return joins ? { ...old, rows: [...before, ...page[field]], isReady: true } : first;
        });
      } catch (error) {
        if (ended.signal.aborted) return;
        if (error instanceof Refused) setPages((old) => ({ ...old, mistake: error.message, isReady: true }));
        if (isPassing(error)) timer = setTimeout(load, AGAIN_MS);
      }
    };
    let timer = setTimeout(load, isNew ? WAIT_MS : 0);
    return () => {
      clearTimeout(timer);
      ended.abort();
    };
  }, [path, key, version]);
  const more = async () => {
    const at = pages.next;
    if (pages.of !== key) return;
    const page = await askJson(path, { ...query, limit: PAGE_ROWS, [cursorName]: at }).catch(() => null);
    if (!page) return;
    // Rows that came meanwhile, or those of another query, may not go on where these do.
    setPages((old) => old.of !== key || old.next !== at ? old : { ...old, next: page.next,
      rows: isOlder ? [...page[field], ...old.rows] : [...old.rows, ...page[field]] });
  };
  return { ...pages, more };
}

/** @param {{ run: string, query: URLSearchParams, change: (changes: Record<string, string>) => void, version: number, absent: Record<string, string> }} props */
export function Events({ run, query, change, version, absent }) {
  const level = query.get("level") ?? "";
  const text = query.get("text") ?? "";
  const { rows, next, mistake, isReady, more } = usePages(`api/runs/${encodeURIComponent(run)}/events`,
    { level: level || null, text: text || null }, "events", "before", version);
  return html`<div class="bar">
      <label>level <select value=${level} onChange=${(/** @type {any} */ event) => change({ level: event.currentTarget.value })}>
        <option value="">all</option>
        ${LEVELS.map((item) => html`<option key=${item} value=${item}>${item} and worse</option>`)}</select></label>
      <label>text <input id="find-event" type="text" value=${text}
        onInput=${(/** @type {any} */ event) => change({ text: event.currentTarget.value })} /></label></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${next && html`<button class="plain more" onClick=${more}>older</button>`}
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">Nothing was logged${level || text ? " that fits" : ""}. ${!level && !text && absent?.event}</p>`}
    <${EventRows} rows=${rows} />`;
}

/** @param {{ run: string, query: URLSearchParams, change: (changes: Record<string, string>) => void, version: number, absent: Record<string, string> }} props */
export function Artifacts({ run, query, change, version, absent }) {
  const text = query.get("text") ?? "";
  const asked = readAsked(query);
  const { rows, next, mistake, isReady, more } = usePages(`api/runs/${encodeURIComponent(run)}/artifacts`,
    { text: text || null }, "artifacts", "after", version);
  const shown = rows.find((row) => row.view && row.id === query.get("media"));
  return html`<div class="bar"><label>text <input id="find-artifact" type="text" value=${text}
      onInput=${(/** @type {any} */ event) => change({ text: event.currentTarget.value })} /></label></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">There is no artifact${text ? " that fits" : ""}. ${!text && absent?.artifact}</p>`}
    ${rows.length > 0 && absent?.payload && html`<p class="notice-line">${absent.payload}</p>`}
    <${Images} run=${run} query=${query} version=${useRarely(version)} />
    ${asked && html`<${TableView} run=${run} query=${query} asked=${asked} />`}
    ${shown && html`<${MediaPanel} run=${run} row=${shown} />`}
    ${rows.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Artifacts"><table class="plain-table"><thead><tr>
      <th scope="col">name</th><th scope="col">type</th><th scope="col" class="number">step</th><th scope="col" class="number">size</th><th scope="col">logged</th><th scope="col">payload</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id}><th scope="row">${row.name}</th><td>${row.type}</td>
        <td class="number">${writeStep(row.step)}</td><td class="number">${writeBytes(row.size_bytes)}</td><td>${writeTime(row.at)}</td>
        <td><div class="payloads">${row.view && row.url && html`<button class="plain" aria-label=${`Show ${row.name}${row.step === null ? "" : ` at step ${row.step}`}`} onClick=${() => place({ media: row.id })}>Show</button>`}${row.table && row.url && html`<button class="plain" aria-label=${`Show ${row.name} as a table`} onClick=${() => place({ table: `${row.table}.${row.sha256}`, sort: null, rows: null })}>Table</button>`}${isText(row) && !row.view && html`<${TextPayload} run=${run} row=${row} />`}${row.url ? html`<a href=${`${new URL(row.url, root).href}?download=1`} download="" aria-label=${`Download ${row.name}`}>Download</a>` : "not kept"}</div></td></tr>`)}</tbody></table></div>`}
    ${next && html`<button class="plain more" onClick=${more}>more</button>`}
    ${rows.length > 0 && html`<${Lineage} run=${run} />`}`;
}

/** @param {{ data: any }} props */
export function Delivery({ data }) {
  const { lanes = [], unstored = null } = data.delivery ?? {};
  return html`<section aria-labelledby="lanes"><h2 id="lanes">Where the run's records go</h2>
    ${unstored && html`<p class="mistake">${unstored}</p>`}
    ${data.absent?.delivery && html`<p class="notice-line">${data.absent.delivery}</p>`}
    ${lanes.length > 0 && html`<table class="plain-table"><thead><tr><th scope="col">backend</th><th scope="col">place</th><th scope="col">note</th></tr></thead>
      <tbody>${lanes.map((/** @type {any} */ lane) => html`<tr key=${lane.backend}><th scope="row">${lane.backend}${lane.primary ? " (primary)" : ""}</th>
        <td>${lane.place ?? ""}</td><td>${lane.note ?? ""}</td></tr>`)}</tbody></table>`}</section>
    <section aria-labelledby="attempts"><h2 id="attempts">Attempts</h2>
      <table class="plain-table"><thead><tr><th scope="col">attempt</th><th scope="col">started</th><th scope="col">from step</th><th scope="col">ended</th><th scope="col">state</th></tr></thead>
      <tbody>${(data.attempts ?? []).map((/** @type {any} */ item) => html`<tr key=${item.attempt}><th scope="row">${item.attempt}</th><td>${writeTime(item.started_at)}</td>
        <td>${writeStep(item.from_step)}</td><td>${writeTime(item.ended_at)}</td><td>${item.state ?? ""}</td></tr>`)}</tbody></table></section>
    <section aria-labelledby="contents"><h2 id="contents">What there is</h2>
      <table class="plain-table"><tbody>${Object.entries(data.contents ?? {}).map(([kind, count]) => html`<tr key=${kind}><th scope="row">${kind.replaceAll("_", " ")}</th>
        <td>${count === null ? "not known" : count === 0 ? "none" : `${writeCount(/** @type {number} */ (count))} or more`}</td></tr>`)}</tbody></table></section>`;
}
