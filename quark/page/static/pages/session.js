// @ts-check
/** Who looks, of which workspace, and whether they may change runs. */

import { html } from "../data/html.js";
import { useEffect, useState } from "../vendor/hooks.js";
import { Refused, askJson, poll, send } from "./connection.js";
import { root } from "./links.js";
import { writeTime } from "./texts.js";

/**
 * @typedef {{ mode: string, workspace?: string, name?: string, ends_at?: string, may_edit: boolean,
 *   csrf: string }} Session
 */

// A key that was revoked takes a page off the screen that asks for nothing else.
const LOOK_EVERY_MS = 5000;
const STALE = 403;

/** @type {Session} */
let session = { mode: "", may_edit: false, csrf: "" };
/** @type {Set<(session: Session) => void>} */
const listeners = new Set();
let isFollowed = false;

/** @param {Session} next */
function keep(next) {
  // Somebody has logged in to another workspace, in another tab: nothing here is of that.
  if (session.workspace && next.workspace !== session.workspace) location.reload();
  const isSame = JSON.stringify(next) === JSON.stringify(session);
  session = next;
  if (!isSame) for (const listener of [...listeners]) listener(next);
}

async function load() {
  keep(await askJson("api/session"));
}

/** Ask who looks, and of a team again and again: the session may end. */
export function followSession() {
  if (isFollowed) return;
  isFollowed = true;
  const follow = async () => {
    await load().catch(() => undefined);
    if (session.mode === "team") poll(load, LOOK_EVERY_MS);
    else isFollowed = Boolean(session.mode);
  };
  follow();
}

/** Go on asking, after somebody has logged in again. */
export function resumeSession() {
  isFollowed = false;
  followSession();
}

export function readSession() {
  return session;
}

/** @returns {Session} */
export function useSession() {
  const [known, setKnown] = useState(session);
  useEffect(() => {
    setKnown(session);
    listeners.add(setKnown);
    return () => void listeners.delete(setKnown);
  }, []);
  return known;
}

/**
 * Change something on the server.
 * @param {string} path @param {Record<string, unknown>} body
 */
export async function sendChange(path, body) {
  try {
    return await send(path, body, session.csrf);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== STALE) throw error;
    const before = session.csrf;
    await load();
    if (session.csrf === before) throw error;
    return send(path, body, session.csrf);
  }
}

/** Where somebody logs in, and comes back from to this page. */
export function makeLoginLink() {
  const url = new URL("login", root);
  const below = location.pathname.slice(root.pathname.length) + location.search;
  url.searchParams.set("next", `./${below}`);
  return url.href;
}

/** The address of this page for others of the workspace, who log in with keys of their own. */
export function makeShareLink() {
  const url = new URL(location.href);
  if (session.workspace) url.searchParams.set("in", session.workspace);
  return url.href;
}

async function logOut() {
  await sendChange("logout", {}).catch(() => undefined);
  location.assign(new URL("login", root));
}

/** Whose session this is, on a team's page. */
export function Account() {
  const { mode, name, workspace, ends_at } = useSession();
  if (mode !== "team") return null;
  return html`<span class="account"><span class="quiet" title=${`workspace ${workspace}, until ${writeTime(ends_at)}`}>${name}</span>
    <button class="plain" onClick=${logOut}>Log out</button></span>`;
}
