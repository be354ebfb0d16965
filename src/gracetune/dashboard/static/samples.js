// Samples by step and prompt: a grid, a large view of each run, and a second step to compare with.
// Left and right choose the prompt, up and down the step, from anywhere outside text fields.

import { announce, formatNumber, formatTime, h, replace } from "./basics.js";

const MAX_COLUMNS = 200;
const MAX_LARGE = 4;

export class SamplesPanel {
  constructor(store, source) {
    this.store = store;
    this.source = source;
    this.prompt = 0;
    this.step = null;
    this.pinned = null;
    this.follow = true;
    this.viewer = h("div", { class: "viewer" });
    this.grid = h("div", { class: "grid-scroll" });
    this.slider = h("input", { type: "range", min: "0", step: "1", "aria-label": "Step", oninput: () => this.chooseStep(Number(this.slider.value)) });
    this.stepText = h("output", { class: "step-text" });
    this.promptSelect = h("select", { "aria-label": "Prompt", onchange: () => this.choosePrompt(Number(this.promptSelect.value)) });
    this.pin = h("button", { type: "button", class: "button", onclick: () => this.togglePin() }, "Compare");
    this.element = h(
      "div",
      { class: "samples" },
      h(
        "div",
        { class: "samples-bar" },
        h("label", { class: "field grow" }, h("span", { text: "Prompt" }), this.promptSelect),
        h("label", { class: "field grow" }, h("span", { text: "Step" }), this.slider),
        this.stepText,
        this.pin,
      ),
      h("div", { class: "samples-body" }, this.viewer, this.grid),
      h("p", { class: "hint" }, "Arrow keys: ", h("kbd", {}, "←"), h("kbd", {}, "→"), " prompt, ", h("kbd", {}, "↑"), h("kbd", {}, "↓"), " step. ", h("kbd", {}, "C"), " keeps this step beside the others."),
    );
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  get runs() {
    return this.store.shown.filter((run) => run.samples?.length);
  }

  // All prompts of all shown runs, those of the schedule first; one prompt with two seeds is two.
  get prompts() {
    const found = new Map();
    for (const requested of [false, true]) {
      for (const run of this.runs) {
        for (const set of run.samples) {
          if (set.requested !== requested) continue;
          for (const item of set.items) if (!found.has(keyOf(item)) && found.size < MAX_COLUMNS) found.set(keyOf(item), { key: keyOf(item), text: item.prompt, seed: item.settings?.seed });
        }
      }
    }
    const all = [...found.values()];
    const repeated = new Set(all.map((one) => one.text).filter((text, index, texts) => texts.indexOf(text) !== index));
    return all.map((one) => ({ ...one, text: repeated.has(one.text) ? `${one.text} (seed ${one.seed ?? "unknown"})` : one.text }));
  }

  get steps() {
    const found = new Set();
    for (const run of this.runs) for (const set of run.samples) found.add(set.step);
    return [...found].sort((a, b) => a - b);
  }

  update() {
    const { steps, prompts } = this;
    this.element.hidden = !steps.length;
    if (!steps.length) return;
    if (this.step === null || this.follow || !steps.includes(this.step)) this.step = steps[steps.length - 1];
    this.prompt = Math.min(this.prompt, prompts.length - 1);
    this.slider.max = String(steps.length - 1);
    const key = JSON.stringify([prompts, this.runs.map((run) => [run.id, run.name, run.samples.map((set) => [set.name, set.time, set.items.length])])]);
    if (key !== this.key) {
      this.key = key;
      replace(this.promptSelect, prompts.map((prompt, index) => h("option", { value: String(index), text: prompt.text || "(empty prompt)" })));
      this.drawGrid(steps, prompts);
    }
    this.select();
  }

  drawGrid(steps, prompts) {
    this.cells = new Map();
    const tables = this.runs.map((run) => {
      const rows = [...steps].reverse().flatMap((step) =>
        run.samples
          .filter((set) => set.step === step)
          .map((set) =>
            h(
              "tr",
              {},
              h("th", { scope: "row", title: formatTime(set.time) }, formatNumber(set.step), set.requested ? h("span", { class: "tag", text: "asked" }) : null),
              prompts.map((prompt, index) => h("td", {}, this.cell(run, set, prompt, index))),
            ),
          ),
      );
      return h(
        "table",
        { class: "sample-grid" },
        h("caption", { class: this.runs.length > 1 ? "" : "sr-only", text: `${run.name}: samples by step and prompt` }),
        h("thead", {}, h("tr", {}, h("th", { scope: "col", text: "step" }), prompts.map((prompt) => h("th", { scope: "col", title: prompt.text }, h("span", { class: "column-head", text: prompt.text }))))),
        h("tbody", {}, rows),
      );
    });
    replace(this.grid, tables);
  }

  cell(run, set, prompt, index) {
    const item = itemOf(set, prompt);
    if (!item) return null;
    const choose = () => {
      this.follow = set.step === this.steps[this.steps.length - 1];
      this.step = set.step;
      this.prompt = index;
      this.select();
    };
    const image = item.image ? h("img", { src: this.source.thumbnail(run, set, item.image), alt: "", loading: "lazy", decoding: "async", onload: crispIfSmall }) : h("span", { class: "no-image", text: item.audio ? "audio" : "file" });
    const button = h("button", { type: "button", class: this.prompts.length > MAX_LARGE ? "cell" : "cell few", style: { aspectRatio: shapeOf(item) }, tabindex: "-1", "aria-label": `step ${set.step}, ${prompt.text}`, onclick: choose }, image, item.video ? h("span", { class: "kind", text: "video" }) : null, item.audio ? h("span", { class: "kind", text: "audio" }) : null);
    this.cells.set(`${run.id} ${set.step} ${index}`, button);
    return button;
  }

  select() {
    const { steps, prompts } = this;
    const position = steps.indexOf(this.step);
    this.slider.value = String(position);
    this.slider.setAttribute("aria-valuetext", `step ${this.step}`);
    this.stepText.textContent = `step ${formatNumber(this.step)} (${position + 1} of ${steps.length})`;
    this.promptSelect.value = String(this.prompt);
    this.pin.setAttribute("aria-pressed", String(this.pinned !== null));
    this.pin.textContent = this.pinned === null ? "Compare" : `Compared with step ${formatNumber(this.pinned)}`;
    for (const cell of this.grid.querySelectorAll(".cell.chosen")) {
      cell.classList.remove("chosen");
      cell.removeAttribute("aria-current");
      cell.tabIndex = -1;
    }
    let isRevealed = false;
    for (const run of this.runs) {
      const cell = this.cells.get(`${run.id} ${this.step} ${this.prompt}`);
      if (!cell) continue;
      cell.classList.add("chosen");
      cell.setAttribute("aria-current", "true");
      cell.tabIndex = 0;
      if (!isRevealed) this.reveal(cell);
      isRevealed = true;
    }
    const shown = this.pinned === null || this.pinned === this.step ? [this.step] : [this.pinned, this.step];
    const wanted = this.runs.flatMap((run) => shown.map((step) => [run, this.setAt(run, step, prompts[this.prompt])])).filter(([, set]) => set);
    const key = JSON.stringify([this.prompt, wanted.map(([run, set]) => [run.id, set.name, set.time])]);
    if (key === this.viewerKey) return;
    this.viewerKey = key;
    replace(this.viewer, wanted.map(([run, set]) => this.large(run, set, prompts[this.prompt])));
    this.viewer.style.setProperty("--count", String(Math.max(wanted.length, 1)));
  }

  // Scroll the grid, but never the page.
  reveal(cell) {
    const box = this.grid.getBoundingClientRect();
    const place = cell.getBoundingClientRect();
    if (place.left < box.left + 56) this.grid.scrollLeft += place.left - box.left - 56;
    if (place.right > box.right) this.grid.scrollLeft += place.right - box.right + 4;
    if (place.top < box.top + 30) this.grid.scrollTop += place.top - box.top - 30;
    if (place.bottom > box.bottom) this.grid.scrollTop += place.bottom - box.bottom + 4;
  }

  setAt(run, step, prompt) {
    const sets = run.samples.filter((set) => set.step <= step && itemOf(set, prompt));
    return sets[sets.length - 1] ?? null;
  }

  large(run, set, prompt) {
    const item = itemOf(set, prompt);
    const url = (file) => this.source.sample(run, set, file);
    const label = `step ${set.step}: ${prompt.text}`;
    const media = [];
    const video = item.video && url(item.video);
    const audio = item.audio && url(item.audio);
    if (video) media.push(h("video", { src: video, controls: true, loop: true, muted: true, preload: "metadata", poster: item.image ? url(item.image) : null, "aria-label": label }));
    else if (item.image) media.push(h("img", { src: url(item.image), alt: label, onload: crispIfSmall }));
    if (audio) media.push(h("audio", { src: audio, controls: true, preload: "metadata", "aria-label": label }));
    const settings = Object.entries(item.settings ?? {}).filter(([, value]) => ["string", "number", "boolean"].includes(typeof value));
    return h(
      "figure",
      { class: "large" },
      media,
      h(
        "figcaption",
        {},
        h("strong", { text: this.runs.length > 1 ? `${run.name}, step ${formatNumber(set.step)}` : `step ${formatNumber(set.step)}` }),
        h("span", { text: prompt.text }),
        settings.length ? h("details", {}, h("summary", {}, "Settings"), h("dl", { class: "facts" }, settings.map(([name, value]) => [h("dt", { text: name }), h("dd", { text: String(value) })]))) : null,
      ),
    );
  }

  chooseStep(position) {
    this.step = this.steps[position];
    this.follow = position === this.steps.length - 1;
    this.select();
  }

  choosePrompt(index) {
    this.prompt = index;
    this.select();
  }

  togglePin() {
    this.pinned = this.pinned === null ? this.step : null;
    this.select();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.element.hidden || !this.element.isConnected) return;
    const target = event.target;
    if (target instanceof Element && target.closest("input:not([type=range]), textarea, select, dialog, .plot, .heat, video, audio")) return;
    const steps = this.steps;
    const position = steps.indexOf(this.step);
    const count = this.prompts.length;
    if (event.key === "ArrowLeft") this.prompt = (this.prompt + count - 1) % count;
    else if (event.key === "ArrowRight") this.prompt = (this.prompt + 1) % count;
    else if (event.key === "ArrowUp" && position < steps.length - 1) this.chooseStep(position + 1);
    else if (event.key === "ArrowDown" && position > 0) this.chooseStep(position - 1);
    else if (event.key === "c" || event.key === "C") this.togglePin();
    else if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    event.preventDefault();
    this.select();
    announce(`step ${this.step}, prompt ${this.prompt + 1} of ${count}: ${this.prompts[this.prompt].text}`);
  }
}

const keyOf = (item) => JSON.stringify([item.prompt, item.settings?.seed ?? null]);
const itemOf = (set, prompt) => set.items.find((item) => keyOf(item) === prompt.key);

// The width and height of a sample, as in `3 / 2`; a square if they are not known.
function shapeOf(item) {
  const { width, height } = item.settings ?? {};
  return width > 0 && height > 0 ? `${width} / ${height}` : "1";
}

// Images of a few pixels, as those of the demo, are easier to judge with sharp edges.
function crispIfSmall(event) {
  if (event.target.naturalWidth <= 64) event.target.classList.add("crisp");
}
