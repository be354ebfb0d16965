// The top of the page: the runs and their state, requests to them, and what is wrong.

import { announce, color, formatBytes, formatCount, formatNumber, formatSeconds, formatTime, h, replace } from "./basics.js";
import { columnsBelow, lastOf, secondsOfProcesses, smooth, speeds, tableOf } from "./store.js";

const STATES = {
  waiting: ["waiting", "muted"],
  starting: ["starting", "busy"],
  running: ["running", "good"],
  quiet: ["not heard of", "warn"],
  done: ["done", "good"],
  interrupted: ["stopped", "muted"],
  failed: ["failed", "bad"],
  killed: ["killed", "bad"],
  unreadable: ["unreadable", "bad"],
  planned: ["planned", "muted"],
};

export function drawRuns(place, store, controls) {
  const rows = store.all.map((run) => runRow(run, store, controls));
  replace(
    place,
    h(
      "table",
      { class: "runs", "aria-label": "Runs" },
      h("thead", {}, h("tr", {}, ["Run", "State", "Steps", "Loss", "Held-out", "Speed", "Time", "Memory", ""].map((name) => h("th", { scope: "col", text: name })))),
      h("tbody", {}, rows),
    ),
  );
}

function runRow(run, store, controls) {
  const [word, tone] = STATES[run.status.state] ?? [run.status.state, "muted"];
  const steps = tableOf(run, "step_done");
  const held = tableOf(run, "held_out_loss");
  const loss = steps ? lastOf(smooth(steps, "loss", Math.max(store.halfLife, 1))) : null;
  const seconds = steps ? lastOf(smooth(steps, "seconds", 20)) : null;
  const speed = steps ? lastOf(speeds(steps, 20)) : null;
  const { step, total_steps: total } = run.status;
  const share = total ? Math.min(step / total, 1) : 0;
  const isShown = store.shown.includes(run);
  const memory = tableOf(run, "memory_used");
  const device = memory ? lastOf(memory.columns.device) : null;
  const heldLoss = held ? lastOf(columnsBelow(held, "losses")[0]?.[1]) : null;
  const cell = (label, ...children) => h("td", { "data-label": label }, children);
  return h(
    "tr",
    { class: isShown ? "" : "off" },
    h(
      "th",
      { scope: "row" },
      h("label", { class: "run-name", title: run.folder }, h("input", { type: "checkbox", checked: isShown, onchange: (event) => controls.show(run, event.target.checked) }), h("span", { class: "swatch", style: { color: color(store.indexOf(run)) } }), h("span", { text: run.name })),
    ),
    cell("State", h("span", { class: `badge ${tone}`, title: run.status.text, text: run.reading < 1 ? `reading ${Math.round(100 * run.reading)} %` : word })),
    cell("Steps", h("span", { class: "steps" }, h("span", { class: "progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": String(total), "aria-valuenow": String(step), "aria-label": "Steps done" }, h("span", { style: { width: `${100 * share}%` } })), h("span", { text: total ? `${formatCount(step)} / ${formatCount(total)}` : "–" }))),
    cell("Loss", formatNumber(loss)),
    cell("Held-out", formatNumber(heldLoss)),
    cell("Speed", speed ? `${formatNumber(speed)} samples/s` : "–"),
    cell("Time", timeText(run, seconds, step, total)),
    cell("Memory", device ? `${formatBytes(device)} GPU` : memory ? formatBytes(lastOf(memory.columns.host)) : "–"),
    h("td", { class: "actions" }, controls.buttons(run)),
  );
}

function timeText(run, seconds, step, total) {
  if (run.status.state === "running" && seconds && total > step) return `${formatSeconds(seconds * (total - step))} left`;
  const parts = secondsOfProcesses(run);
  if (!parts.length) return "–";
  const text = formatSeconds(parts.reduce((sum, one) => sum + one, 0));
  return parts.length > 1 ? `${text} in ${parts.length} parts` : text;
}

