// @ts-check
/** Parts of a sweep's page: its verdict, importances, who has which trial, rungs, and its buttons. */

import { html } from "../data/html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { useAnswer } from "./answers.js";
import { FreeText, StateBadge } from "./badges.js";
import { askJson, poll } from "./connection.js";
import { Box } from "./edit_run.js";
import { makeLink } from "./links.js";
import { sendChange, useSession } from "./session.js";
import { writeAge, writeCount, writeDuration, writeMany, writeNumber, writeStep, writeTime } from "./texts.js";

const LOOK_EVERY_MS = 2000;
const MOST_STANDINGS = 50;
const VERDICTS = new Map([["better", ["✓", "really the best"]], ["no_difference", ["=", "within seed noise"]], ["cannot_tell", ["?", "inconclusive"]]]);
const METHODS = new Map([["ranks", "by ranks (Quark)"], ["ped_anova", "PED-ANOVA (Optuna)"]]);

/** Trials by state, such as "3 running". @param {{ counts: Record<string, number> }} props */
export function Counts({ counts }) {
  return html`<span class="trial-counts">${Object.entries(counts).map(([state, count]) => html`<span key=${state}><b>${writeStep(count)}</b> <${StateBadge} state=${state} /></span>`)}</span>`;
}

/** @param {{ said: any, mistake: string, link: (number: number) => unknown }} props */
export function Verdicts({ said, mistake, link }) {
  const verdicts = said?.verdicts ?? [];
  return html`<section aria-labelledby="verdict-title" class="sweep-verdict"><h2 id="verdict-title">Is the best trial really the best?</h2>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${!said && !mistake && html`<p class="quiet">The analysis is running.</p>`}
    ${verdicts.map((/** @type {any} */ verdict) => {
      const [glyph, word] = VERDICTS.get(verdict.verdict) ?? ["·", verdict.verdict];
      return html`<div key=${verdict.name} data-verdict=${verdict.verdict}>
        <p class="verdict-line"><span class=${`verdict-word said-${verdict.verdict}`}><span aria-hidden="true">${glyph}</span> ${word}</span>
          ${verdicts.length > 1 && html`<b>${verdict.name}</b>`} <b>${verdict.headline}.</b></p>
        <p>${verdict.reason}</p>
        ${verdict.advice && html`<p class="advice">→ ${verdict.advice}</p>`}
        ${verdict.alike_count > 1 && html`<details><summary>${writeMany(verdict.alike_count, "configuration")} that may be the best</summary>
          <p class="alike">${verdict.alike.map((/** @type {number} */ number) => html`<span key=${number}>${link(number)} </span>`)}</p></details>`}
      </div>`;
    })}
    ${said?.front && html`<p>No trial is better in all metrics than ${said.front.length === 1 ? "this one" : `these ${said.front.length}`}: <span class="alike">${said.front.slice(0, 40).map((/** @type {number} */ number) => html`<span key=${number}>${link(number)} </span>`)}</span></p>`}
  </section>`;
}

/** @param {{ id: string, ended: number }} props */
export function ImportanceBars({ id, ended }) {
  const [method, setMethod] = useState("");
  const { value, mistake } = useAnswer((signal) => askJson(`api/sweeps/${encodeURIComponent(id)}/importances`, { method: method || null }, signal), [id, ended, method]);
  const found = value?.importances ?? [];
  return html`<section aria-labelledby="importances-title"><h2 id="importances-title">Which parameters matter</h2>
    ${value?.methods.length > 1 && html`<p class="bar"><label>measured <select value=${method || "ranks"} onChange=${(/** @type {any} */ event) => setMethod(event.currentTarget.value)}>
      ${value.methods.map((/** @type {string} */ each) => html`<option key=${each} value=${each}>${METHODS.get(each)}</option>`)}</select></label></p>`}
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    ${found.map((/** @type {any} */ each) => html`<${Importance} key=${each.name} found=${each} isNamed=${found.length > 1} />`)}</section>`;
}

