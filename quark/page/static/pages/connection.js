// @ts-check
/** Requests to the server that this page is from, and what went wrong with them. */

import { root } from "./links.js";

const POLL_MS = 1000;
const SLOWEST_MS = 10_000;
const BACK_OFF = 1.6;
const TIMEOUT_MS = 20_000;

/** Nobody answers. */
export class ServerLost extends Error {}
/** The server wants to know who asks. */
export class SignInNeeded extends Error {}
/** The server refused; the message is its own, with line breaks that matter. */
export class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @typedef {"good" | "lost" | "sign-in"} State */

/** @type {State} */
let state = "good";
/** @type {Set<(state: State) => void>} */
const listeners = new Set();

export function readState() {
  return state;
}

/** @param {(state: State) => void} listener */
export function watchState(listener) {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

/** @param {State} next */
function setState(next) {
  if (next === state) return;
  state = next;
  for (const listener of [...listeners]) listener(next);
}

/**
 * The answer to a GET below the top, 200 or 204.
 * @param {string} path such as `api/runs`
 * @param {Record<string, unknown>} [query] null and undefined are left out, lists are repeated
 * @param {AbortSignal} [signal]
 * @throws {ServerLost | SignInNeeded | Refused | DOMException} the last where it was aborted
 */
export async function ask(path, query = {}, signal) {
  return request(makeUrl(path, query), {}, signal);
}

/** @param {string} path @param {Record<string, unknown>} query */
function makeUrl(path, query) {
  const url = new URL(path, root);
  for (const [key, value] of Object.entries(query)) {
    if (value === null || value === undefined) continue;
    for (const item of Array.isArray(value) ? value : [value]) {
      url.searchParams.append(key, String(item));
    }
  }
  return url;
}

/**
 * Have the server change something.
 * @param {string} path @param {Record<string, unknown>} body @param {string} csrf the token of this session
 * @throws as `ask`
 */
export async function send(path, body, csrf) {
  const headers = { "content-type": "application/json", "quark-csrf": csrf };
  return (await request(new URL(path, root), { method: "POST", headers, body: JSON.stringify(body) })).json();
}

let isPrinting = false;

/** Whether answers are waited for, since what is drawn later is on no paper. @param {boolean} is */
export function setPrinting(is) {
  isPrinting = is;
}

export function isAtOnce() {
  return isPrinting;
}

/** What `fetch` gives, at once. @param {URL} url @returns {Promise<any>} */
async function fetchAtOnce(url) {
  const asked = new XMLHttpRequest();
  asked.open("GET", url, false);
  // Text is all that may be asked for in this way: one character for each byte.
  asked.overrideMimeType("text/plain; charset=x-user-defined");
  asked.send();
  const { buffer } = Uint8Array.from(asked.responseText, (byte) => byte.charCodeAt(0));
  const text = async () => new TextDecoder().decode(buffer);
  return {
    status: asked.status, ok: asked.status < 300, text, arrayBuffer: async () => buffer,
    json: async () => JSON.parse(await text()),
  };
}

/** @param {URL} url @param {RequestInit} options @param {AbortSignal} [signal] */
async function request(url, options, signal) {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const signals = signal ? AbortSignal.any([signal, limit]) : limit;
  let response;
  try {
    response = await (isPrinting && !options.method ? fetchAtOnce(url)
      : fetch(url, { ...options, signal: signals, credentials: "same-origin" }));
  } catch (error) {
    if (signal?.aborted) throw error;
    setState("lost");
    throw new ServerLost("The server does not answer.");
  }
  if (response.status === 401) {
    setState("sign-in");
    throw new SignInNeeded("Sign in to open this page.");
  }
  if (response.status === 502 || response.status === 504) {
    setState("lost");
    throw new ServerLost("The server does not answer.");
  }
  setState("good");
  if (!response.ok) throw new Refused(response.status, await readRefusal(response));
  return response;
}

/** What was asked for before anybody wanted it. @type {Map<string, Promise<any>>} */
const early = new Map();

/**
 * Ask for what the server has named as this page's first request: whoever asks for it first, gets
 * that answer.
 */
export function askEarly() {
  const link = /** @type {HTMLLinkElement | null} */ (document.querySelector("link[rel=preload][as=fetch]"));
  if (!link) return;
  const answer = request(new URL(link.href), {}).then((found) => found.json());
  // Who wants it, is told what went wrong.
  answer.catch(() => undefined);
  early.set(link.href, answer);
}

/** @param {string} path @param {Record<string, unknown>} [query] @param {AbortSignal} [signal] */
export async function askJson(path, query = {}, signal) {
  const { href } = makeUrl(path, query);
  const kept = early.get(href);
  if (kept) {
    early.delete(href);
    return kept;
  }
  return (await ask(path, query, signal)).json();
}

/** @param {Response} response */
async function readRefusal(response) {
  const text = await response.text();
  try {
    const said = JSON.parse(text);
    return String(said.error?.message ?? said.error ?? said.message ?? said.detail ?? text);
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

/**
 * Do something at once, and again and again where that was not the last time.
 * @param {(signal: AbortSignal) => Promise<boolean | void>} act false ends it; what fails is tried again
 * @param {number} [every_ms]
 * @returns {() => void} ends it
 */
export function follow(act, every_ms) {
  const ended = new AbortController();
  let stop = () => {};
  const goOn = () => {
    if (!ended.signal.aborted) stop = poll(act, every_ms);
  };
  act(ended.signal).then((goesOn) => goesOn === false || goOn(), goOn);
  return () => {
    ended.abort();
    stop();
  };
}

/**
 * Do something again and again: a second after it has ended, less and less often while the
 * server is lost, and not at all while nobody looks.
 * @param {(signal: AbortSignal) => Promise<boolean | void>} act false ends it
 * @param {number | (() => number)} [every_ms] or what tells after each look when the next one is due
 * @returns {() => void} ends it
 */
export function poll(act, every_ms = POLL_MS) {
  const ended = new AbortController();
  const readPause = () => typeof every_ms === "number" ? every_ms : every_ms();
  let pause_ms = readPause();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    if (!ended.signal.aborted && !document.hidden) timer = setTimeout(turn, pause_ms);
  };
  const turn = async () => {
    try {
      if (await act(ended.signal) === false) return stop();
      pause_ms = readPause();
    } catch (error) {
      if (ended.signal.aborted) return;
      pause_ms = Math.min(pause_ms * BACK_OFF, SLOWEST_MS);
      if (error instanceof SignInNeeded) return stop();
    }
    wait();
  };
  const look = () => {
    if (document.hidden) clearTimeout(timer);
    else turn();
  };
  const stop = () => {
    ended.abort();
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
  };
  document.addEventListener("visibilitychange", look);
  wait();
  return stop;
}

/** Whether it may go well when it is tried again. @param {unknown} error */
export function isPassing(error) {
  return !(error instanceof SignInNeeded || (error instanceof Refused && error.status !== 503));
}
