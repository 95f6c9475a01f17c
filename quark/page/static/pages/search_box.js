// @ts-check
/** Where the search is written: names are completed, a mistake is shown with its caret. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { askJson } from "./connection.js";
import { quoteName, writeMany, writeValue } from "./texts.js";

const MOST = 10;
const WAIT_MS = 120;
const WORD = /[\w./@:#%$~^+'`-]*$/;

/** @typedef {{ text: string, kind: string, more: string }} Offer */

/**
 * @param {{ value: string, project: string | null, mistake: string | null,
 *   find: (text: string) => void }} props
 */
export function SearchBox({ value, project, mistake, find }) {
  const input = useRef(/** @type {HTMLInputElement | null} */ (null));
  const [offers, setOffers] = useState(/** @type {Offer[]} */ ([]));
  const [active, setActive] = useState(-1);
  const asked = useRef({ timer: 0, turn: 0 });
  useEffect(() => {
    if (input.current && input.current.value !== value) input.current.value = value;
  }, [value]);

  const close = () => {
    clearTimeout(asked.current.timer);
    asked.current.turn += 1;
    setOffers([]);
    setActive(-1);
  };
  const complete = () => {
    clearTimeout(asked.current.timer);
    const turn = asked.current.turn += 1;
    const word = readWord(input.current);
    if (!word) return close();
    asked.current.timer = setTimeout(async () => {
      const names = await askJson("api/names", { project, prefix: word.replace(/^['`]/, "") })
        .catch(() => null);
      if (turn !== asked.current.turn || !names) return;
      setOffers(listOffers(names, word));
      setActive(-1);
    }, WAIT_MS);
  };
  /** @param {Offer} offer */
  const take = (offer) => {
    const box = input.current;
    if (!box) return;
    const end = box.selectionStart ?? box.value.length;
    const start = end - (readWord(box)?.length ?? 0);
    box.setRangeText(offer.text, start, end, "end");
    box.focus();
    close();
  };
  /** @param {KeyboardEvent} event */
  const press = (event) => {
    const isOpen = offers.length > 0;
    if (event.key === "Enter") {
      event.preventDefault();
      if (isOpen && active >= 0) return take(offers[active]);
      close();
      find(input.current?.value.trim() ?? "");
    } else if (isOpen && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      setActive((active + step + offers.length + (active < 0 && step < 0 ? 1 : 0)) % offers.length);
    } else if (isOpen && event.key === "Tab" && active >= 0) {
      event.preventDefault();
      take(offers[active]);
    } else if (isOpen && event.key === "Escape") {
      event.preventDefault();
      close();
    }
  };
  return html`
    <form class="search" role="search" onSubmit=${(/** @type {Event} */ event) => {
      event.preventDefault();
      close();
      find(input.current?.value.trim() ?? "");
    }}>
      <label for="find">Search runs</label>
      <span class="combo">
        <input id="find" ref=${input} type="text" role="combobox" autocomplete="off"
          spellcheck=${false} aria-autocomplete="list" aria-expanded=${offers.length > 0}
          aria-controls="offers" aria-invalid=${mistake !== null}
          aria-describedby=${mistake === null ? undefined : "mistake"}
          aria-activedescendant=${active >= 0 ? `offer-${active}` : undefined}
          placeholder="val/loss < 0.3 and config.lr == 3e-4"
          onInput=${complete} onKeyDown=${press} onBlur=${close} />
        <ul id="offers" role="listbox" aria-label="Names" hidden=${offers.length === 0}>
          ${offers.map((offer, index) => html`
            <li id=${`offer-${index}`} key=${offer.kind + offer.text} role="option"
              aria-selected=${index === active}
              onMouseDown=${(/** @type {Event} */ event) => {
                event.preventDefault();
                take(offer);
              }}><span>${offer.text}</span> <small>${offer.kind}${offer.more && ` ${offer.more}`}</small>
            </li>`)}
        </ul>
      </span>
      <button>Find</button>
      ${value && html`<button type="button" class="plain" onClick=${() => find("")}>Show all</button>`}
    </form>
    ${mistake !== null && html`<pre id="mistake" class="mistake" role="alert">${mistake}</pre>`}`;
}

/** The word before the caret. @param {HTMLInputElement | null} box */
function readWord(box) {
  if (!box) return "";
  return WORD.exec(box.value.slice(0, box.selectionStart ?? undefined))?.[0] ?? "";
}

/** @param {string} tag */
function quoteTag(tag) {
  return `'${tag.replace(/[\\']/g, "\\$&")}' in tags`;
}

/** @param {any} names @param {string} word @returns {Offer[]} */
function listOffers(names, word) {
  /** @type {Offer[]} */
  const tags = (names.tags ?? []).map((/** @type {any} */ entry) => (
    { text: quoteTag(entry.tag), kind: "tag", more: entry.runs ? writeMany(entry.runs, "run") : "" }));
  if (word.startsWith("'")) return tags.slice(0, MOST);
  /** @type {Offer[]} */
  const offers = [
    ...(names.metrics ?? []).map((/** @type {any} */ metric) => ({ text: quoteName(metric.name), kind: "metric", more: "" })),
    ...(names.config ?? []).map((/** @type {any} */ entry) => (
      { text: entry.written, kind: "config", more: (entry.values ?? []).map(writeValue).join(", ") })),
    ...(names.fields ?? []).map((/** @type {string} */ field) => ({ text: field, kind: "field", more: "" })),
    ...(names.functions ?? []).map((/** @type {string} */ name) => ({ text: `${name}(`, kind: "function", more: "" })),
    ...tags,
  ];
  const found = word.toLowerCase();
  return offers.filter(({ text }) => text.toLowerCase().includes(found) && text !== word).slice(0, MOST);
}