// What is wrong, with its cause and what to change; the most serious first.

const LEVELS = { stopping: 0, degraded: 1, notice: 2, ok: 3 };
const LEVEL_WORDS = { stopping: "stops", degraded: "degraded", notice: "notice", ok: "over" };

export function findings(run) {
  const latest = new Map();
  for (const event of run.records.health ?? []) {
    const before = latest.get(event.check);
    // A problem that is over keeps its cause.
    if (event.level === "ok" && before) latest.set(event.check, { ...before, level: "ok", over: event });
    else latest.set(event.check, event);
  }
  const found = [...latest.values()];
  const { state, text } = run.status;
  if (state === "killed") found.push({ check: "killed", level: "stopping", word: "ended", cause: text, step: run.status.step });
  if (state === "failed") found.push({ check: "failed", level: "stopping", word: "ended", cause: text, step: run.status.step });
  if (state === "unreadable") found.push({ check: "unreadable", level: "stopping", word: "error", cause: text, step: run.status.step });
  if (state === "quiet") found.push({ check: "not heard of", level: "notice", cause: text, step: run.status.step });
  const skipped = new Set((run.records.batch_skipped ?? []).map((event) => event.step));
  const bad = (run.non_finite ?? []).filter((step) => !skipped.has(step));
  const known = found.some((one) => /nan|finite/i.test(one.check) && one.level !== "ok");
  if (bad.length && !known) found.push({ check: "loss not finite", level: "degraded", word: "error", cause: `The loss is NaN or infinite ${stepsText(bad)}.`, step: bad[0] });
  if (skipped.size) found.push({ check: "batches skipped", level: "notice", cause: `The loss or the gradient was NaN or infinite ${stepsText([...skipped])}. These batches did not change the weights.`, step: Math.max(...skipped) });
  if (run.damaged) found.push({ check: "damaged log", level: "notice", cause: `${run.damaged} lines of events.jsonl are not events and were skipped.`, step: 0 });
  return found.sort(bySeverity);
}

const stepsText = (steps) => `at step ${steps[0]}${steps.length > 1 ? ` and ${steps.length - 1} more` : ""}`;

function bySeverity(a, b) {
  return (LEVELS[a.level] ?? 2) - (LEVELS[b.level] ?? 2) || b.step - a.step;
}

export function drawHealth(place, store) {
  const runs = store.shown.filter((run) => run.status.state !== "planned");
  const several = runs.length > 1;
  const all = runs.flatMap((run) => findings(run).map((one) => ({ ...one, run })));
  const active = all.filter((one) => one.level !== "ok").sort(bySeverity);
  const over = all.filter((one) => one.level === "ok");
  place.hidden = !runs.length;
  replace(
    place,
    h("h2", { text: "Health" }),
    active.length ? h("ul", { class: "findings" }, active.map((one) => finding(one, several))) : h("p", { class: "quiet", text: runs.some((run) => run.records.health) ? "No problem is present." : "No problem was reported." }),
    over.length ? h("details", { class: "over" }, h("summary", {}, `${over.length} earlier ${over.length === 1 ? "problem is" : "problems are"} over`), h("ul", { class: "findings" }, over.map((one) => finding(one, several)))) : null,
  );
}

function finding(one, several) {
  return h(
    "li",
    { class: `finding ${one.level}` },
    h("div", { class: "finding-head" }, h("span", { class: "level", text: one.word ?? LEVEL_WORDS[one.level] ?? one.level }), h("strong", { text: String(one.check).replaceAll("_", " ") }), several ? h("span", { class: "where", text: one.run.name }) : null, one.step ? h("span", { class: "where", text: `step ${formatNumber(one.step)}` }) : null),
    h("p", { class: "cause", text: String(one.cause).replace(/[^.!?]$/, "$&.") }),
    one.action ? h("p", {}, h("b", {}, "Done: "), one.action) : null,
    one.advice ? h("p", {}, h("b", {}, "Change: "), one.advice) : null,
    one.over ? h("p", {}, h("b", {}, `Over since step ${formatNumber(one.over.step)}: `), one.over.cause) : null,
  );
}

