// @ts-check
/** A run in a notebook's cell, as anywidget shows it: what came is drawn, what is missing is asked for. */

import { makeElement } from "./charts/data_table.js";
import { MetricChart } from "./charts/metric_chart.js";
import { readTheme, watchTheme } from "./charts/theme.js";
import { joinCurves, readCurves } from "./data/curves.js";
import { decodePack } from "./data/pack.js";
import { GLYPHS, spell, writeDuration, writeMany, writeNumber, writeStep } from "./pages/texts.js";
import { STYLES } from "./widget/styles.js";

/** @typedef {import("./data/curves.js").Curve} Curve */
/**
 * @typedef {object} Model what anywidget gives
 * @property {(name: string) => any} get
 * @property {(event: string, act: () => void) => void} on
 * @property {(event: string, act: () => void) => void} off
 * @property {(content: unknown) => void} send
 */

const ENTRIES = 600;
const HEIGHT = 130;
// Something comes at least each five seconds while anybody is there.
const SILENT_MS = 15_000;

/** What is known of one run; each view draws it. */
class LiveRun {
  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    this.id = crypto.randomUUID?.() ?? String(Math.random());
    /** @type {Record<string, any>} */
    this.head = {};
    /** @type {Curve[]} */
    this.curves = [];
    this.number = 0;
    this.received = 0;
    this.parts = 0;
    this.heard_ms = Date.now();
    this.isCut = false;
    /** @type {Set<() => void>} */
    this.views = new Set();
    this.take = this.take.bind(this);
    model.on("change:whole", this.take);
    model.on("change:news", this.take);
    model.on("comm_live_update", () => this.lose());
    this.take();
  }

  /** What lies in the model: a whole that is newer, then the part behind it. */
  take() {
    for (const name of ["whole", "news"]) {
      const bytes = this.model.get(name);
      if (bytes?.byteLength) this.read(bytes);
    }
  }

  /** @param {DataView} bytes */
  read(bytes) {
    const { head, columns } = decodePack(/** @type {ArrayBuffer} */ (bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength)));
    const { number, whole } = head;
    if (number <= this.number) return;
    const isNext = number === this.number + 1;
    if (!whole && !isNext) return this.tell({ asks: "whole" });
    const came = readCurves({ head, columns });
    this.head = { ...this.head, ...head };
    this.curves = whole ? came : joinCurves(this.curves, came, { entries: ENTRIES });
    this.number = number;
    this.received += bytes.byteLength;
    this.parts++;
    this.heard_ms = Date.now();
    this.isCut = false;
    this.views.forEach((draw) => draw());
  }

  /** The kernel is gone, or another one is there. */
  lose() {
    this.isCut = true;
    this.views.forEach((draw) => draw());
  }

  /** @param {Record<string, unknown>} content */
  tell(content) {
    try {
      this.model.send({ ...content, from: this.id });
    } catch {
      this.lose();
    }
  }

  /** @param {() => void} draw @returns {() => void} */
  watch(draw) {
    this.views.add(draw);
    this.tell({ views: this.views.size });
    return () => {
      this.views.delete(draw);
      this.tell({ views: this.views.size });
    };
  }

  get isRunning() {
    return this.head.run?.state === "running";
  }

  get isSilent() {
    return this.isRunning && (this.isCut || Date.now() - this.heard_ms > SILENT_MS);
  }
}

/** One view of a run. */
class LiveCard {
  /** @param {LiveRun} run @param {HTMLElement} host */
  constructor(run, host) {
    this.run = run;
    const shadow = host.attachShadow({ mode: "open" });
    shadow.append(makeElement("style", STYLES));
    this.root = makeElement("section", "", "live");
    this.parts = {
      head: makeElement("div", "", "live-head"), figures: makeElement("div", "", "live-figures"),
      note: makeElement("p", "", "live-note"), findings: makeElement("ul", "", "live-findings"),
      charts: makeElement("div", "", "live-charts"), foot: makeElement("div", "", "live-foot"),
    };
    this.root.append(...Object.values(this.parts));
    this.parts.note.setAttribute("role", "status");
    shadow.append(this.root);
    /** @type {Map<string, { box: HTMLElement, chart: MetricChart }>} */
    this.charts = new Map();
    /** @type {[number, number] | null} */
    this.window = null;
    this.isFramed = false;
    this.refresh = this.refresh.bind(this);
    this.unwatch = [run.watch(this.refresh), watchTheme(this.refresh)];
    this.timer = setInterval(() => this.refreshNote(), 1000);
    this.refresh();
  }

  destroy() {
    clearInterval(this.timer);
    this.unwatch.forEach((stop) => stop());
    this.charts.forEach(({ chart }) => chart.destroy());
    this.charts.clear();
  }

  refresh() {
    // Once a frame at most, however many parts came.
    if (this.isFramed) return;
    this.isFramed = true;
    requestAnimationFrame(() => {
      this.isFramed = false;
      this.draw();
    });
  }

  draw() {
    const { head } = this.run;
    this.root.dataset.theme = readTheme();
    this.root.dataset.parts = String(this.run.parts);
    this.root.dataset.bytes = String(this.run.received);
    if (!head.run) return;
    this.root.setAttribute("aria-label", `Run ${spell(head.run.name || head.run.id)}`);
    this.drawHead(head.run);
    this.parts.figures.replaceChildren(...this.listFigures());
    this.parts.findings.replaceChildren(...this.listFindings());
    this.drawCharts();
    this.refreshNote();
  }

