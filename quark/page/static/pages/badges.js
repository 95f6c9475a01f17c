// @ts-check
/** Small pieces of every page: states and scores as glyph, word and colour; free texts. */

import { html } from "../data/html.js";
import { GLYPHS, findLinks, spell, writeNumber } from "./texts.js";

/** @param {{ state: string, reason?: string | null }} props */
export function StateBadge({ state, reason = null }) {
  return html`<span class=${`state state-${state}`} title=${reason ?? undefined}>
    <span aria-hidden="true">${GLYPHS.get(state) ?? "·"}</span> ${state}</span>`;
}

/** @param {{ severity: string, isNote?: boolean }} props */
export function SeverityBadge({ severity, isNote = false }) {
  return html`<span class=${`severity severity-${severity}`}>
    <span aria-hidden="true">${GLYPHS.get(severity) ?? "·"}</span> ${isNote ? "note" : severity}
  </span>`;
}

/**
 * A score; one that rests on nothing is "not known", whatever number stands beside it.
 * @param {{ health: { known: boolean, score: number, status: string, word?: string, reason?: string | null } |
 *   null | undefined, name?: string }} props
 */
export function HealthBadge({ health, name = "" }) {
  const label = name && html`<span class="health-name">${name}</span>`;
  if (!health?.known) {
    return html`<span class="health health-unknown" title=${health?.reason ?? undefined}>
      <span aria-hidden="true">${GLYPHS.get("unknown")}</span> ${label} ${health ? "not known" : "not analyzed"}</span>`;
  }
  return html`<span class=${`health health-${health.status}`} title=${health.reason ?? undefined}>
    <span aria-hidden="true">${GLYPHS.get(health.status) ?? "·"}</span> ${label}
    <b>${writeNumber(Math.round(health.score))}</b> ${health.word ?? health.status}</span>`;
}

/** Somebody's free text: its line breaks are kept, https addresses are links, all else is text. @param {{ text: unknown }} props */
export function FreeText({ text }) {
  return findLinks(String(text)).map((part) => part.isLink
    ? html`<a href=${part.text} rel="noreferrer noopener" target="_blank">${part.text}</a>`
    : spell(part.text));
}

/** Copies a text and says so. @param {{ text: string, children?: unknown }} props */
export function CopyButton({ text, children }) {
  /** @param {Event} event */
  const copy = async (event) => {
    const button = /** @type {HTMLElement} */ (event.currentTarget);
    try {
      await navigator.clipboard.writeText(text);
      button.dataset.done = "copied";
    } catch {
      button.dataset.done = "not allowed here";
    }
    setTimeout(() => delete button.dataset.done, 2000);
  };
  return html`<button class="plain copy" onClick=${copy}>${children}</button>`;
}
