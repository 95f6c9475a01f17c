// @ts-check
/** The batches of a run: the hard ones, what each class costs, what was seen how often. */

import { html } from "../data/html.js";
import { useAnswer } from "./answers.js";
import { askJson } from "./connection.js";
import { useRarely } from "./pace.js";
import { writeMany, writeNumber, writeStep, writeValue } from "./texts.js";

const REASONS = new Map([
  ["non_finite_loss", "its loss is not finite"], ["high_loss_percentile", "among the highest losses"],
  ["z_score_outlier", "far from the mean"], ["iqr_outlier", "above what is usual"],
]);
const MOST_CLASSES = 30;

/** @param {{ run: string, version: number, absent: Record<string, string> }} props absent: why there is nothing of a kind */
export function Batches({ run, version, absent }) {
  const { value: data, mistake } = useAnswer(
    (signal) => askJson(`api/runs/${encodeURIComponent(run)}/batches`, {}, signal), [run, useRarely(version)]);
  if (mistake) return html`<p class="mistake" role="alert">${mistake}</p>`;
  if (!data) return html`<p class="quiet">…</p>`;
  const { summary } = data;
  if (!summary.batch_count) return html`<p class="notice-line">${absent?.batch ?? "No batch was logged. quark.DataDiagnostics keeps the loss, the sample ids and the classes of each batch."}</p>`;
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
  return html`<section aria-labelledby="classes-title"><h2 id="classes-title">Classes, by the loss of the batches that hold them</h2>
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
  return html`<section aria-labelledby="seen-title"><h2 id="seen-title">What was seen</h2>
    <p>${writeMany(exposure.unique_sample_count, "different sample")}, each ${exposure.repeat_min} to ${exposure.repeat_max} times, ${writeNumber(exposure.repeat_mean)} on average</p>
    ${exposure.repeat_max > exposure.repeat_min && html`<p class="quiet">Most often: ${exposure.most_seen_samples.map((/** @type {any} */ sample) => `${sample.sample_id} (${sample.count})`).join(", ")}</p>`}</section>`;
}
