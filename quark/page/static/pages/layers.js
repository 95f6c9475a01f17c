// @ts-check
/** All layers of a run over its steps: which of them changed, from when on, and how. */

import { needsLog } from "../charts/fitting.js";
import { listGroups, suggestMode } from "../charts/heat_cells.js";
import { HeatMap } from "../charts/heat_map.js";
import { makeLine } from "../charts/lines.js";
import { MetricChart } from "../charts/metric_chart.js";
import { Ridges } from "../charts/ridges.js";
import { readCurves } from "../data/curves.js";
import { html } from "../data/html.js";
import { decodePack } from "../data/pack.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { StateBadge } from "./badges.js";
import { readNames, writeNames } from "./chart_list.js";
import { Refused, SignInNeeded, ask, askJson, follow, poll } from "./connection.js";
import { useDrawn } from "./drawing.js";
import { listMoves, takeKeys } from "./keyboard.js";
import { SHOWN_AT_ONCE, STATISTICS, alignParameters, askGrid, findStatistic, hasCells } from "./layer_maps.js";
import { change, go, makeLink } from "./links.js";
import { spell, writeMany, writeStep } from "./texts.js";

// One layer or parameter: its figures over steps, and how its values spread.

/** @typedef {import("../data/curves.js").Curve} Curve */
/** @typedef {import("../charts/ridges.js").Ridge} Ridge */

const MOST_CHARTS = 12;
const ENTRIES = 600;
const FIELDS = {
  layer: ["norm", "dead_unit_ratio", "std", "mean", "saturation_ratio", "sample_variation_ratio"],
  parameter: ["gradient_norm", "update_to_parameter_ratio", "value_norm", "update_norm", "value_std", "gradient_near_zero_ratio"],
};

/** Curves of one figure together. @param {Curve[]} curves @returns {{ title: string, curves: Curve[] }[]} */
export function groupFigures(curves) {
  /** @type {Map<string, Curve[]>} */
  const grouped = new Map();
  for (const curve of curves) {
    const title = [curve.summary, curve.field].filter(Boolean).join(" ").replaceAll("_", " ");
    grouped.set(title, [...grouped.get(title) ?? [], curve]);
  }
  return [...grouped].map(([title, own]) => ({ title, curves: own }));
}

/** Histograms as the server packs them. @param {import("../data/pack.js").Pack} pack @returns {Map<string, Ridge[]>} by what they are of */
export function readRidges({ head, columns }) {
  /** @type {Map<string, Ridge[]>} */
  const grouped = new Map();
  for (const { parameter, type, step, edges, counts } of head.ridges ?? []) {
    const title = `${type} of ${parameter}`;
    const ridge = { parameter, type, step, edges: columns.get(edges) ?? [], counts: columns.get(counts) ?? [] };
    grouped.set(title, [...grouped.get(title) ?? [], ridge]);
  }
  return grouped;
}

/**
 * What there is of a layer, of its parameters besides, or of a parameter.
 * @param {string} run @param {string} name @param {"layer" | "parameter"} kind @param {[number, number] | null} window @param {AbortSignal} signal
 */
async function readLayer(run, name, kind, window, signal) {
  const kinds = kind === "layer" ? /** @type {const} */ (["layer", "parameter"]) : /** @type {const} */ (["parameter"]);
  const packs = await Promise.all(kinds.map(async (one, at) => {
    const answer = await ask(`api/runs/${encodeURIComponent(run)}/module`, {
      kind: one, name, field: FIELDS[one], entries: ENTRIES, ridges: at === kinds.length - 1 ? 1 : null,
      low: window && Math.floor(window[0]), high: window && Math.ceil(window[1]),
    }, signal);
    return decodePack(await answer.arrayBuffer());
  }));
  const curves = packs.flatMap(readCurves).filter((curve) => curve.step.length > 0);
  return { figures: groupFigures(curves), ridges: readRidges(packs[packs.length - 1]) };
}

