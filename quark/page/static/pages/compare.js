// @ts-check
/** Runs and groups of runs side by side: the verdict, what was set differently, and every curve. */

import { MetricChart } from "../charts/metric_chart.js";
import { readTheme } from "../charts/theme.js";
import { styleLine } from "../data/colours.js";
import { readCurves } from "../data/curves.js";
import { subtractCurve } from "../data/differences.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { useSaid } from "./answers.js";
import { CopyButton, HealthBadge, SeverityBadge, StateBadge } from "./badges.js";
import { MetricGroup, groupMetrics, listOpen, readNames, writeNames } from "./chart_list.js";
import { Parallel, Scatter } from "./compare_runs.js";
import { LayerChanges, PhasePair, Verdict } from "./compare_verdict.js";
import { Refused, ask, askJson, follow, isPassing } from "./connection.js";
import { FindMetric, Smooth, chooseAxis } from "./controls.js";
import { useTile } from "./drawing.js";
import { listMoves, takeKeys } from "./keyboard.js";
import { useLate } from "./late.js";
import { change, go, makeLink } from "./links.js";
import { writeMany, writeNumber, writeStep, writeValue } from "./texts.js";
import { WantedCurves } from "./wanted_curves.js";

// One metric of all sides: a line for each, the band of its runs, or what it is beside the baseline.

// The curves of sides that the page of comparisons shows: of metrics in sight only.

/** @typedef {{ x: string, low: number | null, high: number | null, members: boolean, entries: number }} GroupView */
/** @typedef {{ curves: Curve[], asked: string, message: string }} KeptGroup */

const MOST_KEYS = 12;
const GATHER_MS = 8;
const AGAIN_MS = 2000;

/** What was asked for as x stands where a chart looks for it. @param {Curve} curve @param {string} x @returns {Curve} */
function placeCurve(curve, x) {
  return x === "relative" ? { ...curve, time: curve.step } : x === "epoch" ? { ...curve, epoch: curve.step } : curve;
}

/** @extends {WantedCurves<KeptGroup, GroupView>} */
export class GroupStore extends WantedCurves {
  /** @param {string[]} sides ids of each, parted by commas @param {GroupView} view @param {() => void} changed */
  constructor(sides, view, changed) {
    super(view, changed);
    this.sides = sides;
    this.times = 0;
  }

  get asked() {
    return JSON.stringify([this.view, this.times]);
  }

  /** What is in sight is read anew: its runs have gone on. */
  refresh() {
    this.times += 1;
    this.restart();
  }

  gather() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const keys = [...this.wanted.keys()].filter((key) => this.kept.get(key)?.asked !== this.asked);
      for (let at = 0; at < keys.length; at += MOST_KEYS) this.fetch(keys.slice(at, at + MOST_KEYS));
    }, GATHER_MS);
  }

  /** @param {string[]} keys */
  async fetch(keys) {
    const { view, asked } = this;
    const { signal } = this.turn;
    try {
      const answer = await ask("api/compare/curves", {
        side: this.sides, key: keys, x: view.x, low: view.low, high: view.high,
        members: view.members ? 1 : 0, entries: view.entries,
      }, signal);
      const curves = readCurves(decodePack(await answer.arrayBuffer())).map((curve) => placeCurve(curve, view.x));
      if (signal.aborted) return;
      for (const key of keys) this.kept.set(key, { curves: curves.filter((curve) => curve.key === key), asked, message: "" });
    } catch (error) {
      if (signal.aborted) return;
      const message = error instanceof Error ? error.message : String(error);
      const kept = isPassing(error) ? "" : asked;
      // A server that is busy or lost is asked again, for what is still in sight.
      if (!kept) this.timer = setTimeout(() => this.gather(), AGAIN_MS);
      for (const key of keys) this.kept.set(key, { curves: this.kept.get(key)?.curves ?? [], asked: kept, message });
    }
    this.changed();
  }
}

/** @typedef {import("../data/curves.js").Curve} Curve */

/**
 * Which curves are drawn and how: a side keeps its colour whatever other sides are hidden.
 * @param {Curve[]} curves @param {{ sides: any[], hidden: Set<number>, base: number, isDifference: boolean }} look
 */
