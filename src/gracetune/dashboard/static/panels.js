// The panels of the page: what each shows of a run's events, and what it says if there is nothing.

import { color, formatBytes, formatCount, formatNumber, formatPercent, formatSeconds, formatTime, h, withUnit } from "./basics.js";
import { average, columnsBelow, differences, lastOf, ratio, smooth, speeds, tableOf } from "./store.js";

export const SECTIONS = [
  ["samples", "Samples"],
  ["loss", "Loss"],
  ["learning", "Learning"],
  ["speed", "Speed"],
  ["memory", "Memory"],
  ["machine", "Machine"],
  ["data", "Data"],
  ["settings", "Run file"],
  ["log", "Log"],
];

const celsius = withUnit("°C");
const watt = withUnit("W");
const megahertz = withUnit("MHz");
const perSecond = (value) => `${formatNumber(value)}/s`;
const bytesPerSecond = (value) => `${formatBytes(value)}/s`;

// A line of a chart: a name, the table that has its steps, and its values.
const line = (name, table, values, more = {}) => ({ name, table, values, ...more });
const below = (run, kind, prefix, suffix = "") => {
  const table = tableOf(run, kind);
  return columnsBelow(table, prefix, suffix).map(([name, values]) => line(name, table, values));
};
const single = (run, kind, column, name) => {
  const table = tableOf(run, kind);
  const values = table?.columns[column];
  return values && lastOf(values) !== null ? [line(name, table, values)] : [];
};
const perGpu = (run, column, name) => {
  const table = tableOf(run, "device_sensors");
  return columnsBelow(table, "gpus", `/${column}`)
    .filter(([, values]) => lastOf(values) !== null)
    .map(([gpu, values], _, all) => line(all.length > 1 ? `${name} ${gpu}` : name, table, values));
};
const withSmoothed = (run, store, column) => {
  const table = tableOf(run, "step_done");
  if (!table?.columns[column]) return [];
  const raw = line("raw", table, table.columns[column], { faint: store.halfLife > 0, spanGaps: false });
  return store.halfLife > 0 ? [raw, line("smoothed", table, smooth(table, column, store.halfLife), { strong: true })] : [raw];
};
// The losses of parts, each row by its number of samples: the first row after a start has few.
const lossParts = (run, store, part) => {
  const table = tableOf(run, "loss_parts");
  return below(run, "loss_parts", part, "/loss").map((one) => {
    const counts = table.columns[`${part}/${one.name}/samples`] ?? one.values.map(() => 1);
    const sorted = counts.filter((count) => count > 0).sort((a, b) => a - b);
    const usual = sorted[sorted.length >> 1];
    return store.halfLife > 0 && usual ? { ...one, values: average(one.values, counts, usual / 2), spanGaps: true } : one;
  });
};
const bucketName = (name) => name.replace(/^t/, "t ").replace("-", " – ");

// Seconds of saving and sampling, spread over the steps that a row of `step_times` is about.
function spreadOver(table, events) {
  const steps = table.steps;
  const found = new Array(steps.length).fill(0);
  for (const event of events ?? []) {
    const row = steps.findIndex((step) => step >= event.step);
    if (row < 0) continue;
    const count = table.columns.steps?.[row] || steps[row] - (steps[row - 1] ?? 0) || 1;
    found[row] += event.seconds / count;
  }
  return found;
}

const PHASES = { compute: "compute", data: "waiting for data", weights: "waiting for weights", host: "waiting for the host", optimizer: "optimizer", other: "other" };

function stepPhases(run) {
  const table = tableOf(run, "step_times");
  if (!table) return [];
  const order = Object.keys(PHASES);
  const rank = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  const phases = columnsBelow(table, "seconds").sort(([a], [b]) => rank(a) - rank(b));
  const found = phases.map(([name, values]) => line(PHASES[name] ?? name, table, values));
  const saving = spreadOver(table, run.records.checkpoint_saved);
  const sampling = spreadOver(table, run.records.validated);
  if (saving.some((value) => value > 0)) found.push(line("saving", table, saving));
  if (sampling.some((value) => value > 0)) found.push(line("sampling", table, sampling));
  return found;
}

function roles(run, tier) {
  const table = tableOf(run, "memory_roles");
  const used = columnsBelow(table, `roles/${tier}`)
    .filter(([, values]) => values.some((value) => value > 0))
    .map(([name, values]) => line(name, table, values));
  const planned = columnsBelow(table, `planned/${tier}`);
  if (used.length && planned.length) {
    const sums = table.steps.map((_, row) => planned.reduce((sum, [, values]) => sum + (values[row] ?? 0), 0));
    used.push(line("plan, in all", table, sums, { dashed: true }));
  }
  return used;
}