/** @param {{ run: string, view: any, whole: [number, number], findings: any[] }} props */
export function OpenLayer({ run, view, whole, findings }) {
  const [read, setRead] = useState(/** @type {any} */ (null));
  const [mistake, setMistake] = useState("");
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const { layer, kind, window: shown } = view;
  useEffect(() => {
    const ended = new AbortController();
    readLayer(run, layer, kind, shown, ended.signal).then(setRead, (error) => {
      if (!ended.signal.aborted && !(error instanceof SignInNeeded)) setMistake(error.message);
    });
    return () => ended.abort();
  }, [run, layer, kind, String(shown)]);
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }), [layer, read !== null]);
  const own = findings.filter((finding) => finding.culprit === layer || finding.culprit?.startsWith(`${layer}.`) || finding.affected?.includes(layer));
  const marks = own.filter((finding) => typeof finding.step === "number")
    .map((finding) => ({ step: finding.step, text: finding.title, severity: finding.severity, id: finding.id }));
  return html`<section class="layers-open" ref=${place} aria-label=${layer}>
    <div class="title"><h2>${layer}</h2><button type="button" onClick=${() => change({ layer: null, kind: null, at: null })}>Close</button></div>
    ${own.map((finding) => html`<p key=${finding.id}><b>${finding.severity}</b> ${finding.title}${finding.fact ? `: ${finding.fact}` : ""}</p>`)}
    ${mistake && html`<pre class="mistake" role="alert">${mistake}</pre>`}
    <div class="layers-grid">
      ${read?.figures.slice(0, MOST_CHARTS).map((/** @type {any} */ figure) => html`<${FigureChart} key=${figure.title} ...${figure}
        window=${shown} whole=${whole} marks=${marks} layer=${layer} />`)}
      ${[...read?.ridges ?? []].map(([title, ridges]) => html`<${RidgesChart} key=${title} title=${title} ridges=${ridges} at=${view.at} />`)}
    </div></section>`;
}

/** @param {any} props */
function FigureChart({ title, curves, window: shown, whole, marks, layer }) {
  const host = useDrawn(MetricChart, () => ({
    title: `${title} of ${layer}`, curves, window: shown, whole, marks, height: 150,
    isLog: needsLog(curves.map((/** @type {Curve} */ curve) => makeLine(curve))),
    onZoom: (/** @type {number | null} */ low, /** @type {number | null} */ high) =>
      change({ from: low === null ? null : String(low), to: high === null ? null : String(high) }),
  }), [curves, String(shown), String(whole), marks.length]);
  return html`<div ref=${host}></div>`;
}

/** @param {{ title: string, ridges: Ridge[], at: number | null }} props */
function RidgesChart({ title, ridges, at }) {
  const host = useDrawn(Ridges, () => {
    const near = at === null ? null : ridges.reduce((best, { step }) => (Math.abs(step - at) < Math.abs(best - at) ? step : best), ridges[0].step);
    return { title, ridges, chosen: near };
  }, [ridges, at]);
  return html`<div ref=${host}></div>`;
}

/** @typedef {import("./layer_maps.js").Statistic} Statistic */
/** @typedef {import("./layer_maps.js").LayerMap} LayerMap */
/** @typedef {import("../charts/heat_map.js").Mode} Mode */

const LEAST_PHASE_PERCENT = 4;
const POLL_MS = 3000;
const MANY_ROWS = 60;
const LEAST_SHARE = 0.05;
const NOT_ANALYZED = { phases: [], findings: [] };

/** What the address says of how to look. @param {URLSearchParams} query */
export function readLayersView(query) {
  const [from, to] = ["from", "to"].map((name) => Number(query.get(name) ?? NaN));
  return {
    window: /** @type {[number, number] | null} */ (Number.isFinite(from) && Number.isFinite(to) && from < to ? [from, to] : null),
    find: query.get("find") ?? "",
    scale: ["own", "absolute"].includes(query.get("scale") ?? "") ? query.get("scale") : null,
    maps: (query.get("maps") ?? "").split(",").filter(Boolean),
    folded: readNames(query.get("folded")),
    layer: query.get("layer") ?? "",
    kind: query.get("kind") === "parameter" ? "parameter" : "layer",
    at: query.has("at") ? Number(query.get("at")) : null,
  };
}