export function chooseCurves(curves, { sides, hidden, base, isDifference }) {
  const baseline = curves.find((curve) => curve.side === base && !curve.run);
  const shown = curves.filter((curve) => !hidden.has(curve.side) && !(isDifference && curve.side === base));
  const drawn = isDifference && baseline ? shown.map((curve) => subtractCurve(curve, baseline)) : isDifference ? [] : shown;
  const faces = drawn.map((curve) => ({
    name: writeSide(sides[curve.side], curve.runs), index: curve.side, isThin: Boolean(curve.run),
  }));
  return { curves: drawn, faces };
}

/** @param {any} side @param {number} runs that have the metric */
function writeSide(side, runs) {
  if (side.runs.length === 1) return side.name;
  return `${side.name} (n=${runs}${runs < side.runs.length ? ` of ${side.runs.length}` : ""})`;
}

/** @param {{ metric: any, chart: any }} props */
export function CompareTile({ metric, chart }) {
  const { host, drawn, width, isNear } = useTile();
  const { store, view, look } = chart;
  useLayoutEffect(() => isNear ? store.want(metric.key) : undefined, [isNear, metric.key, store]);
  const kept = store.read(metric.key);
  const { curves, faces } = chooseCurves(kept?.curves ?? [], look);
  const hasCurves = curves.length > 0;
  useLayoutEffect(() => {
    if (!host.current || (!isNear && !drawn.current)) return;
    if (!hasCurves) {
      drawn.current?.destroy();
      drawn.current = null;
      return;
    }
    const props = {
      title: look.isDifference ? `${metric.name} less ${look.sides[look.base].name}` : metric.name,
      curves, faces, window: view.window, whole: chart.whole, x: /** @type {any} */ (view.x), start_s: 0,
      isLog: view.isLog && !look.isDifference, smooth: view.smooth, threshold: look.isDifference ? 0 : null,
      onZoom: chart.zoom,
    };
    if (drawn.current) drawn.current.update(props);
    else drawn.current = new MetricChart(host.current, { ...props, width: width.current });
  }, [kept, isNear, view, look, hasCurves, metric.name]);
  const says = kept?.message || (kept ? "no visible side has a value here" : "…");
  return html`<div class="tile" data-metric=${metric.key}>
    <div ref=${host} class="tile-chart"></div>
    ${!hasCurves && html`<h3 class="chart-title">${metric.name}</h3><p class="quiet">${says}</p>`}
  </div>`;
}

// Why one side's result is not that of another: verdict, since when, and what is to blame.

const CAUSES = new Set(["Probably", "Possibly", "Unlikely", "Differs"]);

