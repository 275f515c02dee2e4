// The estimated value after each batch as a line of steps, its interval as a band behind it, and policies compared as dots.

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

/** Draw points along an axis of batches, or of the users who have played. */
export function draw(chart, title, points, by) {
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
  title.textContent = `Estimated value after ${count(points.length)} batches and ${count(last.users)} users: first ${three(points[0].value)}, now ${three(last.value)}, between ${three(last.low)} and ${three(last.high)}`;
  const arms = points.flatMap((point) => point.arms ?? []);
  let low = Math.min(...points.map((point) => point.low), ...arms), high = Math.max(...points.map((point) => point.high), ...arms);
  if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
  const at = by === "users" ? (point) => point.users : (point) => point.batch;
  const begin = at(points[0]), end = at(last) + (by === "users" ? Math.max(1, (at(last) - begin) / Math.max(1, points.length - 1)) : 1);
  const x = (place) => LEFT + ((width - LEFT - RIGHT) * (place - begin)) / (end - begin);
  const y = (value) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low);
  for (const tick of ticks(low, high)) {
    chart.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "label", x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, digits(tick)));
  }
  // A value stands from its batch until the next that has one.
  const steps = points.map((point, i) => [point, x(at(point)), x(i + 1 < points.length ? at(points[i + 1]) : end)]);
  const along = (of) => steps.map(([point, from, to]) => `${from} ${y(of(point))} ${to} ${y(of(point))}`);
  const back = steps.toReversed().map(([point, from, to]) => `${to} ${y(point.low)} ${from} ${y(point.low)}`);
  const name = (point) => (by === "users" ? `${count(point.users)} users` : `batch ${point.batch}`);
  chart.append(
    svg("path", { class: "band", d: `M${[...along((point) => point.high), ...back].join("L")}Z` }),
    ...steps.flatMap(([point, from, to]) => (point.arms ?? []).map((arm) => svg("circle", { class: "arm", cx: (from + to) / 2, cy: y(arm), r: 2 }))),
    svg("path", { class: "line", d: `M${along((point) => point.value).join("L")}` }),
    svg("circle", { class: "end", cx: x(end), cy: y(last.value), r: 4 }),
    svg("text", { class: "label", x: LEFT, y: HEIGHT - 6 }, name(points[0])),
  );
  if (points.length > 1) chart.append(svg("text", { class: "label", x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, name(last)));
}