/** @param {{ place: import("./links.js").Place }} props */
export function LayersPage({ place }) {
  const id = place.run;
  const [mistake, setMistake] = useState("");
  const view = useMemo(() => readLayersView(place.query), [place.query.toString()]);
  const { data, analyses } = useRun(id, setMistake);
  const { maps, offered, state } = useMaps(id, view.maps, data, analyses, setMistake);
  const title = data ? data.run.name || data.run.id : id;
  useEffect(() => {
    document.title = spell(`Layers of ${title} · Quark`);
  }, [title]);
  const whole = findWhole(maps, data);
  const groups = useMemo(() => [...new Set(maps.flatMap(({ grid }) => listGroups(grid.rows)))], [maps]);
  const actions = useRef(/** @type {any} */ (null));
  actions.current = { id, view, whole, groups };
  useEffect(() => takeKeys(makeKeys(actions)), []);
  const isNothing = state === "done" && maps.length === 0 && !mistake;
  return html`
    <${Top} id=${id} title=${title} data=${data} />
    <main id="main" aria-busy=${state === "reading"}>
      <div class="title"><h1>Layers of ${title}</h1>
        ${data && html`<${StateBadge} state=${data.run.state} />
          <span class="facts">${data.run.newest_step === null ? "" : `step ${writeStep(data.run.newest_step)}`}</span>`}</div>
      ${mistake && html`<pre class="mistake" role="alert">${mistake}</pre>`}
      ${isNothing && html`<${Nothing} absent=${data?.absent} />`}
      ${maps.length > 0 && html`<${Shown} id=${id} maps=${maps} offered=${offered} groups=${groups} view=${view} whole=${whole}
        analysis=${data?.analysis ?? NOT_ANALYZED} />`}
    </main>`;
}

/**
 * The run, and again until it is analyzed and the store is there.
 * @param {string} id @param {(text: string) => void} setMistake
 */
function useRun(id, setMistake) {
  const [data, setData] = useState(/** @type {any} */ (null));
  const [analyses, setAnalyses] = useState(0);
  useEffect(() => {
    let wasComputing = false;
    let isLate = false;
    /** @param {AbortSignal} signal */
    const load = async (signal) => {
      try {
        const next = await askJson(`api/runs/${encodeURIComponent(id)}`, {}, signal);
        const isComputing = next.analysis.state === "computing" || Boolean(next.analysis.computing);
        setData(next);
        if (isLate) setMistake("");
        isLate = false;
        // What was found is marked in the maps.
        if (wasComputing && !isComputing) setAnalyses((old) => old + 1);
        wasComputing = isComputing;
        return isComputing;
      } catch (error) {
        if (signal.aborted || error instanceof SignInNeeded) return false;
        setMistake(error instanceof Error ? error.message : String(error));
        if (error instanceof Refused && error.status !== 503) return false;
        isLate = true;
        throw error;
      }
    };
    return follow(load);
  }, [id]);
  return { data, analyses };
}

/** @param {{ id: string, title: string, data: any }} props */
function Top({ id, title, data }) {
  return html`<header class="top"><a class="brand" href=${makeLink([])}>quark</a>
    ${data && html`<a href=${makeLink([], { project: data.run.project })}>${data.run.project}</a>`}
    <a href=${makeLink(["run", id])}>${title}</a></header>`;
}

/** @param {any} props */
function Shown({ id, maps, offered, groups, view, whole, analysis }) {
  return html`<${Controls} view=${view} maps=${maps} offered=${offered} groups=${groups} />
    <${LayerPhases} phases=${analysis.phases ?? []} window=${view.window ?? whole} isZoomed=${view.window !== null} />
    <${Maps} maps=${maps} view=${view} whole=${whole} />
    ${view.layer && html`<${OpenLayer} key=${view.layer} run=${id} view=${view} whole=${whole} findings=${analysis.findings} />`}`;
}