function traffic(run) {
  const table = tableOf(run, "weights_streamed");
  if (!table?.columns.nbytes) return [];
  const moved = differences(table.columns.nbytes);
  const seconds = table.times.map((time, row) => (row ? time - table.times[row - 1] : 0));
  return [line("to the device", table, moved.map((value, row) => (seconds[row] > 0 && value !== null ? value / seconds[row] : null)))];
}

function hiddenShare(run) {
  const found = [];
  for (const [kind, name] of [["weights_streamed", "weights"], ["batches_fed", "batches"]]) {
    const table = tableOf(run, kind);
    if (!table?.columns.hidden_s) continue;
    const hidden = differences(table.columns.hidden_s);
    const waited = differences(table.columns.waited_s);
    const all = hidden.map((value, row) => (value === null ? null : value + (waited[row] ?? 0)));
    if (all.some((value) => value > 0)) found.push(line(name, table, ratio(hidden, all)));
  }
  return found;
}

function cacheShares(run) {
  const table = tableOf(run, "batches_fed");
  if (!table) return [];
  const parts = { "in memory": "hits", "from disk": "reads", "on the device": "hot" };
  const counts = Object.values(parts).map((column) => differences(table.columns[column] ?? []));
  const sums = table.steps.map((_, row) => counts.reduce((sum, values) => sum + (values[row] ?? 0), 0));
  if (!sums.some((value) => value > 0)) return [];
  return Object.keys(parts).map((name, index) => line(name, table, ratio(counts[index], sums)));
}

function loaderWaits(run) {
  const table = tableOf(run, "batches_fed");
  if (!table?.columns.waited_s) return [];
  const steps = table.steps.map((step, row) => step - (table.steps[row - 1] ?? 0));
  return [line("waiting for batches", table, ratio(differences(table.columns.waited_s), steps))];
}

function throughput(run, store) {
  const table = tableOf(run, "step_done");
  if (!table?.columns.seconds) return [];
  const found = [line("samples per second", table, speeds(table, Math.min(store.halfLife, 20)))];
  const planned = run.records.run_described?.at(-1)?.plan?.samples_per_second;
  if (planned) found.push(line("plan", table, table.steps.map(() => planned), { dashed: true }));
  return found;
}

function batchSizes(run, store) {
  const samples = single(run, "step_done", "samples", "samples per step").map((one) => (store.halfLife > 0 ? { ...one, values: smooth(one.table, "samples", store.halfLife) } : { ...one, stepped: true }));
  return [...samples, ...single(run, "step_done", "accumulation", "micro-batches per step").map((one) => ({ ...one, stepped: true }))];
}

function memoryTiers(run) {
  const table = tableOf(run, "memory_used");
  const names = { device: "device", device_peak: "device, highest", host: "host", managed: "managed" };
  return Object.entries(names)
    .filter(([column]) => table?.columns[column]?.some((value) => value > 0))
    .map(([column, name]) => line(name, table, table.columns[column], { dashed: column === "device_peak" }));
}

function unifiedCounters(run) {
  const table = tableOf(run, "unified_memory");
  if (!table) return [];
  const plain = { light_reclamations: "light reclamations", full_reclamations: "full reclamations", denied: "denied reservations", transitions: "changes of stage" };
  const found = Object.entries(plain).map(([column, name]) => line(name, table, table.columns[column] ?? [], { stepped: true }));
  for (const [name, values] of columnsBelow(table, "hints")) found.push(line(`hints ${name}`, table, values, { stepped: true }));
  for (const [name, values] of columnsBelow(table, "faults")) found.push(line(name.replaceAll("_", " "), table, values, { stepped: true }));
  return found.filter((one) => one.values.some((value) => value > 0));
}

function stage(run) {
  const table = tableOf(run, "unified_memory");
  // A run without a GPU logs the event too, with nothing but zeros in it.
  if (table && !["headroom", "current", "peak"].some((column) => table.columns[column]?.some((value) => value))) return [];
  return single(run, table ? "unified_memory" : "memory_used", "stage", "stage").map((one) => ({ ...one, stepped: true }));
}

const sensorsWhy = (sensor) => (run) => {
  const reason = Object.entries(run.latest.device_sensors?.unavailable ?? {}).find(([name]) => name.includes(sensor) || name === "gpus" || name === "gpu");
  return reason ? reason[1] : "The run has no GPU, or its sensors were not recorded.";
};

