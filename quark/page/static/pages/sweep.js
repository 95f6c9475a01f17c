// @ts-check
/** One sweep: is the best really the best, its trials over parallel axes, who has which. */

import { registerChart } from "../charts/registry.js";
import { readTheme } from "../charts/theme.js";
import { listMarks, shadeRate } from "../charts/trial_lines.js";
import { html } from "../data/html.js";
import { placeTicks } from "../data/ticks.js";
import { brushTrials, followBest, listColumns, makeAxis, nameValue, readBrushes, readCell, readTrials, sortTrials, writeBrush } from "../data/trial_axes.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { StateBadge } from "./badges.js";
import { Refused, SignInNeeded, ask, askJson, follow } from "./connection.js";
import { change, go, makeLink } from "./links.js";
import { ParallelAxes } from "./parallel_axes.js";
import { Gap, useRowWindow } from "./row_window.js";
import { Account } from "./session.js";
import { Counts, ImportanceBars, LiveTrials, Rungs, SweepButtons, Verdicts, Workers } from "./sweep_parts.js";
import { spell, writeDuration, writeMany, writeNumber, writeStep, writeTime } from "./texts.js";

// The trials of a sweep as a table, of which only the rows in sight are in the document.

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
    <p class="quiet" role="status">${trials.length === total ? writeMany(total, "trial") : `${writeStep(trials.length)} of ${writeMany(total, "trial")} match`}</p>`;
}

// The best value so far over the trials that have ended, and each of them as a point.

const WIDTH = 720;
const HEIGHT = 220;
const EDGE = { left: 64, right: 16, top: 12, bottom: 34 };

/** @param {{ trials: import("../data/trial_axes.js").Trial[], column: import("../data/trial_axes.js").Column }} props */
export function BestChart({ trials, column }) {
  const steps = followBest(trials, column);
  const axis = makeAxis(column, steps.map((step) => step.trial));
  const known = useRef(/** @type {any} */ (null));
  known.current = steps;
  useEffect(() => registerChart({
    name: "best so far", type: "best",
    describe: () => ({ name: "best so far", type: "best", points: known.current.map((/** @type {any} */ step) => ({ number: step.trial.number, value: step.value, best: step.best, isBest: step.isBest })) }),
  }), []);
  if (!steps.length) return html`<p class="quiet">No trial has ended with a value of ${column.title} yet.</p>`;
  const [wide, tall] = [WIDTH - EDGE.left - EDGE.right, HEIGHT - EDGE.top - EDGE.bottom];
  const last = Math.max(1, steps.length - 1);
  const toX = (/** @type {number} */ at) => EDGE.left + at / last * wide;
  const toY = (/** @type {number} */ value) => EDGE.top + (1 - Number(axis.place(value))) * tall;
  const at = new Map(steps.map((step, place) => [step, place]));
  /** @param {typeof steps} some */
  const points = (some) => some.map((step) => `M${toX(Number(at.get(step))).toFixed(1)} ${toY(step.value).toFixed(1)}h0`).join("");
  const line = steps.flatMap((step, place) => Number.isNaN(step.best) ? [] : [`${place && !Number.isNaN(steps[place - 1].best) ? `H${toX(place).toFixed(1)}V` : `M${toX(place).toFixed(1)} `}${toY(step.best).toFixed(1)}`]).join("");
  const bests = steps.filter((step) => step.isBest);
  const newest = bests[bests.length - 1];
  return html`<figure class="best-chart">
    <svg class="scatter" role="img" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} aria-label=${`Best ${column.title} so far over ${steps.length} trials${newest ? `: ${writeNumber(newest.value)}, of trial ${newest.trial.number}` : ""}`}>
      <path class="axis" d=${`M${EDGE.left} ${EDGE.top}V${HEIGHT - EDGE.bottom}H${WIDTH - EDGE.right}`} />
      ${axis.ticks.map((tick) => html`<text key=${`y${tick.text}`} x=${EDGE.left - 6} y=${EDGE.top + (1 - tick.at) * tall + 4} text-anchor="end">${tick.text}</text>`)}
      ${placeTicks(1, steps.length, 6, 1).map((tick) => html`<text key=${tick} x=${toX(tick - 1)} y=${HEIGHT - EDGE.bottom + 16} text-anchor="middle">${writeStep(tick)}</text>`)}
      <text class="axis-title" x=${EDGE.left + wide / 2} y=${HEIGHT - 4} text-anchor="middle">trials in the order in which they ended</text>
      <path class="trial-dots stopped" d=${points(steps.filter((step) => !step.isWhole))} />
      <path class="trial-dots" d=${points(steps.filter((step) => step.isWhole))} />
      <path class="best-line" d=${line} />
      <path class="trial-dots bests" d=${points(bests)} />
    </svg>
    <figcaption class="quiet">${newest ? html`The best so far is ${writeNumber(newest.value)}, of trial ${newest.trial.number}; it was improved ${writeMany(bests.length - 1, "time")}.` : "No trial had the full budget."}
      ${steps.length - bests.length > 0 && steps.some((step) => !step.isWhole) ? " Pale points were stopped early, had a smaller budget or break a constraint." : ""}
      ${axis.above || axis.below ? ` ${axis.above + axis.below} outliers are drawn at the edge.` : ""}</figcaption>
    <details><summary>As a table</summary><div class="scrolls" tabindex="0" role="region" aria-label="Best so far as a table"><table class="plain-table">
      <thead><tr><th scope="col" class="number">trials ended</th><th scope="col" class="number">trial</th><th scope="col" class="number">${column.title}</th></tr></thead>
      <tbody>${bests.slice(-200).map((step) => html`<tr key=${step.trial.number}><td class="number">${Number(at.get(step)) + 1}</td><td class="number">${step.trial.number}</td><td class="number">${writeNumber(step.value)}</td></tr>`)}</tbody></table></div></details>
  </figure>`;
}

const LOOK_EVERY_MS = 2000;
const MOST_AXES = 10;
const ENDED = ["completed", "pruned", "failed", "broken", "cancelled"];

/** @typedef {import("../data/trial_axes.js").Trial} Trial */

/** @param {{ place: import("./links.js").Place }} props */
export function SweepPage({ place }) {
  const { data, trials, mistake, edited } = useSweep(place.run);
  if (data) return html`<${Sweep} data=${data} trials=${trials} place=${place} edited=${edited} />`;
  return html`<header class="top"><a class="brand" href=${makeLink([])}>quark</a> <a href=${makeLink(["sweeps"])}>Sweeps</a></header>
    <main id="main" aria-busy=${!mistake}>${mistake
      ? html`<h1>This sweep cannot be shown</h1><pre class="mistake" role="alert">${mistake}</pre><p><a href=${makeLink(["sweeps"])}>All sweeps</a></p>`
      : html`<h1 class="quiet">Sweep</h1>`}</main>`;
}

/** The sweep as it is by now: read once, then what has changed of it. @param {string} id */
function useSweep(id) {
  const [state, setState] = useState(/** @type {{ data: any, trials: Trial[], mistake: string }} */ ({ data: null, trials: [], mistake: "" }));
  const known = useRef(/** @type {{ cursor: string | null, byNumber: Map<number, Trial> }} */ ({ cursor: null, byNumber: new Map() }));
  const again = useRef(() => {});
  useEffect(() => {
    const ended = new AbortController();
    known.current = { cursor: null, byNumber: new Map() };
    const path = `api/sweeps/${encodeURIComponent(id)}`;
    /** @param {AbortSignal} signal */
    const load = async (signal) => {
      try {
        const { cursor } = known.current;
        let next;
        if (cursor === null) next = await askJson(path, {}, signal);
        else {
          const answer = await ask(path, { cursor }, signal);
          if (answer.status === 204) return;
          next = await answer.json();
        }
        if (ended.signal.aborted) return false;
        const kept = next.reset ? new Map() : known.current.byNumber;
        for (const trial of readTrials(next.fields, next.rows)) kept.set(trial.number, trial);
        known.current = { cursor: next.cursor, byNumber: kept };
        const isSame = !next.reset && !next.rows.length;
        setState((old) => ({ data: next, trials: isSame ? old.trials : [...kept.values()], mistake: "" }));
      } catch (error) {
        if (ended.signal.aborted || error instanceof SignInNeeded) return false;
        if (!(error instanceof Refused)) throw error;
        setState((old) => ({ ...old, mistake: error.message }));
        if (error.status === 503) throw error;
        return false;
      }
    };
    const stop = follow(load, LOOK_EVERY_MS);
    again.current = () => void load(ended.signal).catch(() => undefined);
    return () => {
      ended.abort();
      stop();
    };
  }, [id]);
  /** @param {any} sweep */
  const edited = (sweep) => {
    setState((old) => ({ ...old, data: { ...old.data, sweep: { ...old.data.sweep, ...sweep } } }));
    again.current();
  };
  return { ...state, edited };
}

/** @param {{ data: any, trials: Trial[], place: import("./links.js").Place, edited: (sweep: any) => void }} props */
function Sweep({ data, trials, place, edited }) {
  const { sweep } = data;
  const { query } = place;
  const [drawn, setDrawn] = useState(/** @type {import("../data/trial_axes.js").Brush[] | null} */ (null));
  const [chosen, setChosen] = useState(/** @type {number | null} */ (null));
  const ended = trials.filter((trial) => ENDED.includes(trial.state)).length;
  const { value: verdict, mistake } = useAnswer((signal) => askJson(`api/sweeps/${encodeURIComponent(sweep.id)}/verdict`, {}, signal), [sweep.id, ended]);
  const columns = useMemo(() => listColumns(data, trials), [JSON.stringify([data.names, sweep.metrics, sweep.space]), trials]);
  const axesShown = useMemo(() => chooseColumns(columns, query.getAll("axis"), trials), [columns, query.getAll("axis").join("\n"), trials]);
  const axes = useMemo(() => axesShown.map((column) => makeAxis(column, trials)), [axesShown, trials]);
  const metrics = columns.filter((column) => column.kind === "metric");
  const metric = metrics.find((column) => column.id === query.get("by")) ?? metrics[0] ?? null;
  const colour = useMemo(() => metric && makeAxis(metric, trials), [metric?.id, trials]);
  const stored = query.getAll("brush").join("\n");
  const brushes = useMemo(() => drawn ?? readBrushes(query.getAll("brush")), [drawn, stored]);
  const fitting = useMemo(() => brushTrials(trials, axes, brushes), [trials, axes, brushes]);
  const fit = useMemo(() => new Set(fitting.map((trial) => trial.number)), [fitting]);
  const best = useMemo(() => new Set(/** @type {number[]} */ (sweep.metrics.length > 1 ? verdict?.front ?? [] : data.best === null ? [] : [data.best])), [verdict, data.best, sweep.metrics.length]);
  const order = query.get("order") ?? (metric ? `${metric.mode === "max" ? "-" : ""}${metric.id}` : "number");
  const sorted = useMemo(() => {
    const key = order.replace(/^-/, "");
    return sortTrials(fitting, columns.find((column) => column.id === key) ?? null, order.startsWith("-"));
  }, [fitting, columns, order]);
  const byNumber = useMemo(() => new Map(trials.map((trial) => [trial.number, trial])), [trials]);

  useEffect(() => {
    document.title = spell(`${sweep.name} · ${sweep.project} · Quark`);
  }, [sweep.name, sweep.project]);
  useEffect(() => setDrawn(null), [stored]);
  /** @param {import("../data/trial_axes.js").Brush[]} next @param {boolean} isDone */
  const setBrushes = (next, isDone) => {
    setDrawn(next);
    if (!isDone) return;
    writeList("brush", next.map(writeBrush));
    setDrawn(null);
  };
  /** @param {number} number */
  const link = (number) => {
    const run = byNumber.get(number)?.run_id;
    return run ? html`<a href=${makeLink(["run", run])}>${number}</a>` : number;
  };
  const metricData = sweep.metrics[metric?.at ?? 0] ?? null;
  return html`
    <header class="top"><a class="brand" href=${makeLink([])}>quark</a>
      <a href=${makeLink([], { project: sweep.project })}>${sweep.project}</a> <a href=${makeLink(["sweeps"], { project: sweep.project })}>Sweeps</a>
      <span class="actions"><${SweepButtons} sweep=${sweep} changed=${edited} /><${Account} /></span></header>
    <main id="main">
      <div class="title"><h1>${sweep.name}</h1><${StateBadge} state=${sweep.is_done && sweep.state === "running" ? "done" : sweep.state} /><${Facts} sweep=${sweep} /></div>
      <p><${Counts} counts=${sweep.counts} />${sweep.total === 0 && html`<span class="quiet">No trials yet. The first worker draws some. To start one, run <code>quark sweep run ${sweep.name}</code>.</span>`}</p>
      ${sweep.state === "paused" && html`<p class="notice-line" role="status">The sweep is paused. Running trials continue, and workers get no new trials.</p>`}
      ${data.left_out > 0 && html`<p class="notice-line">The first ${writeStep(trials.length)} trials are shown; ${writeStep(data.left_out)} more are omitted.</p>`}
      ${trials.length > 0 && html`<${Verdicts} said=${verdict} mistake=${mistake} link=${link} />
        <section aria-labelledby="trials-title" class="sweep-trials"><h2 id="trials-title">Trials</h2>
          <${Tools} columns=${columns} shown=${axesShown} metrics=${metrics} metric=${metric} brushes=${brushes} clear=${() => setBrushes([], true)} />
          <${ParallelAxes} axes=${axes} colour=${colour} trials=${trials} fit=${fit} best=${best} chosen=${chosen} brushes=${brushes} setBrushes=${setBrushes}
            choose=${setChosen} open=${(/** @type {any} */ trial) => trial.run_id && go(makeLink(["run", trial.run_id]))} />
          <p class="quiet" id="under-pointer">${writeChosen(chosen === null ? undefined : byNumber.get(chosen), columns)}</p>
          <${TrialTable} trials=${sorted} total=${trials.length} columns=${columns} order=${order} best=${best} chosen=${chosen} constraints=${sweep.constraints}
            sort=${(/** @type {string} */ next) => change({ order: next || null }, { replace: true })} choose=${setChosen} /></section>
        <div class="sweep-halves">${metric && html`<section aria-labelledby="best-title"><h2 id="best-title">Best so far</h2><${BestChart} trials=${trials} column=${metric} /></section>`}
          <${ImportanceBars} id=${sweep.id} ended=${ended} /></div>
        <${LiveTrials} live=${data.live} count=${data.live_count} now=${data.now} metric=${metricData} names=${data.names} find=${(/** @type {number} */ number) => byNumber.get(number)} />
        <${Rungs} rungs=${data.rungs} metric=${sweep.metrics[0]} />
        <${Workers} workers=${data.workers} now=${data.now} link=${link} />`}
    </main>`;
}

/** @param {string} key @param {string[]} values */
function writeList(key, values) {
  const url = new URL(location.href);
  url.searchParams.delete(key);
  for (const value of values) url.searchParams.append(key, value);
  go(url.href, { replace: true });
}

/** The axes that were asked for; else what differs between trials, metrics last. @param {import("../data/trial_axes.js").Column[]} columns @param {string[]} wanted @param {Trial[]} trials */
function chooseColumns(columns, wanted, trials) {
  if (wanted.length) return columns.filter((column) => wanted.includes(column.id));
  const measured = columns.filter((column) => column.kind === "metric");
  const varied = columns.filter((column) => column.kind !== "metric" && isVaried(column, trials));
  return [...varied.slice(0, Math.max(1, MOST_AXES - measured.length)), ...measured.slice(0, MOST_AXES)];
}

/** @param {import("../data/trial_axes.js").Column} column @param {Trial[]} trials */
function isVaried(column, trials) {
  const first = JSON.stringify(column.kind === "parameter" ? trials[0]?.parameters[column.at] : trials[0]?.[column.id]);
  return trials.some((trial) => JSON.stringify(column.kind === "parameter" ? trial.parameters[column.at] : trial[column.id]) !== first);
}

/** @param {{ sweep: any }} props */
function Facts({ sweep }) {
  const facts = [
    sweep.search ? `search ${sweep.search}` : "",
    sweep.planned ? `${writeStep(sweep.total)} of ${writeStep(sweep.planned)} trials` : writeMany(sweep.total, "trial"),
    sweep.metrics.map((/** @type {any} */ metric) => `${metric.name} ${metric.mode === "max" ? "↑ high" : "↓ low"}`).join(", "),
    sweep.budget ? `budget ${writeStep(sweep.budget)} steps` : "",
    sweep.constraints.length ? `with ${sweep.constraints.join(", ")}` : "",
    sweep.max_failures ? `at most ${writeMany(sweep.max_failures, "failure")}` : "",
    sweep.lease_s ? `lease ${writeDuration(sweep.lease_s)}` : "",
    sweep.stop_broken ? "stops broken trials" : "",
  ].filter(Boolean);
  return html`<span class="facts" title=${`opened ${writeTime(sweep.created_at)}`}>${facts.join(" · ")}</span>`;
}

/** @param {{ columns: any[], shown: any[], metrics: any[], metric: any, brushes: any[], clear: () => void }} props */
function Tools({ columns, shown, metrics, metric, brushes, clear }) {
  const theme = readTheme();
  const ids = shown.map((column) => column.id);
  /** @param {string} id */
  const turn = (id) => writeList("axis", ids.includes(id) ? ids.filter((each) => each !== id) : [...ids, id]);
  return html`<div class="bar">
    ${metrics.length > 1 && html`<label>colors by <select value=${metric.id} onChange=${(/** @type {any} */ event) => change({ by: event.currentTarget.value })}>
      ${metrics.map((each) => html`<option key=${each.id} value=${each.id}>${each.title}</option>`)}</select></label>`}
    <span class="trial-legend" aria-hidden="true">worse ${[0, 0.25, 0.5, 0.75, 1].map((rate) => html`<i key=${rate} style=${{ background: shadeRate(rate, theme) }}></i>`)} better
      <i style=${{ background: listMarks(theme).best }}></i> best <i class="live-swatch" style=${{ borderColor: listMarks(theme).live }}></i> running</span>
    <details class="chooser"><summary>Axes</summary><div class="panel">${columns.map((column) => html`<label key=${column.id}><input type="checkbox" checked=${ids.includes(column.id)}
      disabled=${ids.length === 1 && ids.includes(column.id)} onChange=${() => turn(column.id)} /> ${column.title}</label>`)}</div></details>
    ${brushes.length > 0 && html`<button class="plain" onClick=${clear}>Show all trials</button>`}
    <span class="quiet">To narrow an axis, drag on it, or move its ends with the arrow keys.</span></div>`;
}

/** @param {Trial | undefined} trial @param {import("../data/trial_axes.js").Column[]} columns */
function writeChosen(trial, columns) {
  if (!trial) return " ";
  const values = columns.filter((column) => column.kind === "metric").map((column) => trial.values?.[column.at] === undefined || trial.values?.[column.at] === null ? "" : `${column.title} ${trial.values[column.at]}`).filter(Boolean);
  return [`Trial ${trial.number}, ${trial.state}`, ...values].join(" · ");
}
