// The runs as the page knows them: a snapshot of each, kept up to date by small changes.

export class Store {
  constructor() {
    this.runs = new Map();
    this.hidden = new Set();
    this.zoom = null;
    this.axis = "step";
    this.halfLife = 20;
    this.listeners = [];
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  changed(what) {
    for (const listener of this.listeners) listener(what);
  }

  get all() {
    return [...this.runs.values()];
  }

  get shown() {
    const found = this.all.filter((run) => !this.hidden.has(run.id));
    return found.length ? found : this.all.slice(0, 1);
  }

  indexOf(run) {
    return [...this.runs.keys()].indexOf(run.id);
  }

  put(run) {
    this.runs.set(run.id, run);
  }

  // Apply a change; return false if it does not follow the snapshot, which must be fetched again.
  apply(delta) {
    const run = this.runs.get(delta.id);
    if (!run) return false;
    setHead(run, delta);
    if (delta.version <= run.version) return true;
    if (delta.reload || delta.version !== run.version + 1) return false;
    run.version = delta.version;
    for (const [kind, rows] of Object.entries(delta.tables ?? {})) appendRows(run, kind, rows);
    for (const [kind, event] of Object.entries(delta.latest ?? {})) if (event) run.latest[kind] = event;
    for (const [kind, events] of Object.entries(delta.records ?? {})) {
      run.records[kind] = (run.records[kind] ?? []).concat(events);
    }
    if (delta.samples) run.samples = delta.samples;
    return true;
  }
}

export function setHead(run, head) {
  run.status = head.status;
  run.reading = head.reading;
  run.last_time = head.last_time;
}

function appendRows(run, kind, rows) {
  const table = (run.tables[kind] ??= { steps: [], times: [], columns: {}, total: 0 });
  const before = table.steps.length;
  const count = rows.steps.length;
  table.steps.push(...rows.steps);
  table.times.push(...rows.times);
  for (const [name, values] of Object.entries(rows.columns)) {
    const column = (table.columns[name] ??= new Array(before).fill(null));
    column.push(...values);
  }
  for (const column of Object.values(table.columns)) while (column.length < before + count) column.push(null);
  if (table.weights) {
    for (let row = 0; row < count; row += 1) table.weights.push(1);
    for (const [name, values] of Object.entries(table.means ?? {})) values.push(...(rows.columns[name] ?? new Array(count).fill(null)));
  }
  table.total = (table.total ?? before) + count;
}

export function tableOf(run, kind) {
  const table = run.tables[kind];
  return table && table.steps.length ? table : null;
}

export function lastOf(values) {
  for (let row = (values?.length ?? 0) - 1; row >= 0; row -= 1) {
    if (values[row] !== null && values[row] !== undefined) return values[row];
  }
  return null;
}

export function startTime(run) {
  const first = run.records.run_started?.[0]?.time;
  return first ?? tableOf(run, "step_done")?.times[0] ?? run.last_time ?? 0;
}

// The columns below a path: `columnsBelow(table, "seconds")` -> [["compute", values], ...].
export function columnsBelow(table, prefix, suffix = "") {
  if (!table) return [];
  const found = [];
  for (const [name, values] of Object.entries(table.columns)) {
    if (name.startsWith(`${prefix}/`) && name.endsWith(suffix)) {
      found.push([name.slice(prefix.length + 1, name.length - suffix.length), values]);
    }
  }
  return found.sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
}

// An exponential average whose weight halves after `halfLife` logged steps, to both sides: a falling
// curve is not above its values. Rows that stand for several steps count with their mean and their
// number.
export function smooth(table, name, halfLife) {
  const values = table.columns[name];
  if (!values || halfLife <= 0) return values ?? null;
  return average(table.means?.[name] ?? values, values.map((_, row) => table.weights?.[row] ?? 1), halfLife);
}

// The average of values around each row, by their counts.
export function average(values, counts, halfLife) {
  const decay = 0.5 ** (1 / halfLife);
  const sums = values.map(() => [0, 0]);
  const isKnown = (row) => values[row] !== null && values[row] !== undefined && counts[row] > 0;
  const sweep = (rows, withOwn) => {
    let sum = 0;
    let weight = 0;
    for (const row of rows) {
      if (isKnown(row)) {
        const kept = decay ** counts[row];
        const before = [sum, weight];
        sum = sum * kept + values[row] * (1 - kept);
        weight = weight * kept + (1 - kept);
        if (withOwn) sums[row] = [sum, weight];
        else sums[row] = [sums[row][0] + before[0] * kept, sums[row][1] + before[1] * kept];
      } else sums[row] = [sums[row][0] + sum, sums[row][1] + weight];
    }
  };
  const rows = [...values.keys()];
  sweep(rows, true);
  sweep(rows.reverse(), false);
  return sums.map(([sum, weight]) => (weight ? sum / weight : null));
}

// Samples per second: those of the steps around each row, by their time.
export function speeds(table, halfLife) {
  const { samples, seconds } = table.columns;
  if (!samples || !seconds) return [];
  return ratio(smooth(table, "samples", halfLife), smooth(table, "seconds", halfLife));
}

// Seconds that all processes of a run have taken; those of a killed one end with its last step.
export function secondsOfProcesses(run) {
  const starts = (run.records.run_started ?? []).map((event) => event.time);
  const times = tableOf(run, "step_done")?.times ?? [];
  return starts.map((start, index) => {
    const next = starts[index + 1] ?? Infinity;
    const end = (run.records.run_ended ?? []).find((event) => event.time >= start && event.time < next);
    if (end) return end.seconds;
    const last = Math.max(start, ...times.filter((time) => time >= start && time < next));
    return (next === Infinity ? Math.max(last, run.last_time ?? 0) : last) - start;
  });
}

// Changes of a counter from row to row. A counter starts at 0 again when a run is resumed.
export function differences(values) {
  return values.map((value, row) => {
    if (value === null || value === undefined) return null;
    const before = row > 0 ? values[row - 1] : 0;
    return before === null || before === undefined ? null : value >= before ? value - before : value;
  });
}

export function ratio(above, below) {
  return above.map((value, row) => (value === null || !below[row] ? null : value / below[row]));
}
