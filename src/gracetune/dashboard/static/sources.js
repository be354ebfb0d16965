// Where the page gets its data: the server, with live changes, or the report that the page is in.

import { setHead } from "./store.js";

const RELOAD_MS = 1000;
const MAX_ROWS = 4000;

export class ReportSource {
  constructor(data) {
    this.data = data;
    this.canSend = false;
    this.isReport = true;
  }

  async start(store, changed) {
    for (const run of this.data.runs) store.put(run);
    changed();
  }

  sample(run, set, file) {
    return this.data.files[`${run.id}/${set.name}/${file}`] ?? this.thumbnail(run, set, file);
  }

  thumbnail(run, set, file) {
    return this.data.thumbnails[`${run.id}/${set.name}/${file}`] ?? null;
  }
}

export class LiveSource {
  constructor(onState) {
    this.canSend = true;
    this.isReport = false;
    this.onState = onState;
    this.reloading = new Map();
  }

  // Exchange the token in the address for a session; return false if there is none.
  async open() {
    const token = new URLSearchParams(location.hash.slice(1)).get("token");
    if (token) history.replaceState(null, "", location.pathname);
    const answer = await fetch("/session", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(token ? { token } : {}) });
    return answer.ok;
  }

  async start(store, changed) {
    this.store = store;
    this.changed = changed;
    const events = new EventSource("/api/events");
    events.addEventListener("hello", () => this.loadAll());
    events.addEventListener("runs", () => this.loadAll());
    events.addEventListener("status", (event) => this.onStatus(JSON.parse(event.data)));
    events.addEventListener("delta", (event) => this.onDelta(JSON.parse(event.data)));
    events.onopen = () => this.onState("live");
    events.onerror = () => this.onState("lost");
  }

  async loadAll() {
    const { runs } = await this.get("/api/runs");
    await Promise.all(runs.map((run) => this.load(run.id)));
  }

  async get(path) {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  async load(id) {
    const zoom = this.store.zoom && this.store.axis === "step" ? `?low=${Math.floor(this.store.zoom[0])}&high=${Math.ceil(this.store.zoom[1])}` : "";
    const run = await this.get(`/api/runs/${id}${zoom}`);
    const order = [...this.store.runs.keys()];
    this.store.put(run);
    if (!order.includes(id)) this.store.runs = new Map([...this.store.runs].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true })));
    this.changed();
  }

  // Fetch a run again, at most once a second: a resumed run repeats many steps.
  reload(id) {
    if (this.reloading.has(id)) return;
    this.reloading.set(id, setTimeout(() => {
      this.reloading.delete(id);
      this.load(id).catch(() => this.onState("lost"));
    }, this.store.runs.has(id) && this.store.runs.get(id).version > 0 ? RELOAD_MS : 0));
  }

  onStatus(head) {
    const run = this.store.runs.get(head.id);
    if (run) setHead(run, head);
    this.changed();
  }

  onDelta(delta) {
    const known = this.store.apply(delta);
    const rows = this.store.runs.get(delta.id)?.tables.step_done?.steps.length ?? 0;
    if (!known || rows > MAX_ROWS) this.reload(delta.id);
    this.changed();
  }

  async send(run, body) {
    try {
      const answer = await fetch(`/api/runs/${run.id}/requests`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      const text = await answer.text();
      return answer.headers.get("content-type")?.startsWith("application/json") ? JSON.parse(text) : { error: text };
    } catch {
      return { error: "the dashboard cannot be reached" };
    }
  }

  sample(run, set, file) {
    return `/samples/${run.id}/${set.name}/${file}?t=${Math.round(set.time)}`;
  }

  thumbnail(run, set, file) {
    return `/thumbnails/${run.id}/${set.name}/${file}?t=${Math.round(set.time)}`;
  }
}