/** @param {{ found: any, isNamed: boolean }} props */
function Importance({ found, isNamed }) {
  const { shares, chance, explained } = found;
  if (found.note) return html`<p class="quiet">${isNamed ? `${found.name}: ` : ""}${found.note}.</p>`;
  const most = Math.max(0.01, chance ?? 0, ...shares.map((/** @type {[string, number]} */ share) => share[1]));
  return html`<table class="plain-table importances"><caption>${isNamed ? `${found.name}: ` : ""}${found.method === "ranks"
      ? `share of the ranks that each parameter explains, over ${writeMany(found.count, "trial")}; all together ${Math.round(100 * explained)} %`
      : `difference between the best tenth and the rest, over ${writeMany(found.count, "trial")}`}</caption>
    <tbody>${shares.map((/** @type {[string, number]} */ [name, share]) => html`<tr key=${name} class=${chance !== null && share <= chance ? "quiet" : ""}>
      <th scope="row">${name}</th><td class="importance-cell"><span class="importance-bar" style=${{ width: `${100 * share / most}%` }}></span>
        ${chance !== null && html`<span class="importance-chance" style=${{ left: `${100 * chance / most}%` }}></span>`}</td>
      <td class="number">${(100 * share).toFixed(1)} %${chance !== null && share <= chance ? html` <small>within seed noise</small>` : ""}</td></tr>`)}</tbody></table>`;
}

/** @param {{ live: any[], count: number, now: string, metric: any, names: string[], find: (number: number) => any }} props */
export function LiveTrials({ live, count, now, metric, names, find }) {
  const ids = live.map((trial) => trial.run_id).filter(Boolean).slice(0, MOST_STANDINGS);
  const [standings, setStandings] = useState(/** @type {Record<string, any>} */ ({}));
  useEffect(() => {
    if (!ids.length) return undefined;
    /** @param {AbortSignal} [signal] */
    const read = async (signal) => setStandings((await askJson("api/standings", { run: ids, column: metric?.written || null }, signal)).standings);
    read().catch(() => undefined);
    return poll(read, LOOK_EVERY_MS);
  }, [ids.join()]);
  if (!live.length) return null;
  return html`<section aria-labelledby="live-title"><h2 id="live-title">Live (${writeStep(count)})</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Running trials"><table class="plain-table live-trials"><thead><tr>
      <th scope="col">trial</th><th scope="col">run</th><th scope="col">step</th><th scope="col" class="number">${metric?.name ?? "value"}</th><th scope="col">parameters</th><th scope="col">worker</th><th scope="col">lease</th></tr></thead>
    <tbody>${live.map((trial) => {
      const standing = standings[trial.run_id];
      const parameters = find(trial.number)?.parameters ?? [];
      const { progress } = standing ?? {};
      return html`<tr key=${trial.number} data-live=${trial.number}><th scope="row">${trial.number} ${trial.state !== "running" && html`<${StateBadge} state=${trial.state} />`}</th>
        <td>${trial.run_id ? html`<a href=${makeLink(["run", trial.run_id])}>${trial.run_id.slice(0, 12)}</a>` : html`<span class="quiet">not started</span>`}${standing && standing.state !== "running" ? html` <${StateBadge} state=${standing.state} reason=${standing.ending?.message} />` : ""}</td>
        <td>${writeCount(progress?.step)}${progress?.of ? `/${writeCount(progress.of)}` : ""}${progress?.eta_s ? ` · ETA ${writeDuration(progress.eta_s)}` : ""}</td>
        <td class="number">${writeNumber(standing?.values?.[0])}</td>
        <td>${names.map((name, at) => parameters[at] === null || parameters[at] === undefined ? "" : `${name} ${typeof parameters[at] === "number" ? writeNumber(parameters[at]) : parameters[at]}`).filter(Boolean).slice(0, 6).join(", ")}</td>
        <td>${trial.worker}</td><td>${writeLease(trial.lease_until, now)}${trial.failures || trial.losses ? html` <small>${trial.failures ? writeMany(trial.failures, "failure") : ""} ${trial.losses ? `lost ${trial.losses} times` : ""}</small>` : ""}</td></tr>`;
    })}</tbody></table></div>${count > live.length && html`<p class="quiet">and ${writeStep(count - live.length)} more</p>`}</section>`;
}

/** For how long a lease holds still, by the server's clock. @param {string | null} until @param {string} now */
function writeLease(until, now) {
  if (!until) return "";
  const left_s = (Date.parse(until) - Date.parse(now)) / 1000;
  return left_s > 0 ? `${writeDuration(left_s)} left` : html`<b class="state-lost">expired ${writeDuration(-left_s)} ago</b>`;
}

