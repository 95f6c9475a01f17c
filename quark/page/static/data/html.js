// @ts-check
/** Preact's elements as tagged templates: html`<p class=${name}>${text}</p>`. Text is never markup. */
import { htm } from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export const html = htm.bind(h);
