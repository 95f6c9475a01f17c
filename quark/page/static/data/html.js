// @ts-check
/** Preact's elements as tagged templates: html`<p class=${name}>${text}</p>`. Text is never markup. */
import { spell } from "../pages/texts.js";
import { htm } from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

const SAID = ["title", "aria-label", "alt", "placeholder", "label"];

/** As `h`, with what is read of an element spelled. @param {any} type @param {any} props @param {any[]} children */
function make(type, props, ...children) {
  if (typeof type !== "string") return h(type, props, ...children);
  for (const name of SAID) if (props?.[name]) props[name] = spell(props[name]);
  return h(type, props, ...children.map((child) => Array.isArray(child) ? child.map(spell) : spell(child)));
}

export const html = htm.bind(make);