/** @param {{ workers: any[], now: string, link: (number: number) => unknown }} props */
export function Workers({ workers, now, link }) {
  if (!workers.length) return null;
  const busy = workers.filter((worker) => worker.holds.length);
  return html`<section aria-labelledby="workers-title"><h2 id="workers-title">Workers (${busy.length} with a trial)</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Table of workers"><table class="plain-table workers"><thead><tr>
      <th scope="col">worker</th><th scope="col">holds</th><th scope="col">lease</th><th scope="col" class="number">ended</th><th scope="col">last claim</th></tr></thead>
    <tbody>${workers.map((worker, at) => html`<tr key=${`${worker.worker} ${at}`}><th scope="row">${worker.worker}</th>
      <td>${worker.holds.slice(0, 8).map((/** @type {number} */ number) => html`<span key=${number}>${link(number)} </span>`)}${worker.holds.length > 8 ? `and ${worker.holds.length - 8} more` : ""}</td>
      <td>${worker.holds.length ? writeLease(worker.lease_until, now) : ""}</td><td class="number">${writeStep(worker.ended)}</td>
      <td title=${writeTime(worker.last_at)}>${worker.last_at ? writeAge(worker.last_at, Date.parse(now)) : ""}</td></tr>`)}</tbody></table></div></section>`;
}

/** @param {{ rungs: any[], metric: any }} props */
export function Rungs({ rungs, metric }) {
  if (!rungs.length) return null;
  const most = Math.max(1, ...rungs.map((rung) => rung.trials));
  const hasBest = rungs.some((rung) => rung.best !== null);
  return html`<section aria-labelledby="rungs-title"><h2 id="rungs-title">Rungs</h2>
    <div class="scrolls" tabindex="0" role="region" aria-label="Table of rungs"><table class="plain-table rungs"><thead><tr>
      <th scope="col">rung</th><th scope="col" class="number">budget</th><th scope="col">trials so far</th><th scope="col" class="number">trials</th><th scope="col" class="number">ended</th><th scope="col" class="number">continued</th><th scope="col" class="number">stopped</th>
      ${hasBest && html`<th scope="col" class="number">best ${metric?.name ?? ""}</th>`}</tr></thead>
    <tbody>${rungs.map((rung) => html`<tr key=${`${rung.rung} ${rung.budget}`}><th scope="row">${rung.rung}</th><td class="number">${writeStep(rung.budget)}</td>
      <td class="importance-cell"><span class="importance-bar" style=${{ width: `${100 * rung.trials / most}%` }}></span></td>
      <td class="number">${writeStep(rung.trials)}</td><td class="number">${writeStep(rung.ended)}</td><td class="number">${writeStep(rung.went_on)}</td><td class="number">${writeStep(rung.stopped)}</td>
      ${hasBest && html`<td class="number">${writeNumber(rung.best)}</td>`}</tr>`)}</tbody></table></div></section>`;
}

/** Pause, go on, cancel: for who may. @param {{ sweep: any, changed: (sweep: any) => void }} props */
export function SweepButtons({ sweep, changed }) {
  const { may_edit } = useSession();
  const [state, setState] = useState({ isBusy: false, mistake: "", isAsking: false });
  if (!may_edit || sweep.state === "cancelled") return null;
  /** @param {string} next */
  const change = async (next) => {
    setState((old) => ({ ...old, isBusy: true, mistake: "" }));
    try {
      const answer = await sendChange(`api/sweeps/${encodeURIComponent(sweep.id)}/state`, { state: next });
      setState({ isBusy: false, mistake: "", isAsking: false });
      changed(answer.sweep);
    } catch (error) {
      setState((old) => ({ ...old, isBusy: false, mistake: error instanceof Error ? error.message : String(error) }));
    }
  };
  const isPaused = sweep.state === "paused";
  return html`<button disabled=${state.isBusy} onClick=${() => change(isPaused ? "running" : "paused")}>${isPaused ? "Resume" : "Pause"}</button>
    <button disabled=${state.isBusy} onClick=${() => setState((old) => ({ ...old, isAsking: true, mistake: "" }))}>Cancel…</button>
    ${state.mistake && !state.isAsking && html`<span class="mistake-line" role="alert"><${FreeText} text=${state.mistake} /></span>`}
    ${state.isAsking && html`<${Box} title="Cancel the sweep?" id="cancel-sweep" close=${() => setState((old) => ({ ...old, isAsking: false }))}>
      <p>Trials that wait are cancelled, and no more are given to workers. Those that run go on to their end. This cannot be taken back; pausing can.</p>
      ${state.mistake && html`<p class="mistake" role="alert">${state.mistake}</p>`}
      <p><button disabled=${state.isBusy} onClick=${() => change("cancelled")}>Cancel the sweep</button> <button onClick=${() => setState((old) => ({ ...old, isAsking: false }))}>Keep it</button></p><//>`}`;
}