/** @param {string} text */
function capitalise(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** @param {{ judged: string, baseline: string, names: [string, string], version: number }} props */
export function Explanation({ judged, baseline, names, version }) {
  const said = useSaid("api/compare/why", { side: [judged, baseline] }, version);
  if (!said) return html`<p class="quiet" aria-busy="true">The analysis is running …</p>`;
  if (said.state === "failed") return html`<p class="mistake" role="alert">${said.note}</p>`;
  const { result } = said;
  const causes = result.rows.filter((/** @type {any} */ row) => CAUSES.has(row.label));
  const others = result.rows.filter((/** @type {any} */ row) => !CAUSES.has(row.label));
  return html`<section class="why" aria-labelledby="why-title"><h2 id="why-title">Why ${names[0]} differs from ${names[1]}</h2>
    <p class="why-verdict" data-verdict=${result.verdict}><strong>${result.headline}</strong></p>
    <p>${capitalise(result.reason)}.</p>
    <p>${capitalise(result.first_difference.summary)}.</p>
    ${causes.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Causes"><table class="plain-table causes"><thead><tr>
      <th scope="col">confidence</th><th scope="col">kind</th><th scope="col">what differs</th><th scope="col">why</th></tr></thead>
      <tbody>${causes.map((/** @type {any} */ row, /** @type {number} */ number) => html`<tr key=${number} data-standing=${row.label}>
        <th scope="row">${row.label}</th><td>${row.kind}</td><td><code>${row.place}</code></td><td>${row.words}</td></tr>`)}</tbody></table></div>`}
    ${others.length > 0 && html`<dl class="why-rest">${others.map((/** @type {any} */ row, /** @type {number} */ number) => html`<dt key=${`t${number}`}>${row.label}</dt>
      <dd key=${`d${number}`}>${row.label === "To confirm" ? html`<code>${row.place}</code>` : row.place}${row.words && html` <span class="quiet">${row.words}</span>`}</dd>`)}</dl>`}
    ${result.notes.length > 0 && html`<ul class="remarks">${result.notes.map((/** @type {string} */ note) => html`<li key=${note} class="quiet">${note}</li>`)}</ul>`}
  </section>`;
}

const LIVE_MS = 5000;
const ENTRIES = 1000;
const TABS = [
  { name: "curves", title: "Curves" }, { name: "why", title: "Why" }, { name: "code", title: "Code" }, { name: "scatter", title: "Scatter" }, { name: "parallel", title: "Parallel" },
  { name: "layers", title: "Layers by change" }, { name: "phases", title: "Phases" },
];
const loadSources = () => import("./sources.js");
const AXES = [["step", "step"], ["epoch", "epoch"], ["relative", "time since the start"]];

/** What the address says of how to look. @param {URLSearchParams} query @param {number} count of sides */
export function readLook(query, count) {
  const number = (/** @type {string} */ name, /** @type {number} */ fallback) => {
    const value = Number(query.get(name) ?? NaN);
    return Number.isInteger(value) && value >= 0 && value < count ? value : fallback;
  };
  const base = number("base", 0);
  const other = number("other", base === 0 ? Math.min(1, count - 1) : 0);
  const [from, to, smooth] = ["from", "to", "smooth"].map((name) => Number(query.get(name) ?? NaN));
  const tab = query.get("tab") ?? "curves";
  const x = query.get("x") ?? "step";
  return {
    base, other, hidden: new Set((query.get("hide") ?? "").split(",").filter(Boolean).map(Number)),
    isDifference: query.get("difference") === "1", members: query.get("runs") === "1",
    find: query.get("find") ?? "", isLog: query.get("log") === "1", smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    x: AXES.some(([name]) => name === x) ? x : "step",
    window: /** @type {[number, number] | null} */ (Number.isFinite(from) && Number.isFinite(to) && from <= to ? [from, to] : null),
    tab: TABS.some(({ name }) => name === tab) ? tab : "curves",
    target: query.get("target") ?? "", direction: query.get("direction") ?? "at_most", value: query.get("value") ?? "",
  };
}

/** Which runs the address names, as the server wants it. @param {URLSearchParams} query */
function readRuns(query) {
  return { run: query.getAll("run"), side: query.getAll("side"), group: query.getAll("group") };
}

/** @param {{ place: import("./links.js").Place }} props */
export function ComparePage({ place }) {
  const asked = JSON.stringify(readRuns(place.query));
  const [data, setData] = useState(/** @type {any} */ (null));
  const [mistake, setMistake] = useState("");
  const [waits, setWaits] = useState("");
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const load = async (/** @type {AbortSignal} */ signal) => {
      try {
        const next = await askJson("api/compare", JSON.parse(asked), signal);
        setData(next);
        setMistake("");
        setVersion((old) => old + 1);
        return Object.values(next.runs).some((/** @type {any} */ run) => run.state === "running");
      } catch (error) {
        if (signal.aborted) throw error;
        if (isPassing(error)) {
          setWaits(error instanceof Error ? error.message : "");
          throw error;
        }
        if (error instanceof Refused) setMistake(error.message);
        return false;
      }
    };
    return follow(load, LIVE_MS);
  }, [asked]);
  useEffect(() => {
    document.title = "Compare · Quark";
  }, []);
  return html`<header class="top"><a class="brand" href=${makeLink([])}>quark</a>
      <a href=${makeLink([])}>All runs</a>
      <span class="actions"><${CopyButton} text=${location.href}>Copy link<//></span></header>
    <main id="main" aria-busy=${!data && !mistake}>${mistake
      ? html`<h1>These runs cannot be compared</h1><pre class="mistake" role="alert">${mistake}</pre><p><a href=${makeLink([])}>All runs</a></p>`
      : data ? html`<${Comparison} key=${asked} data=${data} place=${place} version=${version} />` : html`<h1 class="quiet">Compare</h1>${waits && html`<p role="status">${waits}</p>`}`}</main>`;
}

/** @param {{ data: any, place: import("./links.js").Place, version: number }} props */
function Comparison({ data, place, version }) {
  const look = useMemo(() => readLook(place.query, data.sides.length), [place.query.toString(), data.sides.length]);
  const sides = data.sides.map((/** @type {any} */ side) => side.runs.join(","));
  const verdict = useVerdict(sides[look.other], sides[look.base], look, version);
  const names = /** @type {[string, string]} */ ([data.sides[look.other].name, data.sides[look.base].name]);
  const isPair = look.other !== look.base;
  const result = verdict?.state === "computed" ? verdict.result : null;
  const waits = !isPair ? "Add a second side to compare." : verdict?.state === "failed" ? verdict.note : "…";
  /** @param {string} tab */
  const show = (tab) => change({ tab: tab === "curves" ? null : tab });
  return html`<h1>${writeMany(data.sides.length, "side")}, ${writeMany(Object.keys(data.runs).length, "run")}</h1>
    <${GroupChooser} data=${data} query=${place.query} />
    <${Sides} data=${data} look=${look} />
    ${isPair ? html`<${Verdict} verdict=${verdict} names=${names} /><${Target} data=${data} look=${look} />`
      : html`<p class="notice-line">Only one side: choose two or more runs, or group them by a setting that differs.</p>`}
    <${Settings} data=${data} />
    <div class="tabs" role="tablist" aria-label="Views">${TABS.map(({ name, title }) => html`<button key=${name} role="tab" id=${`tab-${name}`}
      aria-selected=${look.tab === name} aria-controls="panel" onClick=${() => show(name)}>${title}</button>`)}</div>
    <div id="panel" role="tabpanel" aria-labelledby=${`tab-${look.tab}`}>
      ${look.tab === "curves" && html`<${Curves} data=${data} look=${look} query=${place.query} sides=${sides} version=${version} />`}
      ${look.tab === "why" && (isPair ? html`<${Explanation} judged=${sides[look.other]} baseline=${sides[look.base]} names=${names} version=${version} />`
        : html`<p class="quiet">${waits}</p>`)}
      ${look.tab === "code" && (isPair ? html`<${LateDiffs} judged=${sides[look.other]} baseline=${sides[look.base]} names=${names} version=${version} />`
        : html`<p class="quiet">${waits}</p>`)}
      ${look.tab === "scatter" && html`<${Scatter} data=${data} query=${place.query} hidden=${look.hidden} version=${version} />`}
      ${look.tab === "parallel" && html`<${Parallel} data=${data} query=${place.query} hidden=${look.hidden} version=${version} />`}
      ${look.tab === "layers" && (result ? html`<${LayerChanges} result=${result} names=${names} />` : html`<p class="quiet">${waits}</p>`)}
      ${look.tab === "phases" && (result ? html`<${PhasePair} result=${result} names=${names} />` : html`<p class="quiet">${waits}</p>`)}
    </div>`;
}

/** @param {Record<string, any>} props those of `SourceDiffs` */
function LateDiffs(props) {
  const page = useLate(loadSources);
  return page && html`<${page.SourceDiffs} ...${props} />`;
}

/** @param {string} primary @param {string} reference @param {any} look @param {number} version */
function useVerdict(primary, reference, look, version) {
  const hasTarget = look.target && look.value !== "" && Number.isFinite(Number(look.value));
  const query = { side: [primary, reference], ...(hasTarget ? { target: look.target, direction: look.direction, value: look.value } : {}) };
  return useSaid("api/compare/verdict", primary === reference ? null : query, version);
}

/** @param {{ data: any, query: URLSearchParams }} props */
function GroupChooser({ data, query }) {
  const runs = Object.keys(data.runs);
  const chosen = query.getAll("group");
  /** @param {string[]} keys */
  const regroup = (keys) => go(makeLink(["compare"], { run: runs, group: keys }));
  const keys = data.group_keys.filter((/** @type {string} */ key) => !chosen.includes(key));
  return html`<div class="bar groups-by"><span>group by</span>
    ${chosen.map((key) => html`<button key=${key} onClick=${() => regroup(chosen.filter((other) => other !== key))} aria-label=${`Group no longer by ${key}`}>
      ${key === "seed" ? "config without seeds" : key} <span aria-hidden="true">×</span></button>`)}
    ${!chosen.length && html`<span class="quiet">nothing: ${query.getAll("side").length ? "sides from the address" : "each run is a side"}</span>`}
    <label><span class="hidden">group also by</span><select value="" onChange=${(/** @type {any} */ event) => event.currentTarget.value && regroup([...chosen, event.currentTarget.value])}>
      <option value="">…</option>${!chosen.includes("seed") && html`<option value="seed">config without seeds</option>`}
      ${keys.filter((/** @type {string} */ key) => key !== "seed").map((/** @type {string} */ key) => html`<option key=${key} value=${key}>${key}</option>`)}</select></label></div>`;
}

/** A line and its dashes, as in the charts. @param {{ number: number }} props */
function Swatch({ number }) {
  const { colour, dash } = styleLine(number, readTheme());
  return html`<svg class="swatch" viewBox="0 0 28 8" width="28" height="8" aria-hidden="true"><path d="M0 4H28" stroke=${colour} stroke-width="3" stroke-dasharray=${dash.join(" ") || undefined} /></svg>`;
}

/** @param {{ data: any, look: ReturnType<typeof readLook> }} props */
function Sides({ data, look }) {
  const main = data.metrics.find((/** @type {any} */ metric) => metric.key === data.main);
  /** @param {number} number */
  const hide = (number) => {
    const next = new Set(look.hidden);
    if (!next.delete(number)) next.add(number);
    change({ hide: [...next].sort((a, b) => a - b).join(",") }, { replace: true });
  };
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Sides"><table class="plain-table sides"><thead><tr>
      <th scope="col">shown</th><th scope="col">side</th><th scope="col">judged</th><th scope="col">baseline</th><th scope="col" class="number">runs</th>
      ${main && html`<th scope="col" class="number">${main.name}</th>`}<th scope="col">health and findings</th></tr></thead>
    <tbody>${data.sides.map((/** @type {any} */ side, /** @type {number} */ number) => html`<tr key=${side.runs.join(",")} data-side=${number}>
      <td><label><input type="checkbox" checked=${!look.hidden.has(number)} onChange=${() => hide(number)} /><span class="hidden">show ${side.name}</span> <${Swatch} number=${number} /></label></td>
      <th scope="row">${side.runs.length === 1 ? html`<a href=${makeLink(["run", side.runs[0]])}>${side.name}</a>`
        : html`<details><summary>${side.name}</summary><ul>${side.runs.map((/** @type {string} */ id) => html`<li key=${id}><a href=${makeLink(["run", id])}>${data.runs[id].name || id}</a></li>`)}</ul></details>`}</th>
      <td><input type="radio" name="other" aria-label=${`Judge ${side.name}`} checked=${look.other === number} onChange=${() => change({ other: String(number), ...(look.base === number ? { base: String(look.other) } : {}) })} /></td>
      <td><input type="radio" name="base" aria-label=${`Use ${side.name} as the baseline`} checked=${look.base === number} onChange=${() => change({ base: String(number), ...(look.other === number ? { other: String(look.base) } : { other: String(look.other) }) })} /></td>
      <td class="number">${side.runs.length}</td>
      ${main && html`<td class="number">${writeNumber(main.last[number])}</td>`}
      <td><${Standing} runs=${side.runs.map((/** @type {string} */ id) => data.runs[id])} /></td></tr>`)}</tbody></table></div>`;
}