// Charts. `series` returns the lines of a run; `why` says in one line why there are none.
export const CHARTS = [
  { id: "loss", section: "loss", title: "Training loss", series: (run, store) => withSmoothed(run, store, "loss"), smoothing: true, log: true, why: () => "No step is done yet." },
  { id: "held-out", section: "loss", title: "Held-out loss", note: "Fixed samples, noise and timesteps: comparable between steps and runs.", series: (run) => below(run, "held_out_loss", "losses"), best: true, log: true, why: () => "Set validation.holdout above 0 to measure it at every validation." },
  { id: "held-out-timesteps", section: "loss", title: "Held-out loss by timestep", note: "t 0 is the clean sample.", series: (run) => below(run, "held_out_loss", "by_timestep", "/loss").map((one) => ({ ...one, name: bucketName(one.name) })), log: true, why: () => "This log has no held-out loss by timestep." },
  { id: "loss-timesteps", section: "loss", title: "Training loss by timestep", series: (run, store) => lossParts(run, store, "by_timestep").map((one) => ({ ...one, name: bucketName(one.name) })), log: true, why: () => "This log has no loss by timestep." },
  { id: "loss-datasets", section: "loss", title: "Training loss by dataset", series: (run, store) => { const lines = lossParts(run, store, "by_dataset"); return lines.length > 1 ? lines : []; }, log: true, why: (run) => (below(run, "loss_parts", "by_dataset", "/loss").length ? "The run has one dataset." : "This log has no loss by dataset.") },
  { id: "loss-outputs", section: "loss", title: "Audio and video loss", series: (run, store) => lossParts(run, store, "by_part"), log: true, why: () => "The model has one output." },
  { id: "loss-experts", section: "loss", title: "Training loss by expert", series: (run, store) => { const parts = lossParts(run, store, "by_expert"); return parts.length ? parts : below(run, "step_done", "loss").map((one) => ({ ...one, spanGaps: true })); }, log: true, why: () => "The model has one transformer." },

  { id: "rate", section: "learning", title: "Learning rate", series: (run) => { const experts = below(run, "step_done", "lr").map((one) => ({ ...one, spanGaps: true })); return experts.length ? experts : single(run, "step_done", "lr", "learning rate"); }, why: () => "No step is done yet." },
  { id: "gradient", section: "learning", title: "Gradient norm", note: "Before clipping.", series: (run, store) => withSmoothed(run, store, "grad_norm"), log: true, why: () => "No step is done yet." },
  { id: "moved-mean", section: "learning", title: "Weights moved, by block", note: "Change relative to the weights. 1 % means that the change has 1 % of their norm. An adapter that ends below 0.1 % has learned next to nothing; with more than 50 %, look at the samples: the learning rate may be too high. A model with random weights, such as tiny, moves further.", series: movedSummary, format: formatPercent, why: () => "This log does not say how far weights have moved." },
  { id: "batch", section: "learning", title: "Batch size and ramp", note: "Samples are averaged over steps: the last batch of a bucket may be smaller.", series: batchSizes, why: () => "No step is done yet.", fromZero: true },

  { id: "throughput", section: "speed", title: "Throughput", note: "Samples of the last steps by their time, without checkpoints and validations.", series: throughput, format: perSecond, fromZero: true, why: () => "No step is done yet." },
  { id: "phases", section: "speed", title: "Where each step went", note: "Time per step. Saving and sampling are spread over the steps before them.", series: stepPhases, format: formatSeconds, stacked: true, why: () => "This log has no times of the parts of a step." },
  { id: "waits", section: "speed", title: "Waiting for batches", note: "Time per step.", series: loaderWaits, format: formatSeconds, fromZero: true, why: () => "No statistics of loading yet." },
  { id: "traffic", section: "speed", title: "Link traffic", note: "Weights copied to the device.", series: traffic, format: bytesPerSecond, fromZero: true, why: () => "No weights are streamed." },
  { id: "hidden", section: "speed", title: "Copying hidden behind computation", series: hiddenShare, format: formatPercent, fromZero: true, why: () => "Nothing was copied while steps ran." },
  { id: "cache", section: "speed", title: "Cache hits", note: "Share of encoded samples and captions by where they were found.", series: cacheShares, format: formatPercent, stacked: true, why: () => "No statistics of loading yet." },

  { id: "memory", section: "memory", title: "Memory in use", series: memoryTiers, format: formatBytes, fromZero: true, why: () => "Memory is recorded every few steps; none is yet." },
  { id: "device-roles", section: "memory", title: "Device memory by role", series: (run) => roles(run, "device"), format: formatBytes, stacked: true, why: () => "The run has no device memory, or this log has no roles." },
  { id: "host-roles", section: "memory", title: "Host memory by role", series: (run) => roles(run, "host"), format: formatBytes, stacked: true, why: () => "This log has no roles of host memory." },
  { id: "stage", section: "memory", title: "Unified memory: stage", note: "1: all managed memory is on the device. 2: the device is oversubscribed.", series: stage, fromZero: true, why: () => "The run uses no managed memory." },
  { id: "managed", section: "memory", title: "Unified memory: managed bytes", series: (run) => [...single(run, "unified_memory", "current", "in use"), ...single(run, "unified_memory", "peak", "highest"), ...single(run, "unified_memory", "headroom", "headroom")].filter((one) => one.values.some((value) => value)), format: formatBytes, why: () => "The run uses no managed memory." },
  { id: "unified", section: "memory", title: "Unified memory: reclamations, hints, faults", note: "Counted from the start of the process.", series: unifiedCounters, format: formatCount, fromZero: true, why: (run) => run.latest.unified_memory?.faults_unavailable || "Nothing was reclaimed, and no hint was given." },

  { id: "temperature", section: "machine", title: "Temperature", series: (run) => perGpu(run, "temperature_c", "GPU"), format: celsius, why: sensorsWhy("temperature") },
  { id: "clock", section: "machine", title: "Clock", series: (run) => perGpu(run, "sm_clock_mhz", "GPU"), format: megahertz, fromZero: true, why: sensorsWhy("clock") },
  { id: "power", section: "machine", title: "Power", series: (run) => [...perGpu(run, "power_w", "GPU"), ...perGpu(run, "power_limit_w", "limit").map((one) => ({ ...one, dashed: true }))], format: watt, fromZero: true, why: sensorsWhy("power") },
  { id: "utilization", section: "machine", title: "GPU utilization", series: (run) => perGpu(run, "utilization", "GPU"), format: formatPercent, fromZero: true, why: sensorsWhy("utilization") },
  { id: "host", section: "machine", title: "Host memory available", series: (run) => [...single(run, "device_sensors", "host/memory_available", "available"), ...single(run, "device_sensors", "host/swap_used", "swap in use")], format: formatBytes, fromZero: true, why: () => "This log has no sensors of the host." },
  { id: "pressure", section: "machine", title: "Pressure on the host", note: "Percent of time in which some process waited.", series: (run) => ["memory", "io", "cpu"].flatMap((name) => single(run, "device_sensors", `host/pressure_${name}`, name)), format: withUnit("%", 1), fromZero: true, why: () => "The kernel does not report pressure." },
  { id: "refaults", section: "machine", title: "Page-cache misses", note: "Pages read again because the page cache had dropped them.", series: (run) => single(run, "device_sensors", "host/refaults_per_s", "pages per second"), format: perSecond, fromZero: true, why: () => "The kernel does not report them." },
  { id: "disk", section: "machine", title: "Free disk space", series: (run) => [...single(run, "device_sensors", "host/output_free", "output"), ...single(run, "device_sensors", "host/cache_free", "cache")], format: formatBytes, fromZero: true, why: () => "This log has no disk space." },
];

