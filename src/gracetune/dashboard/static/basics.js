// Build elements, print numbers, choose colours. Texts from runs become text nodes, never HTML.

export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "text") element.textContent = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

export function announce(text) {
  const place = document.getElementById("announce");
  if (place) place.textContent = text;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function formatNumber(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))} M`;
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size >= 100) return trim(value.toFixed(1));
  if (size >= 1e-3) return trim(value.toPrecision(4));
  return value.toExponential(2);
}

function trim(text) {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

export function formatCount(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en") : "–";
}

export function formatBytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(Math.abs(value) >= 100 ? 0 : 1)} ${units[unit]}`;
}

export function formatSeconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${trim((value * 1000).toPrecision(3))} ms`;
  if (value < 120) return `${trim(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function formatPercent(value) {
  if (!isNumber(value)) return "–";
  const percent = value * 100;
  return `${Math.abs(percent) < 1 ? Number(percent.toPrecision(2)) : trim(percent.toFixed(1))} %`;
}

export const withUnit = (unit, digits = 0) => (value) => (isNumber(value) ? `${value.toFixed(digits)} ${unit}` : "–");

export function formatTime(seconds) {
  if (!isNumber(seconds) || seconds === 0) return "–";
  const date = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// Colours that people with any colour vision can tell apart (after Okabe and Ito).
const PALETTES = {
  light: ["#0072b2", "#d55e00", "#00806a", "#b2508f", "#8a6d00", "#3b9ad1", "#6f4e9b", "#5c6670", "#a33b20", "#2f6f3e"],
  dark: ["#5ab4ee", "#f0954a", "#33c29a", "#e08cbc", "#e3d04d", "#9ad0f5", "#b497e7", "#a4afb9", "#f27d6b", "#8fcf7c"],
};

export function themeName() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export function color(index) {
  const palette = PALETTES[themeName()];
  return palette[index % palette.length];
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Five stops from the background to dark blue or bright yellow; readable in grey, too.
const HEAT = {
  light: [[246, 248, 250], [190, 217, 236], [108, 171, 214], [38, 111, 168], [8, 48, 96]],
  dark: [[24, 30, 36], [38, 66, 98], [40, 116, 142], [88, 180, 128], [246, 232, 110]],
};

export function heat(share) {
  const stops = HEAT[themeName()];
  const position = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const index = Math.min(Math.floor(position), stops.length - 2);
  return stops[index].map((value, part) => Math.round(value + (stops[index + 1][part] - value) * (position - index)));
}