/** @param {{ absent: Record<string, string> | undefined }} props */
function Nothing({ absent }) {
  return html`<p>${absent?.layer && `${absent.layer} `}This run has no records of layers or parameters. In a PyTorch training,
    <code>session.watch(model, optimizer)</code> logs them; then this page shows which layers change, and from when on.</p>`;
}

/**
 * The grids of the maps that are shown, and again whenever the run has something new.
 * @param {string} id @param {string[]} chosen @param {any} data @param {number} analyses
 * @param {(text: string) => void} setMistake
 */
function useMaps(id, chosen, data, analyses, setMistake) {
  const [maps, setMaps] = useState(/** @type {LayerMap[]} */ ([]));
  const [offered, setOffered] = useState(/** @type {Statistic[]} */ ([]));
  const [state, setState] = useState("reading");
  const text = chosen.join(",");
  /** @param {AbortSignal} signal */
  const read = async (signal) => {
    const statistics = chosen.length ? chosen.map(findStatistic).filter((one) => one !== null) : STATISTICS.slice(0, -2);
    /** @type {(undefined | null | (LayerMap & { offered: Statistic[] }))[]} */
    const found = statistics.map(() => undefined);
    // A map is shown as soon as all that come before it are known, so that none moves later on.
    const show = () => {
      const end = found.indexOf(undefined);
      const known = found.slice(0, end < 0 ? found.length : end).filter((one) => one !== null && one !== undefined);
      const full = alignParameters(known.filter(({ grid }) => hasCells(grid)));
      if (end < 0 || full.length > 0) setMaps((before) => (end < 0 || before.length <= full.length ? chooseMaps(full, chosen.length > 0) : before));
      const all = new Map([...known.map(({ statistic }) => statistic), ...known.flatMap((one) => one.offered)].map((one) => [one.id, one]));
      if (all.size) setOffered([...all.values()]);
    };
    await Promise.all(statistics.map(async (statistic, at) => {
      const answer = await askGrid(id, statistic, null, signal);
      found[at] = answer && { statistic, ...answer };
      show();
    }));
    setState("done");
  };
  useEffect(() => {
    const ended = new AbortController();
    let stop = () => {};
    read(ended.signal).catch((error) => {
      if (ended.signal.aborted || error instanceof SignInNeeded) return;
      setState("done");
      setMistake(error instanceof Refused ? error.message : String(error.message ?? error));
      if (error instanceof Refused && error.status !== 503) return;
      stop = poll(async (signal) => {
        await read(signal);
        setMistake("");
        return false;
      });
    });
    return () => {
      ended.abort();
      stop();
    };
  }, [id, text, analyses]);
  const cursor = useRef(/** @type {string | null} */ (null));
  cursor.current ??= data?.cursor ?? null;
  const isRunning = data?.run.state === "running";
  useEffect(() => {
    if (!isRunning) return;
    return poll(async (signal) => {
      const answer = await ask(`api/runs/${encodeURIComponent(id)}/changes`, { cursor: cursor.current }, signal);
      if (answer.status === 204) return;
      const { head } = decodePack(await answer.arrayBuffer());
      await read(signal);
      // Only now: what could not be read is asked for again.
      cursor.current = head.cursor;
    }, POLL_MS);
  }, [id, text, isRunning]);
  return { maps, offered, state };
}

/** The first three, those that say something before shares of nothing; gradients of parameters only where layers have none. @param {(LayerMap & { offered: Statistic[] })[]} found @param {boolean} isChosen @returns {LayerMap[]} */
export function chooseMaps(found, isChosen) {
  if (isChosen) return found;
  const hasGradient = found.some(({ statistic }) => statistic.id === "gradient");
  const listed = found.filter(({ statistic }) => !(hasGradient && statistic.id === "parameter-gradient"));
  const telling = listed.filter(({ statistic, grid }) => !statistic.isShare || grid.cells.some((value) => value >= LEAST_SHARE));
  return [...telling, ...listed.filter((one) => !telling.includes(one))].slice(0, SHOWN_AT_ONCE);
}