function movedSummary(run) {
  const table = tableOf(run, "weights_moved");
  const blocks = columnsBelow(table, "blocks");
  if (!blocks.length) return [];
  const over = (reduce) => table.steps.map((_, row) => reduce(blocks.map(([, values]) => values[row]).filter((value) => value !== null)));
  const mean = over((values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null));
  if (blocks.length === 1) return [line("all", table, mean)];
  return [line("most", table, over((values) => (values.length ? Math.max(...values) : null))), line("mean", table, mean, { strong: true }), line("least", table, over((values) => (values.length ? Math.min(...values) : null)))];
}

// Heat maps: the rows of one run.
export const HEAT_MAPS = [
  { id: "moved", section: "learning", title: "How far each block has moved", format: formatPercent, rows: (run) => { const table = tableOf(run, "weights_moved"); return [table?.steps ?? [], columnsBelow(table, "blocks")]; }, why: () => "This log does not say how far weights have moved." },
  { id: "block-gradients", section: "learning", title: "Gradient norm of each block", rows: (run) => { const table = tableOf(run, "weights_moved"); return [table?.steps ?? [], columnsBelow(table, "grad_norms")]; }, why: () => "This log has no gradient norms of blocks." },
  { id: "block-weights", section: "learning", title: "Weight norm of each block", rows: (run) => { const table = tableOf(run, "weights_moved"); return [table?.steps ?? [], columnsBelow(table, "weight_norms")]; }, why: () => "This log has no weight norms of blocks." },
  { id: "rates", section: "learning", title: "Learning rates of Automagic", format: formatCount, rows: rateRows, why: () => "The optimizer has one learning rate for all weights." },
];

