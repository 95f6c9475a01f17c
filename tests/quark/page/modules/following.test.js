// @ts-check
import { equal, holds, makePack } from "./curve_maker.js";

// What pages have and deno has not.
const page = { documentElement: { dataset: { root: "./" } }, querySelector: () => null, addEventListener() {} };
Object.defineProperty(globalThis, "document", { value: page, configurable: true });
Object.defineProperty(globalThis, "history", { value: { state: null, replaceState() {} } });
Object.defineProperty(globalThis, "location", { value: new URL("http://page/"), configurable: true });
const { SeriesStore } = await import("../../../../quark/page/static/pages/series_store.js");

const VIEW = { x: "step", low: null, high: null, ranks: "mean", attempts: "current", entries: 100 };
const QUIET = new AbortController().signal;

/** A server whose cursors hold a place and what was known of the run, as those of `quark ui` do. */
class Server {
  constructor() {
    this.place = 0;
    this.known = 0;
    /** @type {string[]} cursors that were asked with */
    this.asked = [];
    this.mostAnswers = Infinity;
    globalThis.fetch = async (url) => this.answer(new URL(String(url)));
  }

  get cursor() {
    return JSON.stringify([this.place, this.known]);
  }

  /** @param {URL} url */
  async answer(url) {
    const { cursor } = this;
    if (url.pathname.endsWith("/series")) return new Response(makePack({ cursor, missing: [] }, []));
    const asked = url.searchParams.get("cursor") ?? "";
    this.asked.push(asked);
    if (this.asked.length > this.mostAnswers) return new Response("{}", { status: 503 });
    if (asked === cursor) return new Response(null, { status: 204 });
    const isTold = JSON.parse(asked)[1] !== this.known;
    return new Response(makePack({ cursor, reset: false, events: 0, run: { state: "running" }, metrics: isTold ? [["acc", "acc", 1]] : [], analysis: isTold, curves: [] }, []));
  }
}

/** A store with one curve in sight, and how often it has told of new metrics and of an analysis. */
async function begin() {
  const server = new Server();
  const store = new SeriesStore("r", VIEW, () => {});
  const first = server.cursor;
  const told = { metrics: 0, analysis: 0 };
  const look = async () => {
    server.place += 1;
    server.asked = [];
    const head = await store.follow(QUIET, first);
    if (head?.metrics.length) told.metrics += 1;
    if (head?.analysis) told.analysis += 1;
  };
  store.want("loss");
  await store.fetch(["loss"]);
  await look();
  await look();
  equal(server.asked.length, 1, "requests of a look");
  return { server, store, told, look };
}

/** @param {InstanceType<typeof SeriesStore>} store */
async function readAnew(store, key = "loss") {
  await store.fetch([key]);
}

Deno.test("what is told once is told though the curves were read anew before the next look", async () => {
  const { server, store, told, look } = await begin();
  server.known = 1;
  await readAnew(store);
  for (let at = 0; at < 3; at += 1) await look();
  equal(told, { metrics: 1, analysis: 1 });
  equal(server.asked.length, 1, "requests of a look");
  store.close();
});

Deno.test("what is told once is told though one request failed", async () => {
  const { server, store, told, look } = await begin();
  server.known = 1;
  await readAnew(store);
  for (const answers of [0, 1]) {
    server.mostAnswers = answers;
    let failed = false;
    await look().catch(() => failed = true);
    holds(failed, `a request fails after ${answers} answers`);
  }
  server.mostAnswers = Infinity;
  await look();
  equal(told, { metrics: 1, analysis: 1 });
  store.close();
});

Deno.test("curves of several moments tell together what is new, and once", async () => {
  const { server, store, told, look } = await begin();
  server.known = 1;
  store.want("acc");
  await readAnew(store, "acc");
  for (let at = 0; at < 3; at += 1) await look();
  equal(told, { metrics: 1, analysis: 1 });
  store.close();
});