  /** @param {Record<string, any>} run */
  drawHead({ name, id, project, tags, state, ending }) {
    const shown = this.run.isSilent ? "unknown" : state;
    const kind = state === "failed" || state === "lost" ? "live-bad" : "";
    const badge = makeElement("span", `${GLYPHS.get(shown) ?? "·"} ${this.run.isSilent ? "no word" : state}`, kind);
    badge.dataset.state = shown;
    this.parts.head.replaceChildren(
      makeElement("h3", name || id, "live-name"), badge, ...(ending ? [makeElement("span", ending.message, kind)] : []),
      makeElement("span", [project, ...(tags ?? [])].join(" · "), "live-quiet"), makeElement("code", id, "live-id live-quiet"),
    );
  }

  listFigures() {
    const { progress: p, health, run } = this.run.head;
    const step = run.newest_step === null ? "" : `step ${writeStep(run.newest_step)}${p?.of ? ` of ${writeStep(p.of)} (${Math.round(100 * p.share)} %)` : ""}`;
    const rate = p?.ms_per_step ? `${writeNumber(1000 / p.ms_per_step)} steps/s` : "";
    const data = p?.data_share ? `data ${Math.round(100 * p.data_share)} %` : "";
    const eta = p?.eta_s ? `${writeDuration(p.eta_s)} left` : "";
    const figures = [step, rate, data, eta].filter(Boolean).map((text) => makeElement("span", text));
    const status = health?.known ? health.status : "unknown";
    const said = health?.known ? `health ${Math.round(health.score)} ${health.word ?? status}` : "health not known yet";
    const kind = { healthy: "live-good", watch: "live-warn", degraded: "live-bad", critical: "live-bad" }[/** @type {string} */ (status)] ?? "live-quiet";
    return [...figures, makeElement("span", `${GLYPHS.get(status) ?? ""} ${said}`, kind)];
  }

  listFindings() {
    const { findings = [], finding_count: count = 0 } = this.run.head;
    const rows = findings.map((/** @type {Record<string, any>} */ finding) => {
      const kind = finding.severity === "warning" ? "live-warn" : "live-bad";
      const at = finding.culprit ? ` in ${finding.culprit}` : "";
      const since = finding.step === null ? "" : `, since step ${writeStep(finding.step)}`;
      const row = makeElement("li");
      row.append(
        makeElement("span", `${GLYPHS.get(finding.severity) ?? ""} ${finding.severity}: ${finding.title}${at}${since}`, kind),
        makeElement("span", ` ${finding.fact}`, "live-quiet"),
      );
      return row;
    });
    if (count > rows.length) rows.push(makeElement("li", `and ${count - rows.length} more`, "live-quiet"));
    return rows;
  }

  drawCharts() {
    const names = /** @type {string[]} */ (this.run.head.names ?? []);
    const whole = this.findWhole();
    for (const [name, { box, chart }] of this.charts) {
      if (names.includes(name)) continue;
      chart.destroy();
      box.remove();
      this.charts.delete(name);
    }
    for (const [place, name] of names.entries()) {
      const curves = this.run.curves.filter((curve) => curve.name === name);
      const props = { curves, window: this.window, whole, marks: place === 0 ? this.listMarks() : [] };
      const known = this.charts.get(name);
      if (known) {
        known.chart.update(props);
        continue;
      }
      const box = makeElement("div");
      this.parts.charts.append(box);
      const chart = new MetricChart(box, {
        title: name, height: HEIGHT, ...props,
        onZoom: (low, high) => {
          this.window = low === null || high === null ? null : [low, high];
          this.refresh();
        },
      });
      this.charts.set(name, { box, chart });
    }
  }

  listMarks() {
    const { findings = [] } = this.run.head;
    return findings.filter((/** @type {any} */ finding) => finding.step !== null)
      .map((/** @type {any} */ { step, title, severity }) => ({ step, text: title, severity }));
  }

  /** Steps of all curves, so that all charts have one axis. @returns {[number, number] | null} */
  findWhole() {
    let [low, high] = [Infinity, -Infinity];
    for (const { step, unit } of this.run.curves) {
      if (unit !== "step" || !step.length) continue;
      low = Math.min(low, step[0]);
      high = Math.max(high, step[step.length - 1]);
    }
    return low < high ? [low, high] : null;
  }

  refreshNote() {
    const { head, isSilent } = this.run;
    if (!head.run) return;
    const at = new Date(1000 * head.at).toLocaleTimeString("en-GB");
    const note = isSilent ? `No message from the kernel since ${at}. This is the last known state.` : head.note ?? "";
    if (this.parts.note.textContent !== note) {
      this.parts.note.textContent = note;
      this.drawHead(head.run);
    }
    const more = Math.max(0, head.metric_count - (head.names?.length ?? 0));
    const rest = more ? ` · and ${writeMany(more, "metric")} more: quark ui` : "";
    this.parts.foot.textContent = `as of ${at}${rest}`;
  }
}

/** @type {Map<string, LiveRun>} */
const runs = new Map();

/** @param {Model} model */
function findRun(model) {
  const key = model.get("key");
  const known = runs.get(key);
  if (known) return known;
  const run = new LiveRun(model);
  runs.set(key, run);
  return run;
}

/** What anywidget calls. */
export const widget = {
  /** @param {{ model: Model }} given */
  initialize({ model }) {
    const run = findRun(model);
    return () => {
      model.off("change:whole", run.take);
      model.off("change:news", run.take);
      runs.delete(model.get("key"));
    };
  },
  /** @param {{ model: Model, el: HTMLElement }} given */
  render({ model, el }) {
    const host = makeElement("div");
    el.append(host);
    const card = new LiveCard(findRun(model), host);
    return () => card.destroy();
  },
};