function rateRows(run) {
  const events = run.records.rates_spread ?? [];
  const newest = events.at(-1);
  if (!newest) return [[], []];
  const same = events.filter((event) => event.expert === newest.expert && event.limits.length === newest.limits.length);
  const rows = newest.counts.map((_, bin) => [`${newest.limits[bin].toExponential(0)} – ${newest.limits[bin + 1].toExponential(0)}`, same.map((event) => event.counts[bin] ?? 0)]);
  return [same.map((event) => event.step), rows.reverse()];
}

// Tables and texts of a run. Each returns elements, or a line that says why there is nothing.

export function machineFacts(run) {
  const described = run.records.run_described?.at(-1);
  const started = run.records.run_started?.at(-1);
  if (!described && !started) return "The run has not described its machine yet.";
  const facts = [];
  const machine = described?.machine ?? {};
  for (const gpu of machine.gpus ?? []) facts.push(["GPU", `${gpu.name}, ${formatBytes(gpu.memory)}`]);
  if (described && !machine.gpus?.length) facts.push(["GPU", "none"]);
  for (const [name, value] of Object.entries(machine)) {
    if (name === "gpus") continue;
    facts.push([name, name === "memory" ? formatBytes(value) : String(value)]);
  }
  if (started) facts.push(["device", `${started.device}, ${started.precision}`], ["model", `${started.model}, ${formatCount(started.trainable_parameters)} trained weights`]);
  for (const [name, version] of Object.entries(described?.versions ?? {})) facts.push([name, version]);
  return definitionList(facts);
}

export function definitionList(facts) {
  return h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]));
}

export function simpleTable(head, rows, label) {
  return h(
    "div",
    { class: "table-scroll" },
    h(
      "table",
      { class: "plain", "aria-label": label },
      h("thead", {}, h("tr", {}, head.map((name, index) => h("th", { scope: "col", class: index ? "number" : "", text: name })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, index) => h(index ? "td" : "th", { scope: index ? null : "row", class: index && typeof cell !== "string" ? "number" : index ? "number" : "" }, cell))))),
    ),
  );
}

