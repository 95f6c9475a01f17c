// @ts-check
/** The list of sweeps: which there are, how far they are, and what is best so far. */

import { html } from "../data/html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { StateBadge } from "./badges.js";
import { Refused, askJson, follow } from "./connection.js";
import { makeLink } from "./links.js";
import { Account } from "./session.js";
import { Counts } from "./sweep_parts.js";
import { spell, writeAge, writeNumber, writeStep, writeTime } from "./texts.js";

const LOOK_EVERY_MS = 3000;

/** @param {{ place: import("./links.js").Place }} props */
export function SweepsPage({ place }) {
  const project = place.query.get("project");
  const [found, setFound] = useState(/** @type {any} */ (null));
  const [mistake, setMistake] = useState("");
  useEffect(() => {
    document.title = spell(`Sweeps${project ? ` of ${project}` : ""} · Quark`);
    /** @param {AbortSignal} signal */
    const load = async (signal) => {
      try {
        const next = await askJson("api/sweeps", { project }, signal);
        if (signal.aborted) return false;
        setFound(next);
        setMistake("");
      } catch (error) {
        if (signal.aborted) return false;
        if (error instanceof Refused) setMistake(error.message);
        throw error;
      }
    };
    return follow(load, LOOK_EVERY_MS);
  }, [project]);
  const sweeps = found?.sweeps ?? [];
  return html`
    <header class="top"><a class="brand" href=${makeLink([])}>quark</a> <a href=${makeLink([], { project })}>${project ?? "All runs"}</a><span class="place"></span><${Account} /></header>
    <main id="main" aria-busy=${!found && !mistake}><h1>Sweeps${project ? ` of ${project}` : ""}</h1>
      ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
      ${found?.note && html`<p class="notice-line">${found.note}</p>`}
      ${found && !found.note && !sweeps.length && html`<p class="notice-line">There are no sweeps yet. <code>quark.sweep("name", space={…}, metric="val/acc", mode="max")</code> or <code>quark sweep new</code> creates one.</p>`}
      ${sweeps.length > 0 && html`<div class="table-box" tabindex="0" role="region" aria-label="Table of sweeps"><table class="runs sweeps"><thead><tr>
        <th scope="col">sweep</th><th scope="col">state</th><th scope="col">trials</th><th scope="col">progress</th><th scope="col" class="number">best</th><th scope="col">search</th><th scope="col">begun</th></tr></thead>
        <tbody>${sweeps.map((/** @type {any} */ sweep) => html`<${Row} key=${sweep.id} sweep=${sweep} project=${project} />`)}</tbody></table></div>`}
      ${found && found.count > sweeps.length && html`<p class="quiet">The newest ${writeStep(sweeps.length)} of ${writeStep(found.count)}.</p>`}
    </main>`;
}

/** @param {{ sweep: any, project: string | null }} props */
function Row({ sweep, project }) {
  const ended = ["completed", "pruned", "failed", "broken", "cancelled"].reduce((sum, state) => sum + (sweep.counts[state] ?? 0), 0);
  const all = Math.max(sweep.total, sweep.planned ?? 0);
  const metric = sweep.metrics[0];
  return html`<tr data-sweep=${sweep.id}><th scope="row"><a href=${makeLink(["sweep", sweep.id])}>${sweep.name}</a>${!project && html` <small>${sweep.project}</small>`}</th>
    <td><${StateBadge} state=${sweep.is_done && sweep.state === "running" ? "done" : sweep.state} /></td><td><${Counts} counts=${sweep.counts} /></td>
    <td>${all > 0 && html`<progress max=${all} value=${ended} aria-label=${`${ended} of ${all} trials have ended`}></progress> <small>${writeStep(ended)}/${writeStep(all)}</small>`}</td>
    <td class="number">${sweep.best && html`${sweep.best.run_id ? html`<a href=${makeLink(["run", sweep.best.run_id])}>${writeNumber(sweep.best.value)}</a>` : writeNumber(sweep.best.value)} <small>${metric?.name} ${metric?.mode === "max" ? "↑" : "↓"}</small>`}
      ${sweep.metrics.length > 1 && html`<small>${writeStep(sweep.metrics.length)} metrics</small>`}</td>
    <td>${sweep.search}</td><td title=${writeTime(sweep.created_at)}>${writeAge(sweep.created_at)}</td></tr>`;
}