const GRAVEST = ["critical", "error", "warning"];

/** How the runs of a side stand: the state where it is not completed, the worst health, the worst finding. @param {{ runs: any[] }} props */
function Standing({ runs }) {
  const states = [...new Set(runs.map((run) => run.state))].filter((state) => state !== "completed");
  const known = runs.filter((run) => run.health?.known).sort((a, b) => a.health.score - b.health.score);
  const worst = runs.map((run) => run.worst).filter((found) => found && GRAVEST.includes(found.severity))
    .sort((a, b) => GRAVEST.indexOf(a.severity) - GRAVEST.indexOf(b.severity));
  return html`${states.map((state) => html`<${StateBadge} key=${state} state=${state} /> `)}
    <${HealthBadge} health=${known[0]?.health ?? runs[0]?.health} />
    ${worst.length > 0 && html` <${SeverityBadge} severity=${worst[0].severity} /> ${worst[0].title}${
      runs.length > 1 ? html` <small>in ${worst.length} of ${runs.length} runs</small>` : worst[0].step === null ? "" : html` <small>since ${writeStep(worst[0].step)}</small>`}`}`;
}

/** When each side reached a value. @param {{ data: any, look: ReturnType<typeof readLook> }} props */
function Target({ data, look }) {
  const main = data.metrics.find((/** @type {any} */ metric) => metric.key === data.main) ?? data.metrics[0];
  const key = look.target || main?.key;
  if (!key) return null;
  /** @param {Record<string, string>} next */
  const set = (next) => change({ target: key, direction: look.direction, ...next }, { together: true });
  return html`<div class="bar target"><label>time until <select value=${key} onChange=${(/** @type {any} */ event) => set({ target: event.currentTarget.value })}>
      ${data.metrics.map((/** @type {any} */ metric) => html`<option key=${metric.key} value=${metric.key}>${metric.name}</option>`)}</select></label>
    <label><span class="hidden">direction</span><select value=${look.direction} onChange=${(/** @type {any} */ event) => set({ direction: event.currentTarget.value })}>
      <option value="at_most">is at most</option><option value="at_least">is at least</option></select></label>
    <label><span class="hidden">value</span><input id="target" type="text" inputmode="decimal" size="8" value=${look.value} onChange=${(/** @type {any} */ event) => set({ value: event.currentTarget.value.trim() })} /></label>
    ${look.value !== "" && !Number.isFinite(Number(look.value)) && html`<span class="mistake" role="alert">${look.value} is not a number</span>`}</div>`;
}

