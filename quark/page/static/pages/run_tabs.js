// @ts-check
/** What a run has beside its charts: events and logs, artifacts, configuration, delivery. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { Refused, askJson, isPassing } from "./connection.js";
import { change, change as place, makeLink, root } from "./links.js";
import { MediaPanel } from "./media.js";
import { useRarely } from "./pace.js";
import { EventRows } from "./run_facts.js";
import { TableView, readAsked } from "./table_view.js";
import { spell, writeBytes, writeCount, writeMany, writeNumber, writeStep, writeTime } from "./texts.js";

// A picture with its caption, and over it boxes and masks that can be taken away.

const COLOURS = [[230, 85, 0], [0, 114, 178], [0, 158, 115], [204, 121, 167], [240, 180, 0], [86, 180, 233], [150, 60, 180], [120, 120, 0]];
const MASK_ALPHA = 130;
const LETTER_PX = 12;

/** @param {number} at */
function chooseColour(at) {
  return COLOURS[((at % COLOURS.length) + COLOURS.length) % COLOURS.length];
}

/** @param {any} label @param {Record<string, string>} labels */
function nameClass(label, labels) {
  return label === undefined ? "" : labels[String(label)] ?? String(label);
}

/** A number for a class: its own, or one that is always the same for a text. @param {any} label */
function placeClass(label) {
  const number = Number(label);
  if (label !== undefined && Number.isInteger(number)) return number;
  return [...String(label ?? "")].reduce((sum, letter) => sum + letter.charCodeAt(0), 0);
}

/** @param {CanvasRenderingContext2D} context @param {any[]} boxes @param {Record<string, string>} labels @param {number} scale pixels of the picture in one of the screen */
function paintBoxes(context, boxes, labels, scale) {
  context.lineWidth = 2 * scale;
  context.font = `600 ${LETTER_PX * scale}px system-ui, sans-serif`;
  context.textBaseline = "top";
  for (const { box, label, score } of boxes) {
    const [left, top, right, bottom] = box;
    const colour = `rgb(${chooseColour(placeClass(label)).join(" ")})`;
    const text = spell([nameClass(label, labels), score === undefined ? "" : writeNumber(score)].filter(Boolean).join(" "));
    context.strokeStyle = colour;
    context.strokeRect(left, top, right - left, bottom - top);
    if (!text) continue;
    const height = (LETTER_PX + 4) * scale;
    const above = top >= height ? top - height : top;
    context.fillStyle = colour;
    context.fillRect(left, above, context.measureText(text).width + 6 * scale, height);
    context.fillStyle = "#fff";
    context.fillText(text, left + 3 * scale, above + 2 * scale);
  }
}

/** @param {CanvasRenderingContext2D} context @param {HTMLImageElement} image @param {string} encoding */
function paintMask(context, image, encoding) {
  const { width, height } = context.canvas;
  const own = document.createElement("canvas");
  [own.width, own.height] = [width, height];
  const inner = /** @type {CanvasRenderingContext2D} */ (own.getContext("2d", { willReadFrequently: true }));
  inner.imageSmoothingEnabled = false;
  inner.drawImage(image, 0, 0, width, height);
  const pixels = inner.getImageData(0, 0, width, height);
  const { data } = pixels;
  for (let i = 0; i < data.length; i += 4) {
    const found = encoding === "RGB" ? data[i] + 256 * data[i + 1] : data[i];
    const [red, green, blue] = chooseColour(found);
    data[i] = red;
    data[i + 1] = green;
    data[i + 2] = blue;
    data[i + 3] = found === 0 ? 0 : MASK_ALPHA;
  }
  inner.putImageData(pixels, 0, 0);
  context.drawImage(own, 0, 0);
}