/** @param {LayerMap[]} maps @param {any} data @returns {[number, number]} */
function findWhole(maps, data) {
  let low = Infinity;
  let high = -Infinity;
  for (const { grid } of maps) {
    if (!grid.step.length) continue;
    low = Math.min(low, grid.step[0]);
    high = Math.max(high, grid.last);
  }
  for (const phase of data?.analysis?.phases ?? []) {
    if (phase.from !== null) low = Math.min(low, phase.from);
    if (phase.to !== null) high = Math.max(high, phase.to);
  }
  return low < high ? [low, high] : low === high ? [low - 0.5, high + 0.5] : [0, 1];
}

/** @param {{ view: ReturnType<typeof readLayersView>, maps: LayerMap[], offered: Statistic[], groups: string[] }} props */
function Controls({ view, maps, offered, groups }) {
  const shown = maps.map(({ statistic }) => statistic.id);
  /** @param {string} id */
  const turn = (id) => {
    const next = shown.includes(id) ? shown.filter((one) => one !== id) : [...shown, id];
    change({ maps: next.join(",") || null });
  };
  const isFolded = groups.length > 0 && groups.every((group) => view.folded.has(group));
  const rows = Math.max(0, ...maps.map(({ grid }) => grid.rows.length));
  return html`<div class="layers-controls">
    <label>Find layer <input id="find" type="search" value=${view.find} placeholder="press /"
      onInput=${(/** @type {any} */ event) => change({ find: event.target.value }, { replace: true })} /></label>
    <fieldset><legend>Colour</legend>
      ${[["", "automatic"], ["own", "relative to the start"], ["absolute", "recorded values"]].map(([value, says]) => html`
        <label key=${value}><input type="radio" name="scale" checked=${(view.scale ?? "") === value}
          onChange=${() => change({ scale: value || null })} /> ${says}</label>`)}</fieldset>
    <fieldset><legend>Maps</legend>${offered.slice(0, 12).map((one) => html`
      <label key=${one.id}><input type="checkbox" checked=${shown.includes(one.id)} onChange=${() => turn(one.id)} /> ${one.title}</label>`)}
    </fieldset>
    ${offered.length > 12 && html`<label>More <select onChange=${(/** @type {any} */ event) => event.target.value && turn(event.target.value)}>
      <option value="">choose</option>${offered.slice(12).map((one) => html`<option key=${one.id} value=${one.id}>${one.title}</option>`)}</select></label>`}
    ${groups.length > 0 && html`<button type="button" onClick=${() => change({ folded: isFolded ? null : writeNames(groups) })}>
      ${isFolded ? "Unfold all" : `Fold ${writeMany(groups.length, "block")}`}</button>`}
    ${rows > MANY_ROWS && !isFolded && html`<span class="quiet">${writeMany(rows, "row")}</span>`}
  </div>`;
}

/** The phases at their steps, above the maps. @param {{ phases: any[], window: [number, number], isZoomed: boolean }} props */
function LayerPhases({ phases, window: shown, isZoomed }) {
  const [low, high] = shown;
  const visible = phases.filter((phase) => phase.from !== null && phase.to !== null && phase.to >= low && phase.from <= high);
  if (!visible.length) return null;
  const percent = (/** @type {number} */ step) => Math.max(0, Math.min(100, (step - low) / (high - low) * 100));
  return html`<div class="map-phases" role="group" aria-label="Phases">${visible.map((phase, at) => {
    const end = visible[at + 1]?.from ?? phase.to;
    const steps = `steps ${writeStep(phase.from)} to ${writeStep(phase.to)}`;
    const width = percent(end) - percent(phase.from);
    const style = { left: `${percent(phase.from)}%`, width: `${width}%` };
    // Too narrow to be hit: it is shown, and the run's page has a button for it.
    if (width < LEAST_PHASE_PERCENT) {
      return html`<span key=${phase.from} class=${`map-phase phase-${phase.name}`} style=${style} title=${`${phase.title}, ${steps}`}></span>`;
    }
    return html`<button key=${phase.from} type="button" class=${`map-phase phase-${phase.name}`} title=${`${phase.title}, ${steps}`}
      aria-pressed=${isZoomed && low === phase.from && high === phase.to} style=${style}
      onClick=${() => change({ from: String(phase.from), to: String(phase.to) })}>${phase.title}</button>`;
  })}</div>`;
}