/** @param {{ data: any }} props */
function Settings({ data }) {
  const differs = data.differs.filter((/** @type {any} */ row) => !row.is_seed);
  const seeds = data.differs.length - differs.length;
  return html`<section aria-labelledby="settings-title"><h2 id="settings-title">Settings that differ</h2>
    ${!differs.length && html`<p class="quiet">${data.agreement}${seeds ? " Seeds are omitted." : ""}</p>`}
    ${data.code_notes.map((/** @type {string} */ note) => html`<p key=${note} class="quiet">${note}</p>`)}
    ${differs.length > 0 && html`<div class="scrolls" tabindex="0" role="region" aria-label="Differences"><table class="plain-table"><thead><tr><td></td><td></td>
      ${data.sides.map((/** @type {any} */ side, /** @type {number} */ number) => html`<th key=${number} scope="col"><${Swatch} number=${number} /> ${side.name}</th>`)}</tr></thead>
      <tbody>${differs.map((/** @type {any} */ row) => html`<tr key=${`${row.section} ${row.path}`}><td class="quiet">${row.section}</td><th scope="row">${row.path}</th>
        ${row.values.map((/** @type {any[]} */ values, /** @type {number} */ number) => html`<td key=${number}>${values.map((value) => value === null ? "–" : writeValue(value)).join(", ")}${
          row.counts[number] > values.length ? ` and ${row.counts[number] - values.length} more` : ""}</td>`)}</tr>`)}</tbody></table></div>`}
    <details><summary>equal: ${writeMany(data.equal_count, "setting")}${seeds ? `, and ${writeMany(seeds, "seed")} omitted` : ""}</summary>
      <table class="plain-table"><tbody>${data.equal.map((/** @type {any} */ row) => html`<tr key=${`${row.section} ${row.path}`}><td class="quiet">${row.section}</td>
        <th scope="row">${row.path}</th><td>${row.value === null ? "–" : writeValue(row.value)}</td></tr>`)}</tbody></table>
      ${data.equal_count > data.equal.length && html`<p class="quiet">and ${writeMany(data.equal_count - data.equal.length, "more setting")}</p>`}</details></section>`;
}

