// Draw lines, stacked areas and heat maps. Every chart has a text for screen readers, can be reached
// with Tab, and moves its cursor with the left and right arrow keys.

import { announce, color, cssColor, formatBytes, formatNumber, h, heat, replace } from "./basics.js";

const HEIGHT = 188;
const SYNC = "steps";
// Distances of ticks for bytes, so that labels are round in binary units.
const BINARY = Array.from({ length: 50 }, (_, power) => 2 ** power);

// A chart of lines: `update(lines, {zoom, marks})` with lines of {key, label, x, y, color, ...}.
export class LineChart {
  constructor(options) {
    this.format = options.format ?? formatNumber;
    this.stacked = options.stacked ?? false;
    this.fromZero = options.fromZero ?? false;
    this.height = options.height ?? HEIGHT;
    this.onZoom = options.onZoom;
    this.label = options.label;
    this.log = false;
    this.off = new Set();
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.moveCursor(event) });
    this.element = h("div", { class: "chart" }, this.legend, this.plot);
    this.signature = "";
    this.marks = [];
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  update(lines, { zoom = null, marks = [], xLabel = "step", formatX = formatNumber } = {}) {
    this.lines = lines;
    this.marks = marks;
    this.zoom = zoom;
    this.xLabel = xLabel;
    this.formatX = formatX;
    this.drawLegend();
    const visible = lines.filter((line) => !this.off.has(line.key));
    const drawn = this.stacked ? stack(visible) : visible;
    const signature = JSON.stringify([this.log, xLabel, drawn.map((line) => [line.key, line.color, line.width, line.dash])]);
    const data = join(drawn);
    this.visible = visible;
    this.drawn = drawn;
    if (signature !== this.signature || !this.chart) {
      this.signature = signature;
      this.create(drawn, data);
    } else {
      this.chart.setData(data, false);
      this.setRange();
    }
    this.describe();
  }

  create(drawn, data) {
    this.chart?.destroy();
    const grid = { stroke: cssColor("--grid"), width: 1 };
    const axis = { stroke: cssColor("--muted"), font: "11px system-ui, sans-serif", grid, ticks: { ...grid, size: 4 } };
    const options = {
      width: Math.max(this.plot.clientWidth, 120),
      height: this.height,
      padding: [8, 20, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: SYNC, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => () => this.onZoom?.(null) },
      },
      scales: { x: { time: false, auto: false, range: () => this.range() }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.rangeY(low, high) } },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((tick) => this.formatX(tick)) },
        { ...axis, size: 64, incrs: this.format === formatBytes ? BINARY : undefined, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.format(tick))) },
      ],
      series: [
        {},
        ...drawn.map((line) => ({
          label: line.label,
          stroke: line.color,
          width: line.width ?? 1.6,
          dash: line.dash,
          alpha: line.alpha ?? 1,
          fill: this.stacked && !line.dash ? fillOf(line.color) : undefined,
          points: { show: line.points ?? (line.x.length < 40), size: 4, fill: line.color },
          paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          spanGaps: line.spanGaps ?? false,
        })),
      ],
      hooks: {
        draw: [(chart) => this.drawMarks(chart)],
        setCursor: [() => this.showValues()],
        setSelect: [(chart) => this.select(chart)],
      },
    };
    replace(this.plot);
    this.chart = new uPlot(options, data, this.plot);
  }

  range() {
    if (this.zoom) return this.zoom;
    let low = Infinity;
    let high = -Infinity;
    for (const line of this.visible ?? this.lines) {
      if (!line.x.length) continue;
      low = Math.min(low, line.x[0]);
      high = Math.max(high, line.x[line.x.length - 1]);
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  rangeY(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.log) return low > 0 ? [low / 1.1, high * 1.1] : [1e-6, Math.max(high, 1)];
    if (this.stacked || this.fromZero) low = Math.min(low, 0);
    const margin = (high - low || Math.abs(high) || 1) * 0.06;
    return [low === 0 ? 0 : low - margin, high + margin];
  }

  setRange() {
    const [min, max] = this.range();
    this.chart.setScale("x", { min, max });
  }

  resize() {
    if (this.chart && this.plot.clientWidth > 0 && this.chart.width !== this.plot.clientWidth) {
      this.chart.setSize({ width: this.plot.clientWidth, height: this.height });
    }
  }

  select(chart) {
    const { left, width } = chart.select;
    if (width > 8) this.onZoom?.([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  drawMarks(chart) {
    const { ctx } = chart;
    ctx.save();
    ctx.strokeStyle = cssColor("--mark");
    ctx.fillStyle = cssColor("--muted");
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { x, text } of this.marks) {
      const left = Math.round(chart.valToPos(x, "x", true));
      if (left < chart.bbox.left || left > chart.bbox.left + chart.bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(left, chart.bbox.top);
      ctx.lineTo(left, chart.bbox.top + chart.bbox.height);
      ctx.stroke();
      const place = [text, left + 3 * devicePixelRatio, chart.bbox.top + 10 * devicePixelRatio];
      ctx.save(); // the text is readable where it crosses a line
      ctx.setLineDash([]);
      ctx.lineWidth = 3 * devicePixelRatio;
      ctx.strokeStyle = cssColor("--surface");
      ctx.strokeText(...place);
      ctx.restore();
      ctx.fillText(...place);
    }
    ctx.restore();
  }

  drawLegend() {
    if (this.lines.length < 2 && !this.lines[0]?.named) {
      replace(this.legend);
      this.values = this.lines.map(() => h("span", { class: "value" }));
      if (this.lines.length) replace(this.legend, h("span", { class: "key" }, h("span", { class: "name", text: this.lines[0].label }), this.values[0]));
      this.legendKeys = "";
      this.showValues();
      return;
    }
    const keys = this.lines.map((line) => `${line.key} ${line.color}`).join("|");
    if (keys !== this.legendKeys) {
      this.legendKeys = keys;
      this.values = this.lines.map(() => h("span", { class: "value" }));
      replace(
        this.legend,
        this.lines.map((line, index) =>
          h(
            "button",
            { class: "key", type: "button", "aria-pressed": String(!this.off.has(line.key)), title: line.label, onclick: (event) => this.toggle(line.key, event) },
            h("span", { class: line.dash ? "swatch dashed" : "swatch", style: { "--colour": line.color, color: line.color, opacity: String(line.alpha ?? 1) } }),
            h("span", { class: "name", text: line.label }),
            this.values[index],
          ),
        ),
      );
    }
    this.showValues();
  }

  toggle(key, event) {
    if (this.off.has(key)) this.off.delete(key);
    else if (this.off.size < this.lines.length - 1) this.off.add(key);
    event.currentTarget.setAttribute("aria-pressed", String(!this.off.has(key)));
    this.update(this.lines, this);
  }

  // The value of a line at an x, or its last one.
  valueAt(line, x) {
    if (x === null) {
      for (let row = line.y.length - 1; row >= 0; row -= 1) if (line.y[row] !== null && line.y[row] !== undefined) return line.y[row];
      return null;
    }
    let low = 0;
    let high = line.x.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.x[middle] <= x) low = middle + 1;
      else high = middle;
    }
    for (let row = low - 1; row >= 0; row -= 1) if (line.y[row] !== null && line.y[row] !== undefined) return line.y[row];
    return null;
  }

  cursorX() {
    const index = this.chart?.cursor.idx;
    return index === null || index === undefined ? null : (this.chart.data[0][index] ?? null);
  }

  showValues() {
    const x = this.cursorX();
    this.lines.forEach((line, index) => {
      const place = this.values?.[index];
      if (!place) return;
      const value = this.valueAt(line, x);
      place.textContent = value === null ? "" : (line.format ?? this.format)(value);
    });
  }

  describe() {
    const parts = this.lines.slice(0, 12).map((line) => `${line.label} ${(line.format ?? this.format)(this.valueAt(line, null))}`);
    const [low, high] = this.range();
    const text = `${this.label}. ${this.xLabel} ${this.formatX(low)} to ${this.formatX(high)}. Latest: ${parts.join(", ")}.`;
    this.plot.setAttribute("aria-label", text);
  }

  moveCursor(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !this.chart) return;
    event.preventDefault();
    event.stopPropagation();
    const xs = this.chart.data[0];
    const now = this.chart.cursor.idx ?? xs.length - 1;
    const index = Math.min(Math.max(now + (Number.isFinite(step) ? step : Math.sign(step) * xs.length), 0), xs.length - 1);
    this.chart.setCursor({ left: this.chart.valToPos(xs[index], "x"), top: 10 });
    const values = this.lines.map((line) => `${line.label} ${(line.format ?? this.format)(this.valueAt(line, xs[index]))}`);
    announce(`${this.xLabel} ${this.formatX(xs[index])}: ${values.join(", ")}`);
  }
}