/** @param {{ maps: LayerMap[], view: ReturnType<typeof readLayersView>, whole: [number, number] }} props */
function Maps({ maps, view, whole }) {
  const drawn = useRef(/** @type {Map<string, HeatMap>} */ (new Map()));
  /** @param {string} from @param {number | null} step */
  const point = (from, step) => {
    for (const [id, map] of drawn.current) if (id !== from) map.showStep(step);
  };
  return html`<div class="layers-maps">${maps.map((map) => html`<${OneMap} key=${map.statistic.id} map=${map} view=${view}
    whole=${whole} drawn=${drawn.current} point=${point} />`)}</div>`;
}

/** A share is shown as it is, whatever is asked for. @param {Statistic} statistic @param {Mode} suggested @param {string | null} scale @returns {Mode} */
function chooseMode({ isShare }, suggested, scale) {
  if (isShare || scale === "absolute") return "absolute";
  return scale === "own" ? "relative" : suggested;
}

/** @param {any} props */
function OneMap({ map, view, whole, drawn, point }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const { statistic, grid } = map;
  const suggested = useMemo(() => suggestMode(grid), [grid]);
  const wholeText = String(whole);
  useEffect(() => {
    if (!host.current) return;
    const mode = chooseMode(statistic, suggested, view.scale);
    const props = {
      title: statistic.title, grid, mode, isShare: statistic.isShare, hidesEmpty: statistic.kind === "layer", folded: view.folded, find: view.find, window: view.window, whole, chosen: view.layer,
      onZoom: zoom, onPoint: (/** @type {number | null} */ step) => point(statistic.id, step),
      onFold: (/** @type {string} */ group) => fold(view.folded, group),
      onPick: (/** @type {{ name: string }} */ row, /** @type {number} */ step) => change({ layer: row.name, kind: statistic.kind, at: String(step) }),
    };
    const before = drawn.get(statistic.id);
    if (before) before.update(props);
    else drawn.set(statistic.id, new HeatMap(host.current, props));
  }, [grid, view, wholeText]);
  useEffect(() => () => {
    drawn.get(statistic.id)?.destroy();
    drawn.delete(statistic.id);
  }, []);
  return html`<div ref=${host} data-map=${statistic.id}></div>`;
}

/** @param {number | null} low @param {number | null} high */
function zoom(low, high) {
  change({ from: low === null ? null : String(Number(low.toPrecision(12))), to: high === null ? null : String(Number(high.toPrecision(12))) });
}

/** @param {Set<string>} folded @param {string} group */
function fold(folded, group) {
  const next = new Set(folded);
  if (!next.delete(group)) next.add(group);
  change({ folded: writeNames(next) || null });
}

/** @param {{ current: any }} actions */
function makeKeys(actions) {
  return [
    { key: "/", says: "find a layer", act: () => document.getElementById("find")?.focus() },
    ...listMoves(() => ({ ...actions.current, zoom })),
    { key: "0", says: "the whole run", act: () => zoom(null, null) },
    { key: "f", says: "fold or unfold all blocks", act: () => {
      const { groups, view } = actions.current;
      const isFolded = groups.every((/** @type {string} */ group) => view.folded.has(group));
      change({ folded: isFolded ? null : writeNames(groups) });
    } },
    { key: "Escape", says: "close the layer", act: () => change({ layer: null, kind: null, at: null }) },
    { key: "e", says: "the run", act: () => go(makeLink(["run", actions.current.id])) },
  ];
}
