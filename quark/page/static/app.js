// @ts-check
/** The frame of every page: which page it is, who may see it, whether the server is there. */

import { html } from "./data/html.js";
import { Component, render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { SignInNeeded, askEarly, askJson, poll, readState, watchState } from "./pages/connection.js";
import { loadLate, useLate } from "./pages/late.js";
import { areKeysOn, listKeys, setKeysOn, takeKeys } from "./pages/keyboard.js";
import { makeLink, readPlace, watchPlace } from "./pages/links.js";
import { followSession, makeLoginLink, readSession, resumeSession } from "./pages/session.js";

const ASK_AGAIN_MS = 2000;

/** What failed while it was drawn stands there, and the rest of the page goes on. */
class Fence extends Component {
  /** @param {unknown} error */
  componentDidCatch(error) {
    this.setState({ error });
  }

  render() {
    const error = /** @type {any} */ (this.state).error;
    if (!error) return this.props.children;
    return html`<main id="main" class="notice" role="alert"><h1>This page cannot be displayed</h1>
      <pre>${String(error?.stack ?? error)}</pre></main>`;
  }
}

function App() {
  const [place, setPlace] = useState(readPlace);
  const [state, setState] = useState(readState);
  useEffect(() => watchPlace(() => setPlace(readPlace())), []);
  useEffect(() => watchState(setState), []);
  useEffect(followSession, []);
  useEffect(() => takeKeys([{ key: "?", says: "this help", act: openHelp }]), []);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    ${state === "lost" && html`<p class="banner" role="status">
      <b>▲ The server does not answer.</b> What you see is what was there; it is asked again, at
      most 10 s apart.</p>`}
    ${state === "sign-in"
      ? html`<${SignIn} />`
      : html`<${Fence} key=${place.name + place.run}><${Page} place=${place} /><//>`}
    <${Help} />`;
}

/** Each is begun when it is opened first: a list of runs needs no charts. @type {Map<string, () => Promise<any>>} */
const LOADERS = new Map(/** @type {[string, () => Promise<any>][]} */ ([
  ["runs", () => import("./pages/runs.js").then((module) => module.RunsPage)],
  ["run", () => import("./pages/run.js").then((module) => module.RunPage)],
  ["layers", () => import("./pages/layers.js").then((module) => module.LayersPage)],
  ["sweeps", () => import("./pages/sweeps.js").then((module) => module.SweepsPage)],
  ["sweep", () => import("./pages/sweep.js").then((module) => module.SweepPage)],
  ["compare", () => import("./pages/compare.js").then((module) => module.ComparePage)],
]));

/** @param {{ place: import("./pages/links.js").Place }} props */
function Page({ place }) {
  const load = LOADERS.get(place.name);
  const Found = useLate(load);
  if (Found) return html`<${Found} place=${place} />`;
  if (load) return html`<main id="main" aria-busy="true"></main>`;
  return html`<main id="main" class="notice"><h1>This page does not exist</h1>
    <p><a href=${makeLink([])}>All runs</a></p></main>`;
}

/** Goes away by itself once this browser has signed in, in whatever tab. */
function SignIn() {
  useEffect(() => {
    const stop = poll(async () => {
      await askJson("api/session").catch((error) => {
        if (!(error instanceof SignInNeeded)) throw error;
      });
    }, ASK_AGAIN_MS);
    return () => {
      stop();
      resumeSession();
    };
  }, []);
  if (readSession().mode === "team") {
    return html`<main id="main" class="notice" role="alert"><h1>Your session has ended</h1>
      <p>A session ends after 12 hours, with its API key, or when you log out.</p>
      <p><a class="button" href=${makeLoginLink()}>Log in</a></p></main>`;
  }
  return html`<main id="main" class="notice" role="alert"><h1>Sign in to open this page</h1>
    <p>Open the address that <code>quark ui</code> prints, with its token. Each address works once, in
    one browser. After that, it prints a new one. This page then continues.</p>
    <p><button onClick=${() => location.reload()}>Try again</button></p></main>`;
}

/** @param {Event} event */
function skip(event) {
  event.preventDefault();
  const main = document.getElementById("main");
  if (!main) return;
  main.tabIndex = -1;
  main.focus();
}

function openHelp() {
  const dialog = /** @type {HTMLDialogElement | null} */ (document.getElementById("help"));
  dialog?.dispatchEvent(new Event("ask"));
}

function Help() {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [keys, setKeys] = useState(/** @type {import("./pages/keyboard.js").Shortcut[]} */ ([]));
  const [isOn, setOn] = useState(areKeysOn);
  useEffect(() => {
    const open = () => {
      setKeys(listKeys());
      dialog.current?.showModal();
    };
    dialog.current?.addEventListener("ask", open);
    return () => dialog.current?.removeEventListener("ask", open);
  }, []);
  /** @param {Event} event */
  const turn = (event) => {
    setKeysOn(/** @type {HTMLInputElement} */ (event.target).checked);
    setOn(areKeysOn());
  };
  return html`
    <footer><button class="plain" onClick=${openHelp}>Keys and help</button></footer>
    <dialog id="help" ref=${dialog} aria-labelledby="help-title">
      <h2 id="help-title">Keys</h2>
      <table><tbody>${keys.map(({ key, says }) => html`
        <tr key=${key}><td><kbd>${key}</kbd></td><td>${says}</td></tr>`)}</tbody></table>
      <label><input type="checkbox" checked=${isOn} onChange=${turn} /> Single-key shortcuts</label>
      <p>Shift and drag, or two fingers, zoom a chart; a double click shows the whole run.</p>
      <form method="dialog"><button>Close</button></form>
    </dialog>`;
}

const begin = () => render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("page")));
askEarly();
const first = LOADERS.get(readPlace().name);
// What keeps it from being loaded is met again, and told, where it is drawn.
if (first) loadLate(first).then(begin, begin);
else begin();