/** @param {{ data: any, look: ReturnType<typeof readLook>, query: URLSearchParams, sides: string[], version: number }} props */
function Curves({ data, look, query, sides, version }) {
  const [drawn, setDrawn] = useState(0);
  const view = useMemo(() => ({
    x: look.x, low: look.window?.[0] ?? null, high: look.window?.[1] ?? null, members: look.members,
    entries: Math.round(ENTRIES * Math.min(2, globalThis.devicePixelRatio || 1)),
  }), [look]);
  const store = useMemo(() => new GroupStore(sides, view, () => setDrawn((old) => old + 1)), [sides.join("|")]);
  useEffect(() => () => store.close(), [store]);
  useEffect(() => store.show(view), [store, view]);
  const first = useRef(version);
  useEffect(() => {
    if (version !== first.current) store.refresh();
  }, [version, store]);
  const whole = findWhole(store);
  const zoom = (/** @type {number | null} */ from, /** @type {number | null} */ to, /** @type {boolean} */ together = false) => change(
    { from: from === null ? null : String(Number(from.toPrecision(15))), to: to === null ? null : String(Number(to.toPrecision(15))) }, { together });
  const chart = useMemo(() => ({
    store, view: look, zoom, whole, look: { sides: data.sides, hidden: look.hidden, base: look.base, isDifference: look.isDifference },
  }), [store, look, data.sides, String(whole), drawn]);
  const keys = useRef(chart);
  keys.current = chart;
  useEffect(() => takeKeys(makeKeys(keys)), []);
  const groups = useMemo(() => groupMetrics(data.metrics, look.find), [data.metrics, look.find]);
  const open = useMemo(() => listOpen(groups, look.find !== ""), [groups, look.find]);
  const turned = readNames(query.get("turned"));
  const turn = (/** @type {string} */ name) => {
    const next = new Set(turned);
    if (!next.delete(name)) next.add(name);
    change({ turned: writeNames(next) }, { replace: true });
  };
  return html`<${CurveControls} look=${look} />
    ${!groups.size && html`<p class="notice-line">${data.metrics.length ? `No metric's name has ${look.find} in it.` : "No metric was logged yet."}</p>`}
    <div class="groups">${[...groups].map(([name, metrics]) => html`<${MetricGroup} key=${name} tile=${CompareTile} name=${name} metrics=${metrics} isOpen=${open.has(name) !== turned.has(name)} turn=${turn} chart=${chart} />`)}</div>
    ${data.metric_count > data.metrics.length && html`<p class="quiet">The first ${data.metrics.length} of ${data.metric_count} metrics.</p>`}`;
}

