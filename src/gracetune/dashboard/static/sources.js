// Where the page gets its data: the server, with live changes, or the report that the page is in.

import { setHead } from "./store.js";

const RELOAD_MS = 1000;
const RECONNECT_MS = 1000;
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

  // Take the token from the address, or after a reload from this tab's memory, which the browser,
  // unlike a cookie, never sends anywhere. Return false if there is no valid one.
  async open() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) history.replaceState(null, "", location.pathname);
    try {
      if (given) sessionStorage.setItem("gracetune-token", given);
      this.token = given ?? sessionStorage.getItem("gracetune-token") ?? "";
    } catch {
      this.token = given ?? ""; // Storage is off: a reload needs the whole address again.
    }
    const answer = await this.fetch("/api/runs").catch(() => null); // not even a possible header
    return answer?.ok ?? false;
  }

  fetch(path, options = {}) {
    return fetch(path, { ...options, headers: { ...options.headers, "x-gracetune-token": this.token } });
  }

  async start(store, changed) {
    this.store = store;
    this.changed = changed;
    for (;;) {
      const status = await this.follow().catch((error) => console.warn(error));
      if (status === 401) {
        this.onState("expired");
        return;
      }
      this.onState("lost");
      await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
    }
  }

  // Read server-sent events until the stream ends; return the status code of the answer.
  // EventSource would do it, but cannot send a header.
  async follow() {
    const answer = await this.fetch("/api/events");
    if (!answer.ok) return answer.status;
    this.onState("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return answer.status;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const [, kind, data] = block.match(/^event: (.*)\ndata: (.*)$/m) ?? [];
        if (kind) this.onEvent(kind, JSON.parse(data));
      }
    }
  }

  onEvent(kind, content) {
    if (kind === "status") this.onStatus(content);
    else if (kind === "delta") this.onDelta(content);
    else this.loadAll().catch(() => this.onState("lost"));
  }

  async loadAll() {
    const { runs, media_key: key } = await this.get("/api/runs");
    this.mediaKey = key;
    await Promise.all(runs.map((run) => this.load(run.id)));
  }

  async get(path) {
    const answer = await this.fetch(path);
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
      const answer = await this.fetch(`/api/runs/${run.id}/requests`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      const text = await answer.text();
      return answer.headers.get("content-type")?.startsWith("application/json") ? JSON.parse(text) : { error: text };
    } catch {
      return { error: "the dashboard cannot be reached" };
    }
  }

  sample(run, set, file) {
    return `/samples/${run.id}/${set.name}/${file}?t=${Math.round(set.time)}&key=${this.mediaKey}`;
  }

  thumbnail(run, set, file) {
    return `/thumbnails/${run.id}/${set.name}/${file}?t=${Math.round(set.time)}&key=${this.mediaKey}`;
  }
}
