// @ts-check
/** What a run has printed: the newest lines, older ones on demand, and those that come. */

import { html } from "../data/html.js";
import { useEffect, useLayoutEffect, useRef, useState } from "../vendor/hooks.js";
import { FreeText } from "./badges.js";
import { usePages } from "./run_tabs.js";
import { writeCount, writeTime } from "./texts.js";

const LOOK_MS = 2000;
const NEAR_PX = 40;
const STREAMS = ["stdout", "stderr"];

/** Counts up while a run goes on and the page is seen. @param {boolean} isRunning */
function useLooks(isRunning) {
  const [looks, setLooks] = useState(0);
  useEffect(() => {
    if (!isRunning) return () => {};
    const timer = setInterval(() => {
      if (!document.hidden) setLooks((old) => old + 1);
    }, LOOK_MS);
    return () => clearInterval(timer);
  }, [isRunning]);
  return looks;
}

/** @param {{ run: string, query: URLSearchParams, change: (changes: Record<string, string>) => void, isRunning: boolean, absent: Record<string, string> }} props */
export function Console({ run, query, change, isRunning, absent }) {
  const text = query.get("text") ?? "";
  const stream = STREAMS.find((name) => name === query.get("stream")) ?? "";
  const looks = useLooks(isRunning);
  const { rows, next, mistake, isReady, more } = usePages(`api/runs/${encodeURIComponent(run)}/console`,
    { stream: stream || null, text: text || null }, "lines", "before", isRunning ? looks : -1);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const isAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (box.current && isAtEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [rows]);
  const note = () => {
    const { scrollTop = 0, scrollHeight = 0, clientHeight = 0 } = box.current ?? {};
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
  };
  const hasRanks = rows.some((row) => row.rank);
  return html`<div class="bar">
      <label>stream <select value=${stream} onChange=${(/** @type {any} */ event) => change({ stream: event.currentTarget.value })}>
        <option value="">both</option>${STREAMS.map((item) => html`<option key=${item} value=${item}>${item}</option>`)}</select></label>
      <label>text <input id="find-line" type="text" value=${text}
        onInput=${(/** @type {any} */ event) => change({ text: event.currentTarget.value })} /></label></div>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${next && html`<button class="plain more" onClick=${more}>older</button>`}
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">No line was kept${stream || text ? " that fits" : ""}. ${!stream && !text && absent?.console}</p>`}
    ${rows.length > 0 && html`<div class="console" ref=${box} onScroll=${note} tabindex="0" role="region" aria-label="What the run has printed">
      <ol>${rows.map((row) => html`<li key=${row.id} class=${row.stream} title=${`${writeTime(row.at)} ${row.stream}`}>
        ${row.left_out > 0 && html`<p class="quiet">… ${writeCount(row.left_out)} lines were left out here …</p>`}
        ${hasRanks && html`<span class="quiet">rank ${row.rank} </span>`}<${FreeText} text=${row.text} /></li>`)}</ol></div>`}`;
}
