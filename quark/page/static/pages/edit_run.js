// @ts-check
/** What people change of a run: name, notes, tags, archive; and the request that it stop. */

import { html } from "../data/html.js";
import { useEffect, useRef, useState } from "../vendor/hooks.js";
import { FreeText } from "./badges.js";
import { sendChange, useSession } from "./session.js";
import { writeTime } from "./texts.js";

const MOST_NAME = 250;
const MOST_NOTES = 100_000;
const MOST_REASON = 1000;

/** @typedef {(run: any) => void} Edited is told what the run is now */

/**
 * Sends changes of one run, and says what went wrong.
 * @param {string} id @param {Edited} edited
 */
function useChange(id, edited) {
  const [state, setState] = useState({ isBusy: false, mistake: "" });
  /** @param {string} what @param {Record<string, unknown>} body */
  const change = async (what, body) => {
    setState({ isBusy: true, mistake: "" });
    try {
      const answer = await sendChange(`api/runs/${encodeURIComponent(id)}/${what}`, body);
      setState({ isBusy: false, mistake: "" });
      edited(answer.run);
      return true;
    } catch (error) {
      setState({ isBusy: false, mistake: error instanceof Error ? error.message : String(error) });
      return false;
    }
  };
  return { ...state, change };
}

/** Buttons for who may change the run. @param {{ run: any, edited: Edited }} props */
export function EditButtons({ run, edited }) {
  const { may_edit } = useSession();
  const [open, setOpen] = useState("");
  const { isBusy, mistake, change } = useChange(run.id, edited);
  if (!may_edit) return null;
  const close = () => setOpen("");
  return html`${run.state === "running" && !run.stop && html`<button onClick=${() => setOpen("stop")}>Stop…</button>`}
    <button onClick=${() => setOpen("edit")}>Edit…</button>
    ${!run.archived_at && html`<button disabled=${isBusy} onClick=${() => change("edit", { archived: true })}>Archive</button>`}
    ${mistake && html`<span class="mistake-line" role="alert">${mistake}</span>`}
    ${open === "edit" && html`<${EditDialog} run=${run} edited=${edited} close=${close} />`}
    ${open === "stop" && html`<${StopDialog} run=${run} edited=${edited} close=${close} />`}`;
}

/** That a run is archived, or was asked to stop. @param {{ run: any, edited: Edited }} props */
export function EditNotes({ run, edited }) {
  const { may_edit } = useSession();
  const { isBusy, mistake, change } = useChange(run.id, edited);
  const { stop } = run;
  return html`${stop && html`<p class="notice-line" role="status" id="stop-note"><b>■ Asked to stop</b> by ${stop.by || "somebody"} at ${writeTime(stop.at)}${
      stop.reason && html`: <${FreeText} text=${stop.reason} />`}.
      ${stop.seen_at ? ` The training process received it at ${writeTime(stop.seen_at)}.`
        : run.state === "running" ? " The training process has not confirmed it yet." : ""}</p>`}
    ${run.archived_at && html`<p class="notice-line" role="status" id="archive-note">Archived at ${writeTime(run.archived_at)}: lists leave it out unless a search asks for <code>archived</code>.
      ${may_edit && html` <button disabled=${isBusy} onClick=${() => change("edit", { archived: false })}>Restore</button>`}
      ${mistake && html` <span class="mistake-line" role="alert">${mistake}</span>`}</p>`}`;
}

/** A modal box that is there as long as it is open. @param {{ title: string, id: string, close: () => void, children?: unknown }} props */
export function Box({ title, id, close, children }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => dialog.current?.showModal(), []);
  return html`<dialog ref=${dialog} id=${id} aria-labelledby=${`${id}-title`} onClose=${close}>
    <h2 id=${`${id}-title`}>${title}</h2>${children}</dialog>`;
}

/** @param {{ run: any, edited: Edited, close: () => void }} props */
function EditDialog({ run, edited, close }) {
  // What stood here when it was opened: only what is changed against that is sent.
  const [before] = useState({ name: run.name ?? "", notes: run.notes ?? "", tags: [...run.tags ?? []] });
  const [name, setName] = useState(before.name);
  const [notes, setNotes] = useState(before.notes);
  const [tags, setTags] = useState(before.tags);
  const added = useRef(/** @type {HTMLInputElement | null} */ (null));
  const { isBusy, mistake, change } = useChange(run.id, edited);

  const takeTag = () => {
    const text = added.current?.value.trim() ?? "";
    if (added.current) added.current.value = "";
    const next = text && !tags.includes(text) ? [...tags, text] : tags;
    setTags(next);
    return next;
  };
  /** @param {Event} event */
  const save = async (event) => {
    event.preventDefault();
    const now = takeTag();
    /** @type {Record<string, unknown>} */
    const body = {};
    if (name !== before.name) body.name = name;
    if (notes !== before.notes) body.notes = notes;
    const fresh = now.filter((tag) => !before.tags.includes(tag));
    const gone = before.tags.filter((tag) => !now.includes(tag));
    if (fresh.length) body.add_tags = fresh;
    if (gone.length) body.remove_tags = gone;
    if (!Object.keys(body).length || await change("edit", body)) close();
  };
  /** @param {KeyboardEvent} event */
  const press = (event) => {
    if (event.key !== "Enter" || !added.current?.value.trim()) return;
    event.preventDefault();
    takeTag();
  };
  return html`<${Box} title="Edit the run" id="edit" close=${close}><form onSubmit=${save}>
    <label>Name <input id="edit-name" type="text" maxlength=${MOST_NAME} value=${name} onInput=${(/** @type {any} */ event) => setName(event.currentTarget.value)} /></label>
    <label>Notes <textarea id="edit-notes" rows="5" maxlength=${MOST_NOTES} value=${notes} onInput=${(/** @type {any} */ event) => setNotes(event.currentTarget.value)}></textarea></label>
    <p class="edit-tags">Tags ${tags.map((tag) => html`<span key=${tag} class="tag">${tag}
      <button type="button" class="plain" aria-label=${`Remove the tag ${tag}`} onClick=${() => setTags(tags.filter((other) => other !== tag))}>×</button></span>`)}
      <input id="edit-tag" ref=${added} type="text" maxlength=${MOST_NAME} aria-label="A tag to add" placeholder="add a tag" onKeyDown=${press} />
      <button type="button" onClick=${takeTag}>Add</button></p>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    <p class="quiet">The run's events record all changes.</p>
    <p><button disabled=${isBusy}>Save</button> <button type="button" onClick=${close}>Cancel</button></p>
  </form><//>`;
}

/** @param {{ run: any, edited: Edited, close: () => void }} props */
function StopDialog({ run, edited, close }) {
  const reason = useRef(/** @type {HTMLInputElement | null} */ (null));
  const { isBusy, mistake, change } = useChange(run.id, edited);
  /** @param {Event} event */
  const ask = async (event) => {
    event.preventDefault();
    if (await change("stop", { reason: reason.current?.value.trim() || null })) close();
  };
  return html`<${Box} title="Ask the training process to stop?" id="stop" close=${close}><form onSubmit=${ask}>
    <p>The process receives the request within 10 s and stops at its next check. Quark kills no process. You cannot cancel the request.</p>
    <label>Reason <input id="stop-reason" ref=${reason} type="text" maxlength=${MOST_REASON} /></label>
    ${mistake && html`<p class="mistake" role="alert">${mistake}</p>`}
    <p><button disabled=${isBusy}>Ask it to stop</button> <button type="button" onClick=${close}>Cancel</button></p>
  </form><//>`;
}
