// Build the page, and redraw what is visible when runs change.

import { announce, color, formatNumber, formatSeconds, h, replace, themeName } from "./basics.js";
import { HeatMap, LineChart } from "./charts.js";
import { Controls, drawHealth, drawRuns, reportHead } from "./overview.js";
import { CHARTS, HEAT_MAPS, SECTIONS, dataReport, flatSettings, formatLogTime, logEntries, machineFacts, planAgainstMeasured, runColor } from "./panels.js";
import { planPanel } from "./plan.js";
import { SamplesPanel } from "./samples.js";
import { LiveSource, ReportSource } from "./sources.js";
import { Store, startTime, tableOf } from "./store.js";

const REDRAW_MS = 100;
const MAX_LOG_LINES = 400;
const MAX_OVERLAID = 2;

class Page {
  constructor(source, made) {
    this.source = source;
    this.store = new Store();
    this.controls = new Controls(this.store, source, () => this.invalidate(true));
    this.panels = [];
    this.visible = new Set();
    this.seen = typeof IntersectionObserver === "undefined" ? null : new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "300px" });
    this.build(made);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redrawAll());
  }

  build(made) {
    const content = document.getElementById("content");
    this.runsPlace = h("section", { class: "runs-place", "aria-label": "Runs" });
    this.healthPlace = h("section", { class: "health", id: "health", "aria-live": "polite" });
    this.empty = h("p", { class: "quiet", text: "Reading the runs …" });
    const sections = SECTIONS.map(([id, title]) => [id, h("section", { class: "section", id, hidden: true, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title`, text: title }), h("div", { class: "panels" }))]);
    this.sections = new Map(sections);
    this.planPlace = h("section", { class: "section", id: "plan", hidden: true }, h("h2", { text: "Plan" }), h("div", { class: "panels" }));
    replace(content, made ? h("div", { id: "made" }) : null, this.empty, this.runsPlace, this.healthPlace, this.planPlace, sections.map(([, element]) => element));
    this.buildHeader();
    this.samples = new SamplesPanel(this.store, this.source);
    this.addPanel("samples", "samples", "Samples by step and prompt", this.samples.element, { wide: true, bare: true, draw: () => { this.samples.update(); return this.samples.steps.length ? "" : "No validation with samples yet. Set validation.every, or use Validate."; } });
    for (const chart of CHARTS) this.addChart(chart);
    for (const map of HEAT_MAPS) this.addHeatMap(map);
    this.addTexts("plan-measured", "memory", "Plan against measured", planAgainstMeasured);
    this.addTexts("machine-facts", "machine", "Machine and versions", machineFacts, true);
    this.addTexts("data-report", "data", "Data", dataReport, true);
    this.addSettings();
    this.addLog();
  }

  buildHeader() {
    this.connection = h("span", { class: "connection", role: "status" });
    const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => { this.store.axis = axis.value; this.zoom(null); } }, h("option", { value: "step", text: "by step" }), h("option", { value: "time", text: "by time" }));
    const smoothing = h("select", { "aria-label": "Smoothing", onchange: () => { this.store.halfLife = Number(smoothing.value); this.invalidate(true); } }, [0, 5, 20, 100, 500, 2000].map((value) => h("option", { value: String(value), text: value ? `smooth ${value}` : "raw", selected: value === 20 })));
    this.reset = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.zoom(null) }, "Whole run");
    this.themeButton = h("button", { type: "button", class: "button", onclick: () => this.toggleTheme() });
    this.nameTheme();
    replace(document.getElementById("top"), h("span", { class: "brand", text: "gracetune" }), this.connection, h("span", { class: "spring" }), this.reset, smoothing, axis, this.themeButton);
    this.nav = document.getElementById("sections");
  }

  nameTheme() {
    const next = themeName() === "dark" ? "Light" : "Dark";
    this.themeButton.textContent = next;
    this.themeButton.setAttribute("aria-label", `${next} theme`);
  }

  toggleTheme() {
    const next = themeName() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("gracetune-theme", next);
    } catch {
      // Not kept, then.
    }
    this.redrawAll();
  }

  redrawAll() {
    this.nameTheme();
    for (const panel of this.panels) panel.forget?.();
    this.samples.key = null;
    this.invalidate(true);
  }

  // A panel: a titled box in a section. `draw` fills it and returns why it is empty, or "".
  addPanel(id, section, title, body, { wide = false, bare = false, note = "", tools = null, draw, forget }) {
    const why = h("p", { class: "why" });
    const element = h("article", { class: `panel${wide ? " wide" : ""}`, id: `panel-${id}`, "aria-labelledby": `panel-${id}-title` }, h("header", { class: bare ? "sr-only" : "panel-head" }, h("h3", { id: `panel-${id}-title`, text: title, title: note || null }), tools), body, note ? h("p", { class: "note", text: note }) : null, why);
    this.sections.get(section).querySelector(".panels").append(element);
    const panel = { id, section, element, why, body, draw, forget };
    this.panels.push(panel);
    this.seen?.observe(element);
    return panel;
  }

  onSeen(entries) {
    for (const entry of entries) {
      const panel = this.panels.find((one) => one.element === entry.target);
      if (!panel) continue;
      panel.isVisible = entry.isIntersecting;
      if (entry.isIntersecting && panel.stale) this.drawPanel(panel);
    }
  }

  addChart(definition) {
    const body = h("div", { class: "charts" });
    let charts = new Map();
    let log = false;
    const toggle = definition.log ? h("button", { type: "button", class: "button small", "aria-pressed": "false", onclick: () => { log = !log; toggle.setAttribute("aria-pressed", String(log)); this.drawPanel(panel); } }, "log") : null;
    const chartFor = (key) => {
      if (!charts.has(key)) charts.set(key, new LineChart({ ...definition, label: definition.title, onZoom: (range) => this.zoom(range) }));
      return charts.get(key);
    };
    const draw = () => {
      const runs = this.store.shown.filter((run) => run.status.state !== "planned");
      const found = runs.map((run) => [run, definition.series(run, this.store)]).filter(([, lines]) => lines.length);
      if (!found.length) return runs.length ? definition.why(runs[0]) : "";
      const widest = Math.max(...found.map(([, lines]) => lines.length));
      const overlaid = found.length === 1 || (!definition.stacked && widest <= MAX_OVERLAID);
      const groups = overlaid ? [["all", found]] : found.map(([run, lines]) => [run.id, [[run, lines]]]);
      const kept = new Map(groups.map(([key]) => [key, chartFor(key)]));
      for (const [key, members] of groups) Object.assign(kept.get(key), { log, pending: members });
      const part = ([key, [[run]]]) => overlaid ? kept.get(key).element : h("div", { class: "sub" }, h("h4", {}, h("span", { class: "swatch", style: { color: runColor(this.store, run) } }), run.name), kept.get(key).element);
      const names = JSON.stringify(groups.map(([key, members]) => [key, members.map(([run]) => run.name)]));
      if (names !== panel.names) {
        panel.names = names;
        panel.element.classList.toggle("wide", !overlaid);
        replace(body, groups.map(part), definition.best ? h("p", { class: "note best" }) : null);
      }
      charts = kept;
      for (const chart of kept.values()) {
        const several = overlaid && found.length > 1;
        chart.update(this.toLines(chart.pending, several), { zoom: this.store.zoom, marks: found.length === 1 ? this.marks(found[0][0]) : [], ...this.axisNames() });
      }
      if (definition.best) body.querySelector(".best").textContent = bestText(found);
      return "";
    };
    const forget = () => {
      for (const chart of charts.values()) {
        chart.signature = "";
        chart.legendKeys = "";
      }
    };
    const panel = this.addPanel(definition.id, definition.section, definition.title, body, { note: definition.note, tools: toggle, draw, forget });
  }

  // Colours belong to runs if there are several in a chart, otherwise to its lines.
  toLines(members, several) {
    return members.flatMap(([run, lines]) => {
      const hasStrong = lines.some((one) => one.strong);
      return lines.map((one, index) => ({
        key: `${run.id} ${one.name}`,
        label: several ? (lines.length > 1 ? `${run.name}, ${one.name}` : run.name) : one.name,
        named: several,
        x: this.axisOf(run, one.table),
        y: one.values,
        color: several || (one.faint || (hasStrong && one.strong && lines.length === 2)) ? (several ? runColor(this.store, run) : color(0)) : color(index),
        alpha: one.faint ? 0.32 : 1,
        width: one.faint ? 1 : one.strong ? 2.2 : 1.6,
        dash: one.dashed || (several && index > 0 && !one.strong) ? [5, 4] : undefined,
        points: one.faint || one.strong ? false : undefined,
        stepped: one.stepped,
        spanGaps: one.spanGaps,
      }));
    });
  }

  axisOf(run, table) {
    if (this.store.axis === "step") return table.steps;
    const start = startTime(run);
    if (!table.relative || table.relative.length !== table.times.length) table.relative = table.times.map((time) => time - start);
    return table.relative;
  }

  axisNames() {
    return this.store.axis === "step" ? { xLabel: "step", formatX: formatNumber } : { xLabel: "time", formatX: formatSeconds };
  }

  marks(run) {
    if (this.store.axis !== "step") return [];
    const resumed = (run.records.run_started ?? []).filter((event) => event.start_step > 0);
    return resumed.slice(-20).map((event) => ({ x: event.start_step, text: "resumed" }));
  }

  addHeatMap(definition) {
    const body = h("div", { class: "charts" });
    let maps = new Map();
    const draw = () => {
      const runs = this.store.shown.filter((run) => run.status.state !== "planned");
      const found = runs.map((run) => [run, ...definition.rows(run)]).filter(([, , rows]) => rows.length);
      if (!found.length) return runs.length ? definition.why(runs[0]) : "";
      maps = new Map(found.map(([run]) => [run.id, maps.get(run.id) ?? new HeatMap({ ...definition, label: definition.title })]));
      const names = found.map(([run]) => run.id).join(" ");
      if (names !== panel.names) {
        panel.names = names;
        panel.element.classList.toggle("wide", found.length > 1 || definition.id === "moved");
        replace(body, found.map(([run]) => h("div", { class: "sub" }, found.length > 1 ? h("h4", {}, h("span", { class: "swatch", style: { color: runColor(this.store, run) } }), run.name) : null, maps.get(run.id).element)));
      }
      for (const [run, steps, rows] of found) maps.get(run.id).update(steps, rows);
      return "";
    };
    const panel = this.addPanel(definition.id, definition.section, definition.title, body, { wide: definition.id === "moved", draw });
  }

  addTexts(id, section, title, content, wide = false) {
    const body = h("div", { class: "texts" });
    const draw = () => {
      const runs = this.store.shown.filter((run) => run.status.state !== "planned");
      if (!runs.length) return "";
      const found = runs.map((run) => [run, content(run)]);
      if (found.every(([, part]) => typeof part === "string")) {
        replace(body);
        return found[0][1];
      }
      replace(body, found.map(([run, part]) => h("div", { class: "sub" }, runs.length > 1 ? h("h4", {}, h("span", { class: "swatch", style: { color: runColor(this.store, run) } }), run.name) : null, typeof part === "string" ? h("p", { class: "why", text: part }) : part)));
      return "";
    };
    this.addPanel(id, section, title, body, { wide, draw });
  }

  addSettings() {
    const search = h("input", { type: "search", placeholder: "Find a setting", "aria-label": "Find a setting", oninput: () => this.drawPanel(panel) });
    const onlyDifferent = h("input", { type: "checkbox", onchange: () => this.drawPanel(panel) });
    const different = h("label", { class: "check" }, onlyDifferent, "differences only");
    const body = h("div", { class: "table-scroll tall", tabindex: "0", role: "region", "aria-label": "Settings" });
    let hadSeveral = false;
    const draw = () => {
      const runs = this.store.shown.filter((run) => run.run_file);
      if (!runs.length) return "The run has not written its settings yet.";
      different.hidden = runs.length < 2;
      if (runs.length > 1 && !hadSeveral) onlyDifferent.checked = true;
      hadSeveral = runs.length > 1;
      const settings = runs.map((run) => flatSettings(run.run_file));
      const names = [...new Set(settings.flatMap((one) => [...one.keys()]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      const wanted = search.value.trim().toLowerCase();
      const rows = names
        .map((name) => [name, settings.map((one) => one.get(name) ?? "–")])
        .filter(([name, values]) => !wanted || name.toLowerCase().includes(wanted) || values.some((value) => value.toLowerCase().includes(wanted)))
        .map(([name, values]) => [name, values, values.some((value) => value !== values[0])])
        .filter(([, , differs]) => runs.length < 2 || !onlyDifferent.checked || differs);
      replace(
        body,
        rows.length
          ? h("table", { class: "plain settings" }, h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "setting" }), runs.map((run) => h("th", { scope: "col" }, h("span", { class: "swatch", style: { color: runColor(this.store, run) } }), run.name)))), h("tbody", {}, rows.slice(0, 1000).map(([name, values, differs]) => h("tr", { class: differs && runs.length > 1 ? "differs" : "" }, h("th", { scope: "row", text: name }), values.map((value) => h("td", { text: value }))))))
          : h("p", { class: "why", text: runs.length > 1 && onlyDifferent.checked && !wanted ? "The run files are the same." : "No setting matches." }),
      );
      return "";
    };
    const panel = this.addPanel("settings", "settings", "Settings", body, { wide: true, tools: h("div", { class: "tools" }, different, search), draw });
  }

  addLog() {
    const search = h("input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log", oninput: () => this.drawPanel(panel) });
    const onlyWarnings = h("input", { type: "checkbox", onchange: () => this.drawPanel(panel) });
    const body = h("div", { class: "log tall", tabindex: "0", role: "region", "aria-label": "Log" });
    const draw = () => {
      const runs = this.store.shown;
      const wanted = search.value.trim().toLowerCase();
      const all = runs.flatMap(logEntries).sort((a, b) => b.time - a.time);
      const found = all.filter((entry) => (!onlyWarnings.checked || entry.level !== "info") && (!wanted || entry.text.toLowerCase().includes(wanted)));
      replace(body, h("ol", { class: "entries" }, found.slice(0, MAX_LOG_LINES).map((entry) => h("li", { class: entry.level }, h("time", { text: formatLogTime(entry.time) }), runs.length > 1 ? h("span", { class: "where", text: entry.run }) : null, entry.level === "info" ? null : h("span", { class: "level", text: entry.level }), h("span", { class: "entry", text: entry.text })))), found.length > MAX_LOG_LINES ? h("p", { class: "quiet", text: `${found.length - MAX_LOG_LINES} older entries are not shown.` }) : null);
      return all.length ? "" : "The log is empty.";
    };
    const panel = this.addPanel("log", "log", "Log", body, { wide: true, tools: h("div", { class: "tools" }, h("label", { class: "check" }, onlyWarnings, "warnings only"), search), draw });
  }

  // Redrawing

  invalidate(now = false) {
    this.dirty = true;
    if (this.timer && !now) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.draw();
    }, now ? 0 : REDRAW_MS);
  }

  draw() {
    const { store } = this;
    this.empty.hidden = store.all.length > 0;
    if (!store.all.length) return;
    drawRunsKeepingFocus(this.runsPlace, () => drawRuns(this.runsPlace, store, this.controls));
    drawHealth(this.healthPlace, store);
    this.drawPlans();
    for (const panel of this.panels) {
      panel.stale = true;
      // Panels out of sight wait, unless they are empty: filling them changes the layout.
      if (panel.isVisible !== false || panel.element.classList.contains("empty") || this.source.isReport) this.drawPanel(panel);
    }
    this.drawSections();
    document.title = titleOf(store);
    document.documentElement.dataset.ready = "true";
  }

  drawPanel(panel) {
    panel.stale = false;
    let why = "";
    try {
      why = panel.draw();
    } catch (error) {
      // An event with unexpected contents; the other panels must go on.
      console.error(error);
      why = `This panel cannot be drawn: ${error.message}`;
    }
    panel.why.textContent = why;
    panel.why.hidden = !why;
    panel.body.hidden = Boolean(why);
    panel.element.classList.toggle("empty", Boolean(why));
  }

  drawPlans() {
    const plans = this.store.shown.filter((run) => run.plan);
    this.planPlace.hidden = !plans.length;
    if (plans.length) replace(this.planPlace.querySelector(".panels"), plans.map((run) => h("article", { class: "panel wide" }, h("header", { class: "panel-head" }, h("h3", { text: run.name })), planPanel(run))));
  }

  drawSections() {
    const hasRuns = this.store.shown.some((run) => run.status.state !== "planned");
    const links = [];
    for (const [id, title] of SECTIONS) {
      const section = this.sections.get(id);
      const isShown = hasRuns || (id === "settings" && this.store.shown.some((run) => run.run_file));
      section.hidden = !isShown;
      if (isShown) links.push([id, title]);
    }
    const key = links.map(([id]) => id).join(" ");
    if (key !== this.navKey) {
      this.navKey = key;
      replace(this.nav, links.map(([id, title]) => h("a", { href: `#${id}`, text: title })));
      // Sections that were hidden have not been seen yet.
      for (const panel of this.panels) if (panel.stale) this.drawPanel(panel);
    }
  }

  zoom(range) {
    this.store.zoom = range && range[1] - range[0] > 0 ? range : null;
    this.reset.hidden = !this.store.zoom;
    announce(this.store.zoom ? "Zoomed in. Double-click a chart or use Whole run to see everything." : "Whole run.");
    this.invalidate(true);
    if (!this.source.isReport) for (const run of this.store.shown) this.source.reload(run.id);
  }

  setConnection(state) {
    const texts = { live: "live", lost: "connection lost, trying again", expired: "the dashboard was started again: open its new address" };
    this.connection.textContent = texts[state];
    this.connection.dataset.state = state;
  }
}

function bestText(found) {
  return found
    .map(([run]) => {
      const table = tableOf(run, "held_out_loss");
      const best = run.latest.held_out_loss;
      if (best?.best_step !== undefined) return `${found.length > 1 ? `${run.name}: ` : ""}lowest ${formatNumber(Number(best.best_loss))} at step ${formatNumber(best.best_step)}`;
      const [, values] = Object.entries(table.columns)[0] ?? [];
      if (!values) return "";
      let row = 0;
      values.forEach((value, index) => { if (value !== null && value < (values[row] ?? Infinity)) row = index; });
      return `${found.length > 1 ? `${run.name}: ` : ""}lowest ${formatNumber(values[row])} at step ${formatNumber(table.steps[row])}`;
    })
    .filter(Boolean)
    .join("; ");
}

function titleOf(store) {
  const [run] = store.shown;
  if (!run) return "gracetune";
  const { state, step, total_steps: total } = run.status;
  return state === "running" && total ? `${Math.floor((100 * step) / total)} % ${run.name}` : `${run.name}: ${state}`;
}

// Redrawing the table of runs must not take the focus from its buttons.
function drawRunsKeepingFocus(place, draw) {
  const focused = document.activeElement;
  const all = [...place.querySelectorAll("button, input")];
  const position = focused && place.contains(focused) ? all.indexOf(focused) : -1;
  draw();
  if (position >= 0) [...place.querySelectorAll("button, input")][position]?.focus();
}

async function main() {
  const inlined = document.getElementById("report-data");
  if (inlined) {
    const data = JSON.parse(inlined.textContent);
    const page = new Page(new ReportSource(data), data.made);
    page.connection.textContent = "report";
    await page.source.start(page.store, () => page.invalidate(true));
    replace(document.getElementById("made"), reportHead(page.store, data.made));
    return;
  }
  const source = new LiveSource((state) => page.setConnection(state));
  const page = new Page(source, 0);
  if (!(await source.open())) {
    page.empty.textContent = "This address has no valid token. Open the address that `gracetune dash` has printed.";
    return;
  }
  await source.start(page.store, () => page.invalidate());
}

main();