export function dataReport(run) {
  const data = run.records.run_described?.at(-1)?.data;
  if (!data) {
    const texts = (run.records.notice ?? []).filter((notice) => /^dataset '|^data: /.test(notice.text));
    return texts.length ? texts.map((notice) => h("pre", { class: "text", text: notice.text })) : "The data are not described yet.";
  }
  const found = [];
  if (data.datasets?.length) {
    found.push(simpleTable(["dataset", "samples", "held out", "repeats", "share"], data.datasets.map((one) => [`${one.id} (${one.type})`, formatCount(one.samples), formatCount(one.held_out), formatNumber(one.repeats), formatPercent(one.share)]), "Datasets"));
  }
  if (data.buckets?.length) {
    const most = Math.max(...data.buckets.map((one) => one.samples));
    found.push(simpleTable(["bucket", "samples", "batches", ""], data.buckets.map((one) => [String(one.size), formatCount(one.samples), formatCount(one.batches), h("span", { class: "meter", "aria-hidden": "true", style: { width: `${Math.round((80 * one.samples) / most)}px` } })]), "Buckets"));
  }
  const captions = data.captions;
  if (captions) found.push(definitionList([["captions", `${formatCount(captions.unique)} different, ${formatCount(captions.empty)} empty`], ["words", `${formatNumber(captions.words_min)} to ${formatNumber(captions.words_max)}, ${formatNumber(captions.words_mean)} on average`]]));
  const corrupt = data.corrupt ?? [];
  found.push(corrupt.length ? h("details", { class: "warn", open: true }, h("summary", {}, `${corrupt.length} unreadable files`), h("ul", { class: "list" }, corrupt.map((one) => h("li", { text: `${one.file}: ${one.reason}` })))) : h("p", { class: "quiet", text: "All files could be read." }));
  return found;
}

export function planAgainstMeasured(run) {
  const table = tableOf(run, "memory_roles");
  const plan = run.records.run_described?.at(-1)?.plan;
  if (!plan) return run.records.run_described ? "The run has no plan: the whole model is on the device." : "This log has no plan.";
  const rows = [];
  for (const tier of ["device", "host"]) {
    const planned = plan[tier] ?? {};
    const names = new Set([...Object.keys(planned), ...columnsBelow(table, `roles/${tier}`).map(([name]) => name)]);
    names.delete("total");
    for (const name of names) {
      const used = lastOf(table?.columns[`roles/${tier}/${name}`]);
      if (!planned[name] && !used) continue;
      rows.push([`${tier}: ${name}`, formatBytes(planned[name] ?? null), formatBytes(used)]);
    }
  }
  const steps = tableOf(run, "step_done");
  const planned = typeof plan.seconds === "number" ? plan.seconds : plan.seconds?.step;
  if (planned) rows.push(["time per step", formatSeconds(planned), formatSeconds(lastOf(smooth(steps ?? { columns: {} }, "seconds", 20)))]);
  return simpleTable(["", "plan", "measured"], rows, "Plan against measured");
}

// The log: notices and all other events that are not numbers, newest first.
export function logEntries(run) {
  const found = [];
  const add = (event, level, text) => found.push({ time: event.time, level, text, run: run.name });
  const kinds = run.records;
  for (const event of kinds.notice ?? []) add(event, event.fallback ? "fallback" : event.level, event.text);
  for (const event of kinds.run_started ?? []) add(event, "info", event.start_step ? `The run is resumed after step ${event.start_step}.` : `The run starts: ${event.total_steps} steps, ${event.num_samples} samples.`);
  for (const event of kinds.checkpoint_saved ?? []) add(event, "info", `Checkpoint of step ${event.step} (${event.reason}): ${formatBytes(event.nbytes)} in ${formatSeconds(event.seconds)}.`);
  for (const event of kinds.validated ?? []) add(event, "info", `Validation at step ${event.step} in ${formatSeconds(event.seconds)}.`);
  for (const event of kinds.ramp_changed ?? []) add(event, "info", `${event.accumulation} micro-batches per step from step ${event.step} on.`);
  for (const event of kinds.request_taken ?? []) add(event, event.accepted ? "info" : "warning", `Request to ${event.request} ${event.accepted ? "taken" : "refused"} at step ${event.step}. ${event.reason ?? ""}`.trim());
  for (const event of kinds.batch_skipped ?? []) add(event, "warning", `Step ${event.step} was skipped: loss ${event.loss}, gradient norm ${event.grad_norm}. ${(event.samples ?? []).join(", ")}`);
  for (const event of kinds.stage_changed ?? []) add(event, event.stage > 1 ? "warning" : "info", `Memory stage ${event.stage} after step ${event.step}: ${formatBytes(event.device_free)} of ${formatBytes(event.device_total)} free.`);
  for (const event of kinds.memory_reclaimed ?? []) add(event, "info", `Memory (${event.kind}) after step ${event.step}: ${formatBytes(event.nbytes)}. ${event.reason}`);
  for (const event of kinds.managed_overflow ?? []) add(event, "warning", `${event.role}: ${formatBytes(event.nbytes)} moved to managed memory (${event.placement}). ${event.reason}`);
  for (const event of kinds.health ?? []) add(event, event.level === "ok" ? "info" : "warning", `${event.check}: ${[event.cause, event.action, event.advice].filter(Boolean).join(" ")}`);
  for (const event of kinds.run_ended ?? []) add(event, event.status === "failed" ? "warning" : "info", `The run ended at step ${event.step}: ${event.status}. ${event.message ?? ""}`.trim());
  return found.sort((a, b) => b.time - a.time);
}

// Settings as dotted names.
export function flatSettings(value, path = "", found = new Map()) {
  if (value !== null && typeof value === "object") {
    const items = Array.isArray(value) ? value.map((item, index) => [`${path}[${index}]`, item]) : Object.entries(value).map(([name, item]) => [path ? `${path}.${name}` : name, item]);
    if (!items.length) found.set(path, Array.isArray(value) ? "[]" : "{}");
    for (const [name, item] of items) flatSettings(item, name, found);
  } else found.set(path, value === null ? "null" : String(value));
  return found;
}

export const formatLogTime = formatTime;
export const runColor = (store, run) => color(store.indexOf(run));
