// @ts-check
/** The best value so far over the trials that have ended, and each of them as a point. */

import { registerChart } from "../charts/registry.js";
import { html } from "../data/html.js";
import { followBest, makeAxis } from "../data/trial_axes.js";
import { placeTicks } from "../data/ticks.js";
import { useEffect, useRef } from "../vendor/hooks.js";
import { writeMany, writeNumber, writeStep } from "./texts.js";

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
    <figcaption class="quiet">${newest ? html`The best so far is ${writeNumber(newest.value)}, of trial ${newest.trial.number}; it was bettered ${writeMany(bests.length - 1, "time")}.` : "None of them had the whole budget."}
      ${steps.length - bests.length > 0 && steps.some((step) => !step.isWhole) ? " Pale points were stopped early, had a smaller budget or break a constraint." : ""}
      ${axis.above || axis.below ? ` ${axis.above + axis.below} lie far from all others, and are drawn at the edge.` : ""}</figcaption>
    <details><summary>As a table</summary><div class="scrolls" tabindex="0" role="region" aria-label="Best so far as a table"><table class="plain-table">
      <thead><tr><th scope="col" class="number">trials ended</th><th scope="col" class="number">trial</th><th scope="col" class="number">${column.title}</th></tr></thead>
      <tbody>${bests.slice(-200).map((step) => html`<tr key=${step.trial.number}><td class="number">${Number(at.get(step)) + 1}</td><td class="number">${step.trial.number}</td><td class="number">${writeNumber(step.value)}</td></tr>`)}</tbody></table></div></details>
  </figure>`;
}
