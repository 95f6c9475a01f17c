// @ts-check
/** The phases of a run as a band; each is a button that zooms all charts to it. */

import { html } from "../data/html.js";
import { writeStep } from "./texts.js";

/** How wide a phase is at the least, in hundredths of the band, so that it can be hit. */
const LEAST_SHARE = 2;

/**
 * @param {{ phases: any[], notes: string[], window: [number, number] | null,
 *   zoom: (from: number, to: number) => void, of?: string }} props window in steps; of: the run, where there are several
 */
export function Phases({ phases, notes, window: shown, zoom, of = "" }) {
  const known = phases.filter((phase) => phase.from !== null && phase.to !== null);
  const [low, high] = shown ?? [-Infinity, Infinity];
  const visible = known.filter((phase) => phase.to >= low && phase.from <= high);
  if (!visible.length) {
    return notes?.length ? html`<p class="quiet">No phases: ${notes.join("; ")}</p>` : null;
  }
  const first = Math.max(low, visible[0].from);
  const whole = Math.max(1, Math.min(high, visible[visible.length - 1].to) - first);
  return html`<section aria-label=${`Phases${of}`}><ol class="phases">${visible.map((phase) => {
    const share = (Math.min(high, phase.to) - Math.max(low, phase.from)) / whole * 100;
    const steps = `steps ${writeStep(phase.from)} to ${writeStep(phase.to)}`;
    const isShown = shown !== null && low === phase.from && high === phase.to;
    return html`<li key=${`${phase.name} ${phase.from}`} style=${{ flexGrow: Math.max(LEAST_SHARE, share) }}>
      <button class=${`phase phase-${phase.name}`} aria-pressed=${isShown}
        title=${`${phase.title}, ${steps}. ${phase.summary}`}
        onClick=${() => zoom(phase.from, phase.to)}>${phase.title}<span class="hidden">, ${steps}</span></button></li>`;
  })}</ol></section>`;
}