/** @param {string} address @returns {Promise<HTMLImageElement>} */
async function loadImage(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

/** @param {{ run: string, row: any }} props an answer of `images` */
export function Picture({ run, row }) {
  const groups = Object.entries(row.boxes ?? {}).filter(([, boxes]) => boxes.length);
  const masks = row.masks ?? [];
  const [hidden, setHidden] = useState(/** @type {string[]} */ ([]));
  const [isReady, setReady] = useState(0);
  const picture = useRef(/** @type {HTMLImageElement | null} */ (null));
  const over = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  useEffect(() => {
    const [canvas, image] = [over.current, picture.current];
    if (!canvas || !image?.naturalWidth) return;
    let isOver = false;
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const paint = async () => {
      for (const mask of masks) {
        if (hidden.includes(`mask ${mask.name}`)) continue;
        const found = await loadImage(new URL(`artifacts/${encodeURIComponent(run)}/${mask.sha256}`, root).href).catch(() => null);
        if (isOver) return;
        if (found) paintMask(context, found, mask.encoding);
      }
      const scale = image.naturalWidth / Math.max(1, image.clientWidth);
      for (const [name, boxes] of groups) if (!hidden.includes(`boxes ${name}`)) paintBoxes(context, boxes, row.labels ?? {}, scale);
      canvas.dataset.painted = "1";
    };
    paint();
    return () => {
      isOver = true;
    };
  }, [row.sha256, row.id, hidden.join(), isReady]);
  const toggles = [...masks.map((/** @type {any} */ mask) => `mask ${mask.name}`), ...groups.map(([name]) => `boxes ${name}`)];
  const classes = [...new Set(groups.flatMap(([, boxes]) => boxes.map((/** @type {any} */ box) => nameClass(box.label, row.labels ?? {}))))].filter(Boolean);
  return html`<figure><div class="picture"><img ref=${picture} loading="lazy" alt=${row.facts?.caption ?? `picture ${row.name}${row.step === null ? "" : ` at step ${row.step}`}`}
      src=${new URL(row.url, root).href} onLoad=${() => setReady((count) => count + 1)} />
      ${toggles.length > 0 && html`<canvas ref=${over} role="img" aria-label=${`${groups.reduce((sum, [, boxes]) => sum + boxes.length, 0)} boxes${classes.length ? ` of ${classes.slice(0, 20).join(", ")}` : ""}, ${masks.length} masks`}></canvas>`}</div>
    <figcaption>${row.facts?.caption && html`<span class="free">${row.facts.caption}</span> `}<span class=${row.facts?.caption ? "quiet" : ""}>${row.name}${row.step === null ? "" : ` · step ${writeStep(row.step)}`}</span>
      ${toggles.map((name) => html`<label key=${name} class="toggle"><input type="checkbox" checked=${!hidden.includes(name)}
        onChange=${() => setHidden((old) => (old.includes(name) ? old.filter((one) => one !== name) : [...old, name]))} /> ${name.replace(/^(\w+) \1$/, "$1")}</label>`)}</figcaption></figure>`;
}

// Versions of artifacts: what this run has made and used, under which aliases, and who uses it besides.

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
    ${value.used.length === 0 && value.gone.length === 0 && html`<p class="quiet">It has used no artifact of another run with session.use_artifact.</p>`}
    ${value.used.length > 0 && html`<${Table} rows=${value.used} isUsed=${true} />`}
    ${value.gone.map((/** @type {string} */ name) => html`<p key=${name} class="notice-line">${name} was used but no longer exists.</p>`)}
    <h3>Made by this run</h3>
    ${value.made.length > 0 ? html`<${Table} rows=${value.made} isUsed=${false} />` : html`<p class="quiet">None.</p>`}
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

// Payloads of artifacts that can be looked at here: images by step, texts and JSON as text.

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
    ${value.count > images.length && html`<p class="quiet">${images.length} of ${writeMany(value.count, "name")}: search above to choose others</p>`}
    ${value.left_out > 0 && html`<p class="quiet">of the newest artifacts; ${writeStep(value.left_out)} older ones were not searched</p>`}`;
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
      setSays(found.is_cut ? `the beginning of ${writeBytes(found.size_bytes)}; download it to see all` : "");
    } catch (error) {
      setSays(error instanceof Error ? error.message : String(error));
    }
  };
  return html`<details onToggle=${read}><summary>Show<span class="hidden"> ${row.name}</span></summary>
    ${text !== null && html`<pre class="payload" tabindex="0">${text}</pre>`}${says && html`<p class="quiet">${says}</p>`}</details>`;
}

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
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">No${level || text ? " matching" : ""} events or logs. ${!level && !text && absent?.event}</p>`}
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
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">No${text ? " matching" : ""} artifacts. ${!text && absent?.artifact}</p>`}
    ${rows.length > 0 && absent?.payload && html`<p class="notice-line">${absent.payload}</p>`}
    <${Images} run=${run} query=${query} version=${useRarely(version)} />
    ${asked && html`<${TableView} run=${run} query=${query} asked=${asked} />`}
    ${shown && html`<${MediaPanel} run=${run} row=${shown} />`}
    ${rows.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Artifacts"><table class="plain-table"><thead><tr>
      <th scope="col">name</th><th scope="col">type</th><th scope="col" class="number">step</th><th scope="col" class="number">size</th><th scope="col">logged</th><th scope="col">payload</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.id}><th scope="row">${row.name}</th><td>${row.type}</td>
        <td class="number">${writeStep(row.step)}</td><td class="number">${writeBytes(row.size_bytes)}</td><td>${writeTime(row.at)}</td>
        <td><div class="payloads">${row.view && row.url && html`<button class="plain" aria-label=${`Show ${row.name}${row.step === null ? "" : ` at step ${row.step}`}`} onClick=${() => place({ media: row.id })}>Show</button>`}${row.table && row.url && html`<button class="plain" aria-label=${`Show ${row.name} as a table`} onClick=${() => place({ table: `${row.table}.${row.sha256}`, sort: null, rows: null })}>Table</button>`}${isText(row) && !row.view && html`<${TextPayload} run=${run} row=${row} />`}${row.url ? html`<a href=${`${new URL(row.url, root).href}?download=1`} download="" aria-label=${`Download ${row.name}`}>Download</a>` : "not stored"}</div></td></tr>`)}</tbody></table></div>`}
    ${next && html`<button class="plain more" onClick=${more}>more</button>`}
    ${rows.length > 0 && html`<${Lineage} run=${run} />`}`;
}

/** @param {{ data: any }} props */
export function Delivery({ data }) {
  const { lanes = [], unstored = null } = data.delivery ?? {};
  return html`<section aria-labelledby="lanes"><h2 id="lanes">Backends of the run</h2>
    ${unstored && html`<p class="mistake">${unstored}</p>`}
    ${data.absent?.delivery && html`<p class="notice-line">${data.absent.delivery}</p>`}
    ${lanes.length > 0 && html`<table class="plain-table"><thead><tr><th scope="col">backend</th><th scope="col">place</th><th scope="col">note</th></tr></thead>
      <tbody>${lanes.map((/** @type {any} */ lane) => html`<tr key=${lane.backend}><th scope="row">${lane.backend}${lane.primary ? " (primary)" : ""}</th>
        <td>${lane.place ?? ""}</td><td>${lane.note ?? ""}</td></tr>`)}</tbody></table>`}</section>
    <section aria-labelledby="attempts"><h2 id="attempts">Attempts</h2>
      <table class="plain-table"><thead><tr><th scope="col">attempt</th><th scope="col">started</th><th scope="col">from step</th><th scope="col">ended</th><th scope="col">state</th></tr></thead>
      <tbody>${(data.attempts ?? []).map((/** @type {any} */ item) => html`<tr key=${item.attempt}><th scope="row">${item.attempt}</th><td>${writeTime(item.started_at)}</td>
        <td>${writeStep(item.from_step)}</td><td>${writeTime(item.ended_at)}</td><td>${item.state ?? ""}</td></tr>`)}</tbody></table></section>
    <section aria-labelledby="contents"><h2 id="contents">Records</h2>
      <table class="plain-table"><tbody>${Object.entries(data.contents ?? {}).map(([kind, count]) => html`<tr key=${kind}><th scope="row">${kind.replaceAll("_", " ")}</th>
        <td>${count === null ? "not known" : count === 0 ? "none" : `${writeCount(/** @type {number} */ (count))} or more`}</td></tr>`)}</tbody></table></section>`;
}
