// @ts-check
/** One sweep: is the best really the best, its trials over parallel axes, who has which. */

import { listMarks, shadeRate } from "../charts/trial_lines.js";
import { readTheme } from "../charts/theme.js";
import { html } from "../data/html.js";
import { brushTrials, listColumns, makeAxis, readBrushes, readTrials, sortTrials, writeBrush } from "../data/trial_axes.js";
import { useEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { StateBadge } from "./badges.js";
import { BestChart } from "./best_chart.js";
import { Refused, SignInNeeded, ask, askJson, follow } from "./connection.js";
import { change, go, makeLink } from "./links.js";
import { ParallelAxes } from "./parallel_axes.js";
import { Account } from "./session.js";
import { Counts, ImportanceBars, LiveTrials, Rungs, SweepButtons, Verdicts, Workers } from "./sweep_parts.js";
import { spell, writeDuration, writeMany, writeStep, writeTime } from "./texts.js";
import { TrialTable } from "./trial_table.js";
import { useAnswer } from "./answers.js";

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
      <p><${Counts} counts=${sweep.counts} />${sweep.total === 0 && html`<span class="quiet">No trial yet: the first worker that comes draws some, such as <code>quark sweep run ${sweep.name}</code>.</span>`}</p>
      ${sweep.state === "paused" && html`<p class="notice-line" role="status">The sweep is paused: trials that run go on, and no more are given to workers.</p>`}
      ${data.left_out > 0 && html`<p class="notice-line">The first ${writeStep(trials.length)} trials are shown; ${writeStep(data.left_out)} more are not.</p>`}
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
    sweep.stop_broken ? "stops broken trainings" : "",
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
    ${metrics.length > 1 && html`<label>colours by <select value=${metric.id} onChange=${(/** @type {any} */ event) => change({ by: event.currentTarget.value })}>
      ${metrics.map((each) => html`<option key=${each.id} value=${each.id}>${each.title}</option>`)}</select></label>`}
    <span class="trial-legend" aria-hidden="true">worse ${[0, 0.25, 0.5, 0.75, 1].map((rate) => html`<i key=${rate} style=${{ background: shadeRate(rate, theme) }}></i>`)} better
      <i style=${{ background: listMarks(theme).best }}></i> best <i class="live-swatch" style=${{ borderColor: listMarks(theme).live }}></i> running</span>
    <details class="chooser"><summary>Axes</summary><div class="panel">${columns.map((column) => html`<label key=${column.id}><input type="checkbox" checked=${ids.includes(column.id)}
      disabled=${ids.length === 1 && ids.includes(column.id)} onChange=${() => turn(column.id)} /> ${column.title}</label>`)}</div></details>
    ${brushes.length > 0 && html`<button class="plain" onClick=${clear}>Show all trials</button>`}
    <span class="quiet">Drag on an axis, or move its ends by keys, to narrow it.</span></div>`;
}

/** @param {Trial | undefined} trial @param {import("../data/trial_axes.js").Column[]} columns */
function writeChosen(trial, columns) {
  if (!trial) return " ";
  const values = columns.filter((column) => column.kind === "metric").map((column) => trial.values?.[column.at] === undefined || trial.values?.[column.at] === null ? "" : `${column.title} ${trial.values[column.at]}`).filter(Boolean);
  return [`Trial ${trial.number}, ${trial.state}`, ...values].join(" · ");
}