/** @param {{ look: ReturnType<typeof readLook> }} props */
function CurveControls({ look }) {
  /** @param {string} name @param {string} text */
  const check = (name, text) => html`<label><input type="checkbox" checked=${{ difference: look.isDifference, runs: look.members, log: look.isLog }[name]}
    onChange=${(/** @type {any} */ event) => change({ [name]: event.currentTarget.checked ? "1" : null })} /> ${text}</label>`;
  return html`<div class="bar controls"><${FindMetric} text=${look.find} />
    <label>x <select value=${look.x} onChange=${chooseAxis}>
      ${AXES.map(([name, title]) => html`<option key=${name} value=${name}>${title}</option>`)}</select></label>
    ${check("difference", "difference to the baseline")}${check("runs", "each run")}${check("log", "log y")}
    <${Smooth} smooth=${look.smooth} />
    ${look.window && html`<button class="plain" onClick=${() => change({ from: null, to: null })}>Whole runs</button>`}</div>`;
}

/** Where the curves begin and end, so that all charts show the same part. @param {GroupStore} store @returns {[number, number] | null} */
function findWhole(store) {
  let [low, high] = [store.view.x === "step" ? 0 : Infinity, -Infinity];
  for (const { curves } of store.kept.values()) {
    for (const { step } of curves) {
      if (!step.length) continue;
      low = Math.min(low, step[0]);
      high = Math.max(high, step[step.length - 1]);
    }
  }
  return low < high ? [low, high] : null;
}

/** @param {{ current: any }} current */
function makeKeys(current) {
  return [
    { key: "/", says: "find a metric", act: () => document.getElementById("find")?.focus() },
    ...listMoves(() => current.current),
    { key: "0", says: "the whole runs", act: () => current.current.zoom(null, null) },
    { key: "l", says: "log axis on or off", act: () => change({ log: current.current.view.isLog ? null : "1" }) },
  ];
}