// A lighter or darker version of a colour. Areas cover each other, so that it is opaque.
function fillOf(hex) {
  const parts = (text) => [1, 3, 5].map((start) => Number.parseInt(text.slice(start, start + 2), 16));
  const base = parts(cssColor("--surface"));
  return `rgb(${parts(hex).map((value, index) => Math.round(0.62 * value + 0.38 * base[index])).join(" ")})`;
}

// Stack lines with the same x on each other; the topmost comes first, so that others cover it.
function stack(lines) {
  const solid = lines.filter((line) => !line.dash);
  const loose = lines.filter((line) => line.dash);
  let below = null;
  const stacked = solid.map((line) => {
    const y = line.y.map((value, row) => (value ?? 0) + (below ? below[row] : 0));
    below = y;
    return { ...line, y, width: 1, points: false };
  });
  return [...stacked.reverse(), ...loose];
}

function join(lines) {
  if (!lines.length) return [[0, 1]];
  const groups = new Map();
  for (const line of lines) {
    if (!groups.has(line.x)) groups.set(line.x, []);
    groups.get(line.x).push(line);
  }
  if (groups.size === 1) return [lines[0].x, ...lines.map((line) => line.y)];
  const order = [...groups.values()].flat();
  const joined = uPlot.join([...groups].map(([x, group]) => [x, ...group.map((line) => line.y)]));
  return [joined[0], ...lines.map((line) => joined[1 + order.indexOf(line)])];
}

