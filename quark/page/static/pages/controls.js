// @ts-check
/** How the charts are looked at: which metrics, over what, on which axis, how smooth. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { change } from "./links.js";

const MOST_METRICS = 500;
const OFFER_AFTER_MS = 1000;
const SMOOTHEST = 0.99;

/** @param {{ text: string }} props */
export function FindMetric({ text }) {
  const find = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (find.current && find.current !== document.activeElement) find.current.value = text;
  }, [text]);
  return html`<label>Find metric <input id="find" ref=${find} type="search"
    onInput=${(/** @type {any} */ event) => change({ find: event.currentTarget.value.trim() }, { together: true })} /></label>`;
}

/** @param {{ smooth: number }} props */
export function Smooth({ smooth }) {
  return html`<label>smooth <input type="range" min="0" max=${SMOOTHEST} step="0.01" value=${smooth} aria-valuetext=${smooth ? String(smooth) : "off"}
    onInput=${(/** @type {any} */ event) => change({ smooth: Number(event.currentTarget.value) ? event.currentTarget.value : null }, { together: true })} />
    <output>${smooth || "off"}</output></label>`;
}

/** @param {any} event of a choice of what lies across */
export function chooseAxis(event) {
  change({ x: event.currentTarget.value === "step" ? null : event.currentTarget.value, from: null, to: null });
}

/** @param {{ view: import("./run.js").View, data: any, metrics: any[] }} props */
export function Controls({ view, data, metrics }) {
  const chosen = view.x.startsWith("metric:") ? view.x.slice(7) : "";
  const [isOffering, setOffering] = useState(false);
  // Hundreds of names, for a list that is mostly closed: after the charts.
  useEffect(() => {
    const timer = setTimeout(() => setOffering(true), OFFER_AFTER_MS);
    return () => clearTimeout(timer);
  }, []);
  const offered = isOffering ? metrics.slice(0, MOST_METRICS) : metrics.filter((metric) => metric.key === chosen);
  const ranks = data.ranks ?? [];
  const hasEpochs = metrics.some((metric) => metric.epochs) || (data.axes ?? []).includes("epoch");
  return html`<div class="bar controls">
    <${FindMetric} text=${view.find} />
    <label>x <select value=${view.x} onChange=${chooseAxis}>
      <option value="step">step</option><option value="epoch">epoch${hasEpochs ? "" : " (if logged)"}</option>
      <option value="time">time</option><option value="relative">time since the start</option>
      ${chosen && !metrics.some((metric) => metric.key === chosen) && html`<option value=${view.x}>${chosen}</option>`}
      <optgroup label="a metric">${offered.map((metric) => html`
        <option key=${metric.key} value=${`metric:${metric.key}`}>${metric.name}</option>`)}</optgroup>
    </select></label>
    <label><input type="checkbox" checked=${view.isLog}
      onChange=${(/** @type {any} */ event) => change({ log: event.currentTarget.checked ? "1" : null })} /> log y</label>
    <${Smooth} smooth=${view.smooth} />
    ${(data.attempts ?? []).length > 1 && html`<label>attempts <select value=${view.attempts}
      onChange=${(/** @type {any} */ event) => change({ attempts: event.currentTarget.value === "current" ? null : event.currentTarget.value })}>
      <option value="current">attempts</option><option value="all">all, with repeated steps</option></select></label>`}
    ${ranks.length > 1 && html`<label>ranks <select value=${view.ranks}
      onChange=${(/** @type {any} */ event) => change({ ranks: event.currentTarget.value === "mean" ? null : event.currentTarget.value })}>
      <option value="mean">mean of all</option><option value="each">each</option>
      ${ranks.map((/** @type {number} */ rank) => html`<option key=${rank} value=${rank}>rank ${rank}</option>`)}</select></label>`}
    ${view.window && html`<button class="plain" onClick=${() => change({ from: null, to: null })}>Whole run</button>`}
  </div>`;
}
