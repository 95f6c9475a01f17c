// @ts-check
/** One run: what is wrong and what shows it, its health, its phases, its charts. */

import { frameRange } from "../charts/zooming.js";
import { html } from "../data/html.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { CopyButton, FreeText, StateBadge } from "./badges.js";
import { ChartList, listFirst, readNames, writeNames } from "./chart_list.js";
import { Refused, SignInNeeded, ask, askJson, follow, poll } from "./connection.js";
import { Controls } from "./controls.js";
import { EditButtons, EditNotes } from "./edit_run.js";
import { Findings, Health, isGrave } from "./findings.js";
import { listMoves, takeKeys } from "./keyboard.js";
import { useLate } from "./late.js";
import { change, go, makeLink } from "./links.js";
import { readMetrics } from "./metrics.js";
import { useRarely } from "./pace.js";
import { Phases } from "./phases.js";
import { Config, Traceback } from "./run_facts.js";
import { Artifacts, Delivery, Events, TABS, TabBar, VIEW, usePages } from "./run_tabs.js";
import { SeriesStore } from "./series_store.js";
import { Account, makeShareLink, useSession } from "./session.js";
import { spell, writeCount, writeDuration, writeMany, writeNumber, writeStep, writeTime, writeValue } from "./texts.js";

// What a run has printed: the newest lines, older ones on demand, and those that come.

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
    ${isReady && !rows.length && !mistake && html`<p class="notice-line">No${stream || text ? " matching" : ""} console output was recorded. ${!stream && !text && absent?.console}</p>`}
    ${rows.length > 0 && html`<div class="console" ref=${box} onScroll=${note} tabindex="0" role="region" aria-label="Console output of the run">
      <ol>${rows.map((row) => html`<li key=${row.id} class=${row.stream} title=${`${writeTime(row.at)} ${row.stream}`}>
        ${row.left_out > 0 && html`<p class="quiet">… ${writeCount(row.left_out)} lines are omitted here …</p>`}
        ${hasRanks && html`<span class="quiet">rank ${row.rank} </span>`}<${FreeText} text=${row.text} /></li>`)}</ol></div>`}`;
}

// The batches of a run: the hard ones, what each class costs, what was seen how often.

const REASONS = new Map([
  ["non_finite_loss", "its loss is not finite"], ["high_loss_percentile", "among the highest losses"],
  ["z_score_outlier", "far from the mean"], ["iqr_outlier", "above the usual value"],
]);
const MOST_CLASSES = 30;

/** @param {{ run: string, version: number, absent: Record<string, string> }} props absent: why there is nothing of a kind */
export function Batches({ run, version, absent }) {
  const { value: data, mistake } = useAnswer(
    (signal) => askJson(`api/runs/${encodeURIComponent(run)}/batches`, {}, signal), [run, useRarely(version)]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!data) return html`<p class="quiet">…</p>`;
  const { summary } = data;
  if (!summary.batch_count) return html`<p class="notice-line">${absent?.batch ?? "No batch was logged. quark.DataDiagnostics records the loss, the sample IDs and the classes of each batch."}</p>`;
  return html`<p>${writeMany(summary.batch_count, "batch", "batches")}${summary.exposure.sample_count ? `, ${writeMany(summary.exposure.sample_count, "sample")}` : ""}${
      summary.loss_summary ? `; loss ${writeNumber(summary.loss_summary.mean)} on average` : ""}</p>
    <${Hard} summary=${summary} /><${Classes} exposure=${summary.exposure} losses=${data.class_losses} /><${Exposure} exposure=${summary.exposure} />`;
}

/** @param {{ summary: any }} props */
function Hard({ summary }) {
  const { hard_batches: batches, hard_batch_count: count } = summary;
  if (!count) return html`<p class="quiet">No batch is much harder than the others.</p>`;
  return html`<section aria-labelledby="hard-title"><h2 id="hard-title">${writeMany(count, "hard batch", "hard batches")}</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Hard batches"><table class="plain-table hard"><thead><tr><th scope="col" class="number">step</th>
      <th scope="col" class="number">loss</th><th scope="col">why</th><th scope="col">samples</th><th scope="col">classes</th></tr></thead>
    <tbody>${batches.map((/** @type {any} */ batch) => html`<tr key=${batch.record_id}><td class="number">${writeStep(batch.step)}${batch.rank ? ` (rank ${batch.rank})` : ""}</td>
      <td class="number">${writeNumber(batch.loss)}</td><td>${batch.reasons.map((/** @type {string} */ reason) => REASONS.get(reason) ?? reason).join(", ")}</td>
      <td>${batch.sample_ids.map(writeValue).join(", ")}${batch.sample_count > batch.sample_ids.length ? ` and ${batch.sample_count - batch.sample_ids.length} more` : ""}</td>
      <td>${Object.entries(batch.class_counts ?? {}).map(([label, many]) => `${label}: ${many}`).join(", ")}</td></tr>`)}</tbody></table></div>
    ${count > batches.length && html`<p class="quiet">The ${batches.length} hardest of ${count}.</p>`}</section>`;
}

/** @param {{ exposure: any, losses: Record<string, number> }} props */
function Classes({ exposure, losses }) {
  const classes = Object.entries(exposure.class_counts);
  if (!classes.length) return null;
  const most = Math.max(...Object.values(losses).filter(Number.isFinite), 0);
  const sorted = [...classes].sort((a, b) => (losses[b[0]] ?? -1) - (losses[a[0]] ?? -1));
  return html`<section aria-labelledby="classes-title"><h2 id="classes-title">Classes, by the loss of their batches</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Classes"><table class="plain-table classes"><thead><tr><th scope="col">class</th><th scope="col" class="number">loss</th><td></td>
      <th scope="col" class="number">samples</th><th scope="col" class="number">share</th></tr></thead>
    <tbody>${sorted.slice(0, MOST_CLASSES).map(([label, many]) => html`<tr key=${label}><th scope="row">${label}</th><td class="number">${writeNumber(losses[label])}</td>
      <td><meter min="0" max=${most || 1} value=${losses[label] ?? 0} aria-label=${`loss of ${label}`}></meter></td><td class="number">${writeStep(Number(many))}</td>
      <td class="number">${writeNumber(exposure.class_fractions[label])}</td></tr>`)}</tbody></table></div>
    ${exposure.class_count > MOST_CLASSES && html`<p class="quiet">${Math.min(sorted.length, MOST_CLASSES)} of ${exposure.class_count} classes</p>`}</section>`;
}

/** @param {{ exposure: any }} props */
function Exposure({ exposure }) {
  if (!exposure.unique_sample_count) return null;
  return html`<section aria-labelledby="seen-title"><h2 id="seen-title">Samples and classes</h2>
    <p>${writeMany(exposure.unique_sample_count, "different sample")}, each ${exposure.repeat_min} to ${exposure.repeat_max} times, ${writeNumber(exposure.repeat_mean)} on average</p>
    ${exposure.repeat_max > exposure.repeat_min && html`<p class="quiet">Most often: ${exposure.most_seen_samples.map((/** @type {any} */ sample) => `${sample.sample_id} (${sample.count})`).join(", ")}</p>`}</section>`;
}

// A tab that a plugin adds to a run: a table.

/** @typedef {{ columns: string[], rows: unknown[][], count: number }} ViewTable */

/** @param {{ run: string, query: URLSearchParams, version: unknown }} props */
export function PluginView({ run, query, version }) {
  const name = String(query.get("tab")).slice(VIEW.length);
  const path = `api/runs/${encodeURIComponent(run)}/views/${encodeURIComponent(name)}`;
  const { value, mistake } = useAnswer((signal) => /** @type {Promise<ViewTable>} */ (askJson(path, {}, signal)), [path, version]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!value) return html`<p class="quiet">…</p>`;
  const { columns, rows, count } = value;
  const kinds = columns.map((_, at) => rows.some((row) => typeof row[at] === "number") ? "number" : "");
  return html`<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table class="plain-table view"><thead><tr>
    ${columns.map((column, at) => html`<th key=${at} scope="col" class=${kinds[at]}>${spell(column)}</th>`)}</tr></thead>
    <tbody>${rows.map((row, line) => html`<tr key=${line}>${row.map((cell, at) => html`<td key=${at} class=${kinds[at]}>${spell(writeValue(cell))}</td>`)}</tr>`)}</tbody></table></div>
    ${count > rows.length && html`<p class="quiet">The first ${rows.length} of ${writeMany(count, "row")}</p>`}`;
}

const RUNNING_MS = 1000;
const ENDED_MS = 5000;
const PANELS = new Map(/** @type {[string, any][]} */ ([["events", Events], ["console", Console], ["artifacts", Artifacts], ["system", LateSystem], ["batches", Batches], ["samples", LateSamples], ["code", LateSources]]));
const ENTRIES = 1000;
const loadSystem = () => import("./system.js");
const loadSamples = () => import("./samples.js");
const loadSources = () => import("./sources.js");

/** @typedef {{ x: string, window: [number, number] | null, find: string, smooth: number,
 *   isLog: boolean, attempts: string, ranks: string, tab: string }} View */

/** What the address says of how to look. @param {URLSearchParams} query @returns {View} */
export function readView(query) {
  const from = Number(query.get("from") ?? NaN);
  const to = Number(query.get("to") ?? NaN);
  const smooth = Number(query.get("smooth") ?? 0);
  const tab = query.get("tab") ?? "charts";
  return {
    x: query.get("x") ?? "step",
    window: Number.isFinite(from) && Number.isFinite(to) && from <= to ? [from, to] : null,
    find: query.get("find") ?? "",
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    isLog: query.get("log") === "1",
    attempts: query.get("attempts") ?? "current",
    ranks: query.get("ranks") ?? "mean",
    tab: TABS.some(({ name }) => name === tab) || tab.startsWith(VIEW) ? tab : "charts",
  };
}

/** How the server names what the page calls x. @param {string} x */
function readAxis(x) {
  return x === "time" || x === "relative" ? "time" : x === "epoch" ? "epoch" : "step";
}

/** @param {{ place: import("./links.js").Place }} props */
export function RunPage({ place }) {
  const [data, setData] = useState(/** @type {any} */ (null));
  const [mistake, setMistake] = useState("");
  useEffect(() => {
    const load = async (/** @type {AbortSignal} */ signal) => {
      try {
        setData(await askJson(`api/runs/${encodeURIComponent(place.run)}`, {}, signal));
        setMistake("");
        return false;
      } catch (error) {
        if (signal.aborted || error instanceof SignInNeeded) return false;
        if (!(error instanceof Refused)) throw error;
        setMistake(error.message);
        // A store that is busy or being made ready is asked again.
        if (error.status === 503) throw error;
        return false;
      }
    };
    return follow(load);
  }, [place.run]);
  if (data) return html`<${Run} key=${place.run} first=${data} place=${place} />`;
  return html`<header class="top"><a class="brand" href=${makeLink([])}>quark</a></header>
    <main id="main" aria-busy=${!mistake}>${mistake
      ? html`<h1>This run cannot be shown</h1><pre class="mistake" role="alert">${mistake}</pre>
        <p><a href=${makeLink([])}>All runs</a></p>`
      : html`<h1 class="quiet">${place.run}</h1>`}</main>`;
}

/** @param {{ first: any, place: import("./links.js").Place }} props */
function Run({ first, place }) {
  const id = place.run;
  const view = useMemo(() => readView(place.query), [place.query.toString()]);
  const turned = useMemo(() => readNames(place.query.get("turned")), [place.query.get("turned")]);
  const { data, edited, analysis, readings, heard, store, version, news } = useRun(id, first, view, turned);
  const { run } = data;
  // The links to copy name the workspace, once it is known.
  useSession();
  const metrics = useMemo(() => readMetrics(data.metrics), [data.metrics]);
  const chart = useChartSettings(view, store, version, analysis, run, metrics, hasSamples(data));
  const active = place.hash;
  const isRunning = run.state === "running";
  const title = run.name || run.id;
  const actions = useRef(/** @type {any} */ (null));
  actions.current = { analysis, active, chart, view, data, id };

  useEffect(() => {
    document.title = spell(`${title} · ${run.project} · Quark`);
  }, [title, run.project]);
  useEffect(() => takeKeys(makeKeys(actions)), []);
  const hasAnalysis = analysis.findings.length > 0;
  useEffect(() => {
    if (active && hasAnalysis) showElement(active);
  }, [active, hasAnalysis]);

  /** @param {string} group */
  const turn = (group) => {
    const next = new Set(turned);
    if (!next.delete(group)) next.add(group);
    change({ turned: writeNames(next) }, { replace: true });
  };
  /** @param {Record<string, string>} changes */
  const narrow = (changes) => change(changes, { replace: true });
  const Panel = view.tab.startsWith(VIEW) ? PluginView : PANELS.get(view.tab);
  return html`
    <header class="top"><a class="brand" href=${makeLink([])}>quark</a>
      <a href=${makeLink([], { project: run.project })}>${run.project}</a>
      <span class="actions"><${CopyButton} text=${run.id}>Copy ID<//>
        ${run.resume && html`<${CopyButton} text=${run.resume}>Copy resume line<//>`}
        <${CopyButton} text=${makeShareLink()}>Copy link<//>
        ${(data.contents?.layer !== 0 || data.absent?.layer) && html`<a class="button" href=${makeLink(["run", id, "layers"])}>Layers</a>`}
        <${EditButtons} run=${run} edited=${edited} /><${Account} /></span>
    </header>
    <main id="main">
      <div class="title"><h1>${title}</h1><${StateBadge} state=${run.state} />
        <${Facts} run=${run} progress=${heard?.run?.progress ?? data.progress} /></div>
      ${run.ending && html`<p class="mistake-line" id="ending">${run.ending.message}</p><${Traceback} text=${run.traceback} />`}
      <${TrialNote} trial=${run.trial} />
      <${EditNotes} run=${run} edited=${edited} />
      <${Health} analysis=${analysis} />
      <${Findings} analysis=${analysis} run=${id} active=${active} isRunning=${isRunning} version=${readings}
        zoomTo=${(/** @type {any} */ finding) => zoomTo(finding, chart)} />
      <p class="hidden" role="status" aria-live="polite" id="news">${news}</p>
      <${Phases} phases=${analysis.phases ?? []} notes=${analysis.phase_notes ?? []}
        window=${chart.stepWindow} zoom=${(/** @type {number} */ from, /** @type {number} */ to) => chart.zoomSteps(from, to)} />
      <${TabBar} active=${view.tab} contents=${data.contents} absent=${data.absent} views=${data.views} show=${(/** @type {string} */ tab) => change({ tab: tab === "charts" ? null : tab, text: null, level: null, stream: null, table: null, sort: null, rows: null, where: null, set: null, near: null, first: null, source: null, attempt: null })} />
      <div id="panel" role="tabpanel" aria-labelledby=${`tab-${view.tab}`}>
        ${view.tab === "charts" && html`<${Controls} view=${view} data=${data} metrics=${metrics} />
          <${LateNear} isShown=${hasSamples(data)} run=${id} query=${place.query} heard=${heard} />
          <${ChartList} metrics=${metrics} find=${view.find} turned=${turned} turn=${turn} chart=${chart} />`}
        ${Panel && html`<${Panel} run=${id} query=${place.query} change=${narrow} version=${heard?.turn ?? 0} absent=${data.absent} isRunning=${isRunning} />`}
        ${view.tab === "config" && html`<${Config} data=${data} />`}
        ${view.tab === "delivery" && html`<${Delivery} data=${data} />`}
      </div>
    </main>`;
}

/** @param {Record<string, any>} props those of `System` */
function LateSystem(props) {
  const page = useLate(loadSystem);
  return page && html`<${page.System} ...${props} />`;
}

/** @param {Record<string, any>} props those of `Samples` */
function LateSamples(props) {
  const page = useLate(loadSamples);
  return page && html`<${page.Samples} ...${props} />`;
}

/** @param {Record<string, any>} props those of `Sources` */
function LateSources(props) {
  const page = useLate(loadSources);
  return page && html`<${page.Sources} ...${props} />`;
}

/** @param {any} data */
function hasSamples(data) {
  return Boolean(data.contents?.sample);
}

/** @param {{ isShown: boolean, run: string, query: URLSearchParams, heard: any }} props */
function LateNear({ isShown, run, query, heard }) {
  const page = useLate(isShown ? loadSamples : undefined);
  return page && html`<${page.NearSamples} run=${run} near=${query.get("near")} version=${heard?.turn ?? 0} />`;
}

/** Which trial of which sweep it has. @param {{ trial: any }} props */
function TrialNote({ trial }) {
  if (!trial) return null;
  return html`<p class="notice-line" id="trial-note">Trial ${trial.number} of the sweep <a href=${makeLink(["sweep", trial.sweep_id])}>${trial.sweep ?? trial.sweep_id}</a>${trial.token > 1 ? `, its ${trial.token}${["th", "st", "nd", "rd"][trial.token % 100 > 10 && trial.token % 100 < 14 ? 0 : trial.token % 10] ?? "th"} claim` : ""}.
    ${trial.superseded && html` <b class="state-lost">▲ Superseded:</b> another worker has claimed the trial since, so the results of this run do not count for it.`}</p>`;
}

/** @param {{ run: any, progress: any }} props */
function Facts({ run, progress }) {
  const isRunning = run.state === "running";
  const facts = [
    run.newest_step === null ? "" : `step ${writeStep(run.newest_step)}${progress?.of ? ` of ${writeStep(progress.of)}` : ""}`,
    progress?.eta_s && isRunning ? `ETA ${writeDuration(progress.eta_s)}` : "",
    progress?.ms_per_step ? `${writeNumber(progress.ms_per_step)} ms/step` : "",
    writeDuration(isRunning ? (Date.now() - Date.parse(run.created_at)) / 1000 : run.duration_s),
    run.git_commit ? `commit ${run.git_commit.slice(0, 7)}${run.dirty ? "+changes" : ""}` : "",
    run.attempt ? `attempt ${run.attempt}` : "",
    Number.isFinite(run.fork_step) ? `forked from ${run.parent.slice(0, 8)} at step ${writeStep(run.fork_step)}` : "",
  ].filter(Boolean);
  return html`<span class="facts" title=${`started ${writeTime(run.created_at)}`}>${facts.join(" · ")}</span>
    ${run.groups?.map((/** @type {string} */ group) => html`<span key=${`group ${group}`} class="tag" title="group">${group}</span>`)}
    ${run.tags?.map((/** @type {string} */ tag) => html`<span key=${tag} class="tag">${tag}</span>`)}`;
}

/**
 * The run as it is by now: read once, then followed by its cursor.
 * @param {string} id @param {any} first @param {View} view
 * @param {Set<string>} turned groups that are not as they are by default
 */
function useRun(id, first, view, turned) {
  const [data, setData] = useState(first);
  const [analysis, setAnalysis] = useState(first.analysis);
  const [heard, setHeard] = useState(/** @type {any} */ (null));
  const [version, setVersion] = useState(0);
  const [news, setNews] = useState("");
  const [readings, setReadings] = useState(0);
  // What is due was told once, and is read again and again until it has come.
  const known = useRef({ data: first, analysis: first.analysis, turn: 0, due: { data: false, analysis: false } });
  const store = useMemo(() => {
    const made = new SeriesStore(id, readWindow(view), () => setVersion((old) => old + 1));
    // On their way while the page is drawn that will show them.
    if (view.tab === "charts") made.fetchFirst(listFirst(readMetrics(first.metrics), view.find, turned));
    return made;
  }, [id]);
  const path = `api/runs/${encodeURIComponent(id)}`;

  /** @param {any} next */
  const keepData = (next) => setData(known.current.data = next);
  /** @param {AbortSignal} signal */
  const readAnalysis = async (signal) => {
    const before = known.current.analysis;
    const answer = await ask(`${path}/analysis`, { mark: before.mark }, signal);
    if (answer.status === 204) return;
    const next = await answer.json();
    const found = next.analysis ?? next;
    setReadings((old) => old + 1);
    known.current.analysis = found;
    setAnalysis(found);
    if (before.state === "computing") return;
    const old = new Set(before.findings.map((/** @type {any} */ finding) => finding.id));
    const fresh = found.findings.filter((/** @type {any} */ finding) => isGrave(finding) && !old.has(finding.id));
    if (fresh.length) setNews(fresh.map((/** @type {any} */ finding) => `New: ${finding.severity}, ${finding.title}${finding.culprit ? ` in ${finding.culprit}` : ""}`).join(". "));
  };
  useEffect(() => () => store.close(), [store]);
  useEffect(() => store.show(readWindow(view)), [view, store]);
  /** @param {AbortSignal} signal */
  const readDue = async (signal) => {
    const { due } = known.current;
    if (due.data) keepData(await askJson(path, {}, signal));
    due.data = false;
    if (due.analysis) await readAnalysis(signal);
    due.analysis = false;
  };
  const isComputing = () => known.current.analysis.state === "computing" || known.current.analysis.computing;
  // Not begun anew as the run ends: what its last answers have told is still to be read.
  useEffect(() => poll(async (signal) => {
    const last = known.current;
    last.due.analysis ||= isComputing();
    await readDue(signal);
    const head = await store.follow(signal, last.data.cursor);
    if (!head) return;
    last.turn += 1;
    setHeard({ ...head, turn: last.turn });
    last.due.data ||= head.reset || head.metrics?.length > 0 || Boolean(head.run?.ending && !last.data.run.ending);
    last.due.analysis ||= head.analysis;
    if (head.run) keepData({ ...last.data, run: { ...last.data.run, ...head.run } });
    await readDue(signal);
  }, () => known.current.data.run.state === "running" || isComputing() ? RUNNING_MS : ENDED_MS), [store]);
  /** @param {any} run what somebody has changed here */
  const edited = (run) => keepData({ ...known.current.data, run: { ...known.current.data.run, ...run } });
  return { data, edited, analysis, readings, heard, store, version, news };
}

/** What of the run the server is to send. @param {View} view */
function readWindow(view) {
  const ratio = Math.min(2, globalThis.devicePixelRatio || 1);
  const isOwn = !["relative"].includes(view.x) && !view.x.startsWith("metric:");
  return {
    x: readAxis(view.x), low: isOwn && view.window ? view.window[0] : null,
    high: isOwn && view.window ? view.window[1] : null,
    ranks: view.ranks, attempts: view.attempts, entries: Math.round(ENTRIES * ratio),
  };
}

/**
 * All that a chart is told, the same object until something of it changes.
 * @param {View} view @param {SeriesStore} store @param {number} version @param {any} analysis
 * @param {any} run @param {any[]} metrics @param {boolean} hasSamples
 */
function useChartSettings(view, store, version, analysis, run, metrics, hasSamples) {
  const start_s = Date.parse(run.created_at) / 1000;
  return useMemo(() => {
    /** @param {number | null} from @param {number | null} to @param {boolean} [together] */
    const zoom = (from, to, together = false) => change(
      { from: from === null ? null : writeEdge(from), to: to === null ? null : writeEdge(to) }, { together });
    const whole = () => findWhole(store, view, run, start_s);
    // All charts show the same part of x, also those whose metric ended early or is rare.
    const shared = view.x.startsWith("metric:") ? null : whole();
    const isStep = view.x === "step";
    return {
      store, version, view, start_s, zoom, whole, wholeOf: () => shared, wholeText: String(shared), findings: analysis.findings, metrics,
      chooseStep: hasSamples ? (/** @type {number} */ step) => change({ near: String(step) }, { together: true }) : undefined,
      stepWindow: isStep ? view.window : null,
      stepWhole: () => isStep ? whole() : run.newest_step ? [0, run.newest_step] : null,
      /** @param {number} from @param {number} to */
      zoomSteps: (from, to) => {
        if (isStep) return zoom(from, to);
        const [low, high] = [from, to].map((step) => placeStep(store, view, step, start_s));
        if (low !== null && high !== null) zoom(low, high);
        else change({ x: null, from: writeEdge(from), to: writeEdge(to) });
      },
    };
  }, [view, store, version, analysis, metrics, start_s, run.newest_step, hasSamples]);
}

/** @param {number} edge */
function writeEdge(edge) {
  return String(Number(edge.toPrecision(15)));
}

/** Where the curves begin and end, in the unit of x. @param {SeriesStore} store @param {View} view @param {any} run @param {number} start_s @returns {[number, number] | null} */
function findWhole(store, view, run, start_s) {
  let low = Infinity;
  let high = -Infinity;
  for (const { curves } of store.kept.values()) {
    for (const curve of curves) {
      const places = view.x === "time" || view.x === "relative" ? curve.time : view.x === "epoch" ? curve.epoch : curve.step;
      for (const place of places ?? []) {
        if (place < low) low = place;
        if (place > high) high = place;
      }
    }
  }
  if (view.x === "step") {
    low = Math.min(low, 0);
    high = Math.max(high, run.newest_step ?? high);
  }
  if (!(low < high)) return null;
  return view.x === "relative" ? [low - start_s, high - start_s] : [low, high];
}

/** Where a step lies on another axis, by the curves that are there. @param {SeriesStore} store @param {View} view @param {number} step @param {number} start_s */
function placeStep(store, view, step, start_s) {
  for (const { curves } of store.kept.values()) {
    for (const curve of curves) {
      const places = view.x === "epoch" ? curve.epoch : curve.time;
      if (!places || !curve.step.length || curve.unit === "epoch") continue;
      let at = curve.step.findIndex((other) => other >= step);
      if (at < 0) at = curve.step.length - 1;
      return view.x === "relative" ? places[at] - start_s : places[at];
    }
  }
  return null;
}

/** @param {any} finding @param {any} chart */
function zoomTo(finding, chart) {
  if (finding.step === null || finding.step === undefined) return;
  const whole = chart.stepWhole();
  if (!whole) return;
  change({}, { hash: `alert-${finding.id}`, replace: true });
  const shown = frameRange(finding.step, finding.step_end ?? finding.step, whole);
  if (shown) chart.zoomSteps(shown.low, shown.high);
  else chart.zoom(null, null);
}

/** @param {string} id */
function showElement(id) {
  const element = document.getElementById(id);
  if (!element) return;
  element.closest("details")?.setAttribute("open", "");
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "nearest" });
}

/** @param {{ current: any }} actions */
function makeKeys(actions) {
  /** @param {number} step */
  const move = (step) => {
    const { analysis, active } = actions.current;
    const list = [...analysis.findings.filter(isGrave), ...analysis.findings.filter((/** @type {any} */ finding) => !isGrave(finding))];
    if (!list.length) return;
    const at = list.findIndex((finding) => `alert-${finding.id}` === active);
    const next = list[Math.max(0, Math.min(list.length - 1, at < 0 ? (step > 0 ? 0 : list.length - 1) : at + step))];
    change({}, { hash: `alert-${next.id}`, replace: true });
    showElement(`alert-${next.id}`);
  };
  return [
    { key: "/", says: "find a metric", act: () => {
      change({ tab: null }, { replace: true });
      requestAnimationFrame(() => document.getElementById("find")?.focus());
    } },
    { key: "j", says: "next finding", act: () => move(1) },
    { key: "k", says: "previous finding", act: () => move(-1) },
    { key: "Enter", says: "zoom all charts to the finding", act: () => {
      const { analysis, active, chart } = actions.current;
      const finding = analysis.findings.find((/** @type {any} */ item) => `alert-${item.id}` === active);
      if (finding) zoomTo(finding, chart);
    } },
    ...listMoves(() => {
      const { chart, view } = actions.current;
      return { view, whole: chart.whole(), zoom: chart.zoom };
    }),
    { key: "0", says: "the whole run", act: () => actions.current.chart.zoom(null, null) },
    { key: "l", says: "log axis on or off", act: () => change({ log: actions.current.view.isLog ? null : "1" }) },
    { key: "e", says: "layers", act: () => go(makeLink(["run", actions.current.id, "layers"])) },
  ];
}