// Requests to a running run.

export class Controls {
  constructor(store, source, changed) {
    this.store = store;
    this.source = source;
    this.changed = changed;
    this.sent = new Map();
    this.dialog = h("dialog", { class: "dialog", "aria-label": "Request" });
    document.body.append(this.dialog);
  }

  show(run, isShown) {
    if (isShown) this.store.hidden.delete(run.id);
    else this.store.hidden.add(run.id);
    this.changed();
  }

  buttons(run) {
    if (!this.source.canSend || !run.status.verbs?.length || run.status.state !== "running") return [];
    const texts = { validate: "Validate", save: "Save", stop: "Stop", log: "Logging" };
    const found = run.status.verbs.filter((verb) => texts[verb]).map((verb) => h("button", { type: "button", class: verb === "stop" ? "button danger" : "button", "data-verb": verb, onclick: () => this.ask(run, verb) }, texts[verb]));
    const note = this.noteOf(run);
    return note ? [...found, h("span", { class: "sent", role: "status", text: note })] : found;
  }

  noteOf(run) {
    const sent = this.sent.get(run.id);
    if (!sent) return "";
    const taken = (run.records.request_taken ?? []).find((event) => (sent.id ? event.id === sent.id : event.request === sent.verb && event.time >= sent.time - 1));
    if (taken) return taken.accepted === false ? `${sent.verb} refused: ${taken.reason}` : `${sent.verb} taken at step ${formatNumber(taken.step)}`;
    return sent.error ? sent.error : `${sent.verb} asked, waiting for the end of the step`;
  }

  ask(run, verb) {
    const prompts = h("textarea", { rows: "4", placeholder: "One prompt per line; empty: the prompts of the run file", "aria-label": "Prompts" });
    const every = h("input", { type: "number", min: "1", max: "100000", value: "1", "aria-label": "Log every N steps" });
    const texts = {
      validate: ["Validate now", "The run generates samples after its current step.", h("label", { class: "stack" }, "Prompts", prompts)],
      save: ["Save now", "The run saves a checkpoint after its current step."],
      stop: ["Stop", "The run finishes its step, saves a checkpoint and ends. The same command resumes it."],
      log: ["Change logging", "Write events more or less often, from the next step on.", h("label", { class: "stack" }, "Log every N steps", every)],
    };
    const [title, text, field] = texts[verb];
    const send = (event) => {
      event.preventDefault();
      this.dialog.close();
      const lines = prompts.value.split("\n").map((one) => one.trim()).filter(Boolean);
      const body = { request: verb };
      if (verb === "validate" && lines.length) body.prompts = lines;
      if (verb === "log") body.every = Number(every.value);
      this.send(run, body);
    };
    replace(
      this.dialog,
      h(
        "form",
        { method: "dialog", onsubmit: send },
        h("h2", { text: title }),
        h("p", { text: `${run.name}: ${text}` }),
        field,
        h("div", { class: "dialog-buttons" }, h("button", { type: "button", class: "button", onclick: () => this.dialog.close() }, "Cancel"), h("button", { type: "submit", class: verb === "stop" ? "button danger" : "button primary" }, title)),
      ),
    );
    this.dialog.showModal();
  }

  async send(run, body) {
    const sent = { verb: body.request, time: Date.now() / 1000 };
    this.sent.set(run.id, sent);
    this.changed();
    const answer = await this.source.send(run, body);
    sent.id = answer.id;
    sent.error = answer.error;
    announce(this.noteOf(run));
    this.changed();
  }
}

export function reportHead(store, made) {
  return h("p", { class: "quiet", text: `Report of ${store.all.length === 1 ? "one run" : `${store.all.length} runs`}, made ${formatTime(made)}.` });
}
