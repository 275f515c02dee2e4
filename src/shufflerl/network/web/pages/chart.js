// The estimated value after each batch as a line of steps, its interval as a band behind it.

import { count, digits, three } from "./common.js";

const HEIGHT = 190, LEFT = 44, RIGHT = 14, TOP = 10, BOTTOM = 26;

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text != null) element.textContent = text;
  return element;
}

/** Round steps of an axis from `low` to `high`, about four of them. */
function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9 * step; at += step) found.push(at);
  return found;
}

export function draw(chart, title, points) {
  const width = Math.max(200, chart.parentElement.clientWidth);
  chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.setAttribute("height", HEIGHT);
  chart.replaceChildren(title);
  if (points.length === 0) {
    title.textContent = "No value is estimated yet";
    chart.append(svg("line", { class: "axis dashed", x1: LEFT, x2: width - RIGHT, y1: HEIGHT / 2, y2: HEIGHT / 2 }),
      svg("text", { class: "label", x: width / 2, y: HEIGHT / 2 - 12, "text-anchor": "middle" }, "It is drawn here after the first batch."));
    return;
  }
  const last = points.at(-1);
  title.textContent = `Estimated value after ${count(points.length)} batches: first ${three(points[0].value)}, now ${three(last.value)}, between ${three(last.low)} and ${three(last.high)}`;
  let low = Math.min(...points.map((point) => point.low)), high = Math.max(...points.map((point) => point.high));
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const slots = last.batch - points[0].batch + 1;
  const x = (batch) => LEFT + ((width - LEFT - RIGHT) * (batch - points[0].batch)) / slots;
  const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low);
  for (const at of ticks(low, high)) {
    chart.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }),
      svg("text", { class: "label", x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, digits(at)));
  }
  // A value stands from its batch until the next that has one.
  const steps = points.map((point, i) => [point, x(point.batch), x(points[i + 1]?.batch ?? last.batch + 1)]);
  const along = (of) => steps.map(([point, from, to]) => `${from} ${y(of(point))} ${to} ${y(of(point))}`);
  const back = steps.toReversed().map(([point, from, to]) => `${to} ${y(point.low)} ${from} ${y(point.low)}`);
  chart.append(
    svg("path", { class: "band", d: `M${[...along((point) => point.high), ...back].join("L")}Z` }),
    svg("path", { class: "line", d: `M${along((point) => point.value).join("L")}` }),
    svg("circle", { class: "end", cx: x(last.batch + 1), cy: y(last.value), r: 4 }),
    svg("text", { class: "label", x: LEFT, y: HEIGHT - 6 }, `batch ${points[0].batch}`),
  );
  if (points.length > 1) chart.append(svg("text", { class: "label", x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, `batch ${last.batch}`));
}
