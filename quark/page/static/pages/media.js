// @ts-check
/** One artifact, shown as what it is: sound, video, points, a page, prose, matrices, curves, directories. */

import { PointCloud, readPly } from "../charts/point_cloud.js";
import { Ridges } from "../charts/ridges.js";
import { html } from "../data/html.js";
import { renderMarkdown } from "../data/markdown.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { ask, askJson } from "./connection.js";
import { change, root } from "./links.js";
import { writeBytes, writeMany, writeNumber, writeStep } from "./texts.js";

const MOST_BYTES = 32 * 2 ** 20;
const MOST_CLASSES = 60;
const MOST_FILES = 1000;
const MOST_RIDGES = 60;
const CURVE_PX = 320;
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9"];

/** @param {any} row @param {AbortSignal} signal */
async function readPayload(row, signal) {
  if (row.size_bytes > MOST_BYTES) throw new Error(`it has ${writeBytes(row.size_bytes)}, too many to show. Download it`);
  return ask(row.url, {}, signal);
}

/** @param {{ run: string, row: any }} props an artifact with a `view` */
export function MediaPanel({ run, row }) {
  const title = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => title.current?.focus(), [row.id]);
  const View = VIEWS[row.view];
  const { caption, ...facts } = row.facts ?? {};
  const told = Object.entries(facts).map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? writeNumber(value) : value}`);
  return html`<section class="media" aria-labelledby="media-title"><div class="bar"><h2 id="media-title" tabindex="-1" ref=${title}>${row.name}${row.step === null ? "" : ` · step ${writeStep(row.step)}`}</h2>
      <button onClick=${() => change({ media: null })}>Close</button></div>
    ${View && html`<${View} key=${row.id} run=${run} row=${row} />`}
    ${caption && html`<p class="free">${caption}</p>`}
    <p class="quiet">${[row.type.replaceAll("_", " "), writeBytes(row.size_bytes), ...told].join(" · ")}</p></section>`;
}

/** @param {any} row */
function addressOf(row) {
  return new URL(row.url, root).href;
}

/** @param {{ row: any }} props */
function Sound({ row }) {
  return html`<audio controls preload="metadata" src=${addressOf(row)} aria-label=${row.name}></audio>`;
}

/** @param {{ row: any }} props */
function Film({ row }) {
  return html`<video controls preload="metadata" src=${addressOf(row)} aria-label=${row.name}></video>`;
}

/** A page in a frame that runs nothing, and reaches nothing. @param {{ row: any }} props */
function Page({ row }) {
  return html`<iframe class="page-frame" sandbox="" referrerpolicy="no-referrer" title=${row.name} src=${`${addressOf(row)}?page=1`}></iframe>
    <p class="quiet">without scripts and external content</p>`;
}

/** @param {{ run: string, row: any }} props */
function Prose({ run, row }) {
  const { value, mistake } = useAnswer((signal) => askJson(`api/runs/${encodeURIComponent(run)}/text`, { sha256: row.sha256 }, signal), [row.sha256]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  return html`<div class="prose">${value && renderMarkdown(value.text)}</div>${value?.is_cut && html`<p class="quiet">the beginning of it; the download has all</p>`}`;
}

/** @param {{ row: any }} props */
function Points({ row }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const [says, setSays] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    /** @type {PointCloud | null} */
    let cloud = null;
    const load = async () => {
      const points = readPly(await (await readPayload(row, ended.signal)).arrayBuffer());
      if (ended.signal.aborted || !host.current) return;
      cloud = new PointCloud(host.current, points, row.name);
      const thinned = points.x.length < points.count ? `${writeStep(points.x.length)} of ` : "";
      setSays(`${thinned}${writeMany(points.count, "point")} · drag or arrow keys turn, wheel or + and - zoom`);
    };
    load().catch((error) => {
      if (!ended.signal.aborted) setSays(String(error.message ?? error));
    });
    return () => {
      ended.abort();
      cloud?.destroy();
    };
  }, [row.sha256]);
  return html`<div ref=${host} class="points-box"></div><p class="quiet" role="status">${says}</p>`;
}

/** A payload of JSON. @param {any} row @returns {{ value: any, mistake: string }} */
function useJson(row) {
  return useAnswer(async (signal) => (await readPayload(row, signal)).json(), [row.sha256]);
}

/** @param {{ row: any }} props */
function Matrix({ row }) {
  const { value, mistake } = useJson(row);
  const [isShare, setShare] = useState(false);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!Array.isArray(value?.matrix) || !Array.isArray(value.labels)) return html`<p class="quiet">…</p>`;
  const labels = value.labels.slice(0, MOST_CLASSES).map(String);
  const matrix = value.matrix.slice(0, MOST_CLASSES).map((/** @type {any} */ line) => (Array.isArray(line) ? line : []));
  const sums = matrix.map((/** @type {any[]} */ line) => line.reduce((sum, count) => sum + Number(count), 0));
  return html`<label><input type="checkbox" checked=${isShare} onChange=${() => setShare(!isShare)} /> as shares of the true class</label>
    <div class="scrolls" tabindex="0" role="region" aria-label=${`Confusion matrix ${row.name}`}><table class="matrix"><caption class="quiet">true classes down, predicted across</caption>
    <thead><tr><td></td>${labels.map((/** @type {string} */ label) => html`<th scope="col">${label}</th>`)}</tr></thead>
    <tbody>${matrix.map((/** @type {number[]} */ line, /** @type {number} */ at) => html`<tr key=${at}><th scope="row">${labels[at]}</th>
      ${labels.map((/** @type {string} */ label, /** @type {number} */ column) => {
        const share = sums[at] > 0 ? Number(line[column]) / sums[at] : 0;
        const hue = at === column ? "0 158 115" : "213 94 0";
        return html`<td class="number" title=${`${labels[at]} taken for ${label}: ${line[column]}, ${(share * 100).toFixed(1)} %`}
          style=${{ background: `rgb(${hue} / ${(share * 0.75).toFixed(3)})` }}>${isShare ? `${(share * 100).toFixed(1)} %` : writeNumber(line[column])}</td>`;
      })}</tr>`)}</tbody></table></div>
    ${value.labels.length > labels.length && html`<p class="quiet">${labels.length} of ${value.labels.length} classes; the download has all</p>`}`;
}

/** @param {{ row: any }} props */
function Curves({ row }) {
  const { value, mistake } = useJson(row);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  const curves = (Array.isArray(value?.curves) ? value.curves : []).filter((/** @type {any} */ curve) => Array.isArray(curve?.x) && Array.isArray(curve?.y));
  const at = (/** @type {unknown} */ share) => Math.max(0, Math.min(1, Number(share) || 0));
  return html`<svg class="scatter area" viewBox="-34 -6 ${CURVE_PX + 46} ${CURVE_PX + 40}" role="img" aria-label=${`${row.name}: ${curves.map((/** @type {any} */ curve) => `${curve.label} ${writeNumber(curve.area)}`).join(", ")}`}>
      <rect class="axis" x="0" y="0" width=${CURVE_PX} height=${CURVE_PX} />
      ${row.type === "roc_curve" && html`<path class="axis" stroke-dasharray="4 4" d="M0 ${CURVE_PX} L${CURVE_PX} 0" />`}
      ${[0, 0.5, 1].map((tick) => html`<text key=${tick} x=${tick * CURVE_PX} y=${CURVE_PX + 14} text-anchor="middle">${tick}</text><text x="-5" y=${(1 - tick) * CURVE_PX + 4} text-anchor="end">${tick}</text>`)}
      <text class="axis-title" x=${CURVE_PX / 2} y=${CURVE_PX + 28} text-anchor="middle">${String(value?.x ?? "")}</text>
      ${curves.map((/** @type {any} */ curve, /** @type {number} */ index) => html`<polyline key=${index} fill="none" stroke=${COLOURS[index % COLOURS.length]} stroke-width="2"
        points=${curve.x.map((/** @type {any} */ x, /** @type {number} */ i) => `${(at(x) * CURVE_PX).toFixed(1)},${((1 - at(curve.y[i])) * CURVE_PX).toFixed(1)}`).join(" ")} />`)}</svg>
    <ul class="legend-list">${curves.map((/** @type {any} */ curve, /** @type {number} */ index) => html`<li key=${index}><span class="swatch-line" style=${{ background: COLOURS[index % COLOURS.length] }}></span>
      ${String(curve.label)} · ${String(value.area).replaceAll("_", " ")} ${writeNumber(curve.area)}</li>`)}</ul>`;
}

/** All histograms of this name, over steps. @param {{ run: string, row: any }} props */
function Histograms({ run, row }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const { value, mistake } = useAnswer(async (signal) => {
    const found = await askJson(`api/runs/${encodeURIComponent(run)}/artifacts`, { text: row.name, type: "histogram", limit: 200 }, signal);
    const own = found.artifacts.filter((/** @type {any} */ one) => one.key === row.key && one.url);
    const stride = Math.max(1, Math.ceil(own.length / MOST_RIDGES));
    const rows = own.filter((/** @type {any} */ _, /** @type {number} */ i) => (own.length - 1 - i) % stride === 0);
    return Promise.all(rows.map(async (/** @type {any} */ one) => {
      const { bins, counts } = await (await readPayload(one, signal)).json();
      return { parameter: row.name, type: "histogram", step: one.step ?? 0, edges: bins.map(Number), counts: counts.map(Number) };
    }));
  }, [row.key]);
  useEffect(() => {
    if (!host.current || !value?.length) return;
    const ridges = [...value].sort((a, b) => a.step - b.step);
    const drawn = new Ridges(host.current, { title: row.name, ridges, chosen: row.step });
    return () => drawn.destroy();
  }, [value, row.step]);
  return html`${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}<div ref=${host}></div>`;
}

/** @param {{ run: string, row: any }} props */
function Directory({ run, row }) {
  const { value, mistake } = useJson(row);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  const files = Array.isArray(value?.files) ? value.files : [];
  const skipped = Object.entries(value?.skipped ?? {});
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${`Files of ${row.name}`}><table class="plain-table"><thead><tr><th scope="col">file</th><th scope="col" class="number">size</th><th scope="col"></th></tr></thead>
    <tbody>${files.slice(0, MOST_FILES).map((/** @type {any} */ file) => html`<tr key=${file.path}><th scope="row">${String(file.path)}</th><td class="number">${writeBytes(Number(file.size_bytes))}</td>
      <td>${file.not_kept ? "not stored" : /^[0-9a-f]{64}$/.test(file.sha256) && html`<a download="" aria-label=${`Download ${file.path}`} href=${new URL(`artifacts/${encodeURIComponent(run)}/${file.sha256}?download=1`, root).href}>Download</a>`}</td></tr>`)}</tbody></table></div>
    ${files.length > MOST_FILES && html`<p class="quiet">${MOST_FILES} of ${writeMany(files.length, "file")}; quark artifacts get downloads all</p>`}
    ${skipped.length > 0 && html`<details><summary>${writeMany(skipped.length, "entry", "entries")} omitted</summary><ul>${skipped.map(([path, reason]) => html`<li key=${path}>${path}: ${String(reason)}</li>`)}</ul></details>`}`;
}

/** @param {{ row: any }} props */
function Reference({ row }) {
  const { value, mistake } = useJson(row);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  return html`<table class="plain-table"><tbody>${Object.entries(value ?? {}).map(([name, what]) => html`<tr key=${name}><th scope="row">${name.replaceAll("_", " ")}</th><td>${String(what)}</td></tr>`)}</tbody></table>`;
}

/** @type {Record<string, any>} */
const VIEWS = { audio: Sound, video: Film, html: Page, markdown: Prose, points: Points, matrix: Matrix, curves: Curves, histogram: Histograms, directory: Directory, reference: Reference };