// A heat map: one row per name, one column per step.
export class HeatMap {
  constructor(options) {
    this.format = options.format ?? formatNumber;
    this.label = options.label;
    this.canvas = h("canvas", { class: "heat", tabindex: "0", role: "img", onpointermove: (event) => this.point(event), onpointerleave: () => this.rest(), onkeydown: (event) => this.moveCursor(event) });
    this.names = h("div", { class: "heat-names", "aria-hidden": "true" });
    this.axis = h("div", { class: "heat-axis", "aria-hidden": "true" });
    this.readout = h("div", { class: "readout" });
    this.scale = h("canvas", { class: "heat-scale", width: 96, height: 8, "aria-hidden": "true" });
    this.scaleText = h("span", {});
    this.element = h(
      "div",
      { class: "chart" },
      h("div", { class: "heat-head" }, this.readout, h("div", { class: "heat-legend" }, "0", this.scale, this.scaleText)),
      h("div", { class: "heat-body" }, this.names, h("div", { class: "heat-canvas" }, this.canvas, this.axis)),
    );
    this.cursor = null;
  }

  // rows: [[name, values], ...], one value per step.
  update(allSteps, allRows) {
    // Some rows of a table have no values for this map.
    const isKept = allSteps.map((_, column) => allRows.some(([, values]) => values[column] !== null && values[column] !== undefined));
    const steps = allSteps.filter((_, column) => isKept[column]);
    const rows = allRows.map(([name, values]) => [name, values.filter((_, column) => isKept[column])]);
    this.steps = steps;
    this.rows = rows;
    const rowHeight = Math.min(16, Math.max(3, Math.floor(300 / rows.length)));
    this.largest = 0;
    for (const [, values] of rows) for (const value of values) if (value > this.largest) this.largest = value;
    const width = Math.max(steps.length, 1);
    this.canvas.width = width;
    this.canvas.height = rows.length;
    this.canvas.style.height = `${rowHeight * rows.length}px`;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(width, rows.length);
    rows.forEach(([, values], y) => {
      for (let x = 0; x < width; x += 1) {
        const [red, green, blue] = heat(this.largest ? (values[x] ?? 0) / this.largest : 0);
        image.data.set([red, green, blue, 255], 4 * (y * width + x));
      }
    });
    context.putImageData(image, 0, 0);
    const every = Math.max(1, Math.ceil(13 / rowHeight));
    replace(this.names, rows.map(([name], y) => h("span", { style: { height: `${rowHeight}px`, lineHeight: `${rowHeight}px` }, text: y % every === 0 ? shorten(name) : "", title: name })));
    replace(this.axis, h("span", { text: formatNumber(steps[0]) }), h("span", { text: `step ${formatNumber(steps[steps.length - 1])}` }));
    this.scaleText.textContent = this.format(this.largest);
    const strip = this.scale.getContext("2d");
    for (let x = 0; x < 96; x += 1) {
      strip.fillStyle = `rgb(${heat(x / 95).join(",")})`;
      strip.fillRect(x, 0, 1, 8);
    }
    this.rest();
    const last = rows.map(([name, values]) => [name, values[values.length - 1] ?? 0]).sort((a, b) => b[1] - a[1]);
    const ends = last.length ? `Most: ${last[0][0]} ${this.format(last[0][1])}. Least: ${last[last.length - 1][0]} ${this.format(last[last.length - 1][1])}.` : "";
    this.canvas.setAttribute("aria-label", `${this.label}. ${rows.length} rows, steps ${steps[0]} to ${steps[steps.length - 1]}. ${ends}`);
    this.summary = ends;
    this.rest();
  }

