// The plan of a run that has not started: memory, time and placement, against what the machine has.

import { color, formatBytes, formatNumber, formatSeconds, h } from "./basics.js";
import { partsBar } from "./charts.js";
import { definitionList, simpleTable } from "./panels.js";

const ROLES = ["weights", "adapters", "gradients", "optimizer", "activations", "caches", "workspace"];
const TIMES = { gemm: "matmuls", attention: "attention", elementwise: "elementwise", recompute: "recomputing", overhead: "overhead", wait_weights: "waiting for weights", wait_activations: "waiting for activations", wait_state: "waiting for optimizer state", wait_host: "waiting for the host" };
const PLACES = { resident: "weights stay on the device", streamed: "weights streamed" };
const MODES = { keep: "activations kept", lean: "activations kept lean", offload: "activations offloaded", recompute: "activations recomputed" };

export function planPanel(run) {
  const { plan, budget } = run.plan;
  const memory = (tier, limit) => {
    const parts = ROLES.map((name, index) => ({ name, value: plan[tier][name] ?? 0, color: index }));
    return h("div", { class: "plan-memory" }, h("h4", { text: `${tier === "device" ? "Device" : "Host"} memory: ${formatBytes(plan[`${tier}_total`])} of ${formatBytes(limit)}` }), partsBar(parts, formatBytes, limit));
  };
  const seconds = Object.entries(TIMES).map(([name, text], index) => ({ name: text, value: plan.seconds[name] ?? 0, color: index }));
  return [
    definitionList([
      ["model", run.plan.model],
      ["sample", run.plan.sample],
      ["machine", run.plan.machine],
      ["speed", `${formatNumber(plan.samples_per_second)} samples/s, ${formatSeconds(plan.seconds.step)} per micro-batch`],
      ["batch", `${plan.batch} x ${plan.accumulation}${plan.compiled ? ", compiled" : ", eager"}`],
    ]),
    memory("device", budget.device_nbytes),
    memory("host", budget.host_nbytes),
    h("div", { class: "plan-memory" }, h("h4", { text: `Time of a micro-batch: ${formatSeconds(plan.seconds.step)}${plan.simulated ? ", from published figures" : ""}` }), partsBar(seconds, formatSeconds)),
    blockStrip(plan.blocks ?? []),
    h("h4", { text: "Why" }),
    h("ul", { class: "list" }, (run.plan.reasons ?? []).map((text) => h("li", { text }))),
    run.plan.notes?.length ? [h("h4", { text: "Notes" }), h("ul", { class: "list" }, run.plan.notes.map((text) => h("li", { text })))] : null,
    run.plan.others?.length
      ? [h("h4", { text: "Next best" }), simpleTable(["batch", "samples/s", "device", "host"], run.plan.others.map((one) => [`${one.batch} x ${one.accumulation}`, formatNumber(one.samples_per_second), formatBytes(one.device_total), formatBytes(one.host_total)]), "Next best plans")]
      : null,
  ];
}

function blockStrip(blocks) {
  if (!blocks.length) return null;
  const kinds = [...new Set(blocks.map((block) => `${block.weights} ${block.activations}`))];
  const text = (kind) => {
    const [weights, activations] = kind.split(" ");
    return `${PLACES[weights] ?? weights}, ${MODES[activations] ?? activations}`;
  };
  return h(
    "div",
    { class: "parts" },
    h("h4", { text: `${blocks.length} blocks` }),
    h("div", { class: "bar", role: "img", "aria-label": kinds.map((kind) => `${blocks.filter((block) => `${block.weights} ${block.activations}` === kind).length} blocks: ${text(kind)}`).join("; ") }, blocks.map((block, index) => h("span", { class: "block", style: { flex: "1", background: color(kinds.indexOf(`${block.weights} ${block.activations}`)) }, title: `block ${index}: ${text(`${block.weights} ${block.activations}`)}` }))),
    h("div", { class: "legend" }, kinds.map((kind, index) => h("span", { class: "key" }, h("span", { class: "swatch", style: { color: color(index) } }), text(kind)))),
  );
}