  rest() {
    this.readout.textContent = this.summary ?? "";
  }

  show(x, y) {
    const row = this.rows[y];
    if (!row || x < 0 || x >= this.steps.length) return "";
    const text = `${row[0]}, step ${formatNumber(this.steps[x])}: ${this.format(row[1][x])}`;
    this.readout.textContent = text;
    return text;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.steps.length);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.rows.length);
    this.show(x, y);
  }

  moveCursor(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const [x, y] = this.cursor ?? [this.steps.length - 1, 0];
    this.cursor = [Math.min(Math.max(x + move[0], 0), this.steps.length - 1), Math.min(Math.max(y + move[1], 0), this.rows.length - 1)];
    announce(this.show(...this.cursor));
  }
}

function shorten(name) {
  return name.length > 26 ? `…${name.slice(-25)}` : name;
}

// A horizontal bar of parts, with the parts' names below.
export function partsBar(parts, format, total = 0) {
  const sum = Math.max(total, parts.reduce((so_far, part) => so_far + part.value, 0)) || 1;
  const known = parts.filter((part) => part.value > 0);
  const text = known.map((part) => `${part.name} ${format(part.value)}`).join(", ");
  return h(
    "div",
    { class: "parts" },
    h(
      "div",
      { class: "bar", role: "img", "aria-label": text },
      known.map((part) => h("span", { style: { width: `${(100 * part.value) / sum}%`, background: color(part.color) }, title: `${part.name} ${format(part.value)}` })),
    ),
    h("div", { class: "legend" }, known.map((part) => h("span", { class: "key" }, h("span", { class: "swatch", style: { color: color(part.color) } }), part.name, h("span", { class: "value", text: format(part.value) })))),
  );
}
