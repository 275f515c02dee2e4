import { UNKNOWN, atMost, bar, byId, count, digits, duration, facts, lead, make, plural, put, three, watch } from "./common.js";
import { draw } from "./chart.js";

const STATES = ["open", "sealed", "released", "learned"];
let learned = null;

function headline(status) {
  const heard = status.shuffler_says;
  if (status.trouble) return ["Something is in the way", "trouble"];
  if (status.finished) return ["Finished", "done"];
  if (!heard || heard.batch !== status.batch) return [`Batch ${status.batch} is being announced`, "calm"];
  if (heard.state === "open" && status.batches_learned === 0 && heard.accepted === 0) return ["Waiting for the first users", "calm"];
  if (heard.state === "open") return [`Batch ${status.batch} is filling`, "calm"];
  if (heard.state === "sealed") return [`Batch ${status.batch} is being mixed`, "calm"];
  if (heard.state === "aborted") return [`Batch ${status.batch} is asked again`, "calm"];
  return [`Learning from batch ${status.batch}`, "calm"];
}

function showStatus(status) {
  const [title, tone] = headline(status);
  lead(title, status.why, tone);
  document.title = `${title} · shufflerl coordinator`;
  showBatch(status);

  const played = status.episodes_played, all = status.episodes;
  bar(byId("run-bar"), played / all, `${count(played)} of ${count(all)} episodes`);
  put("run-note", `${count(played)} of ${count(all)} episodes learned from, by ${status.learner}.`);

  const spent = status.epsilon_spent, budget = status.epsilon_budget;
  byId("gauge-value").style.strokeDasharray = `${Math.min(100, (100 * spent) / budget)} 200`;
  byId("gauge-value").classList.toggle("none", spent === 0);
  put("epsilon", atMost(spent));
  put("epsilon-of", `of ε = ${digits(budget)}`);
  const gauge = byId("gauge");
  gauge.setAttribute("aria-valuemax", budget);
  gauge.setAttribute("aria-valuenow", spent);
  gauge.setAttribute("aria-valuetext", `epsilon ${atMost(spent)} of ${digits(budget)} spent`);
  put("spent-note", spent === 0 ? "Nothing has been released yet." : "By each user who took part, once.");
  put("delta", `δ = ${status.delta.toExponential()}`);
  put("noise", status.noise === "servers" ? "Noise by shuffler and coordinator, each enough alone: nothing rests on other users."
    : "Noise by all users together.");

  const latency = status.seal_to_release_at_most;
  facts("messages", [
    ["Opened", count(status.messages), status.noise === "servers" ? "tags, users' and dummies alike, or seeds of masks" : "tags, true and noise alike, or seeds of masks"],
    ["Left out", count(status.invalid_messages), status.noise === "servers" ? "not to be opened, or not of their group" : "not to be opened, or of no counter"],
    ["Seal to release", latency == null ? UNKNOWN : `at most ${duration(latency)}`, "last batch, as seen from here"],
    ["Release to learned", duration(status.release_to_learned), "last batch"],
  ]);
  byId("shuffler-page").href = `${status.shuffler}/`;
  put("policy-title", status.finished ? "Learned policy" : "Policy played now");
  put("task", `Run ${status.task}`);
}

function showBatch(status) {
  const said = status.shuffler_says;
  const heard = said && said.batch === status.batch && said.attempt === status.attempt ? said : null;
  let state = heard?.state;
  if (status.finished) {
    put("batch-title", "Batches");
    put("batch-accepted", count(status.batches_learned));
    put("batch-users", status.batches_learned === 1 ? "batch learned from" : "batches learned from");
    bar(byId("batch-bar"), 1, "all batches are done");
    put("batch-note", "No batch is open any more.");
    state = "learned";
  } else {
    put("batch-title", `Batch ${status.batch}`);
    put("batch-accepted", count(heard?.accepted));
    put("batch-users", heard ? `of ${count(heard.users)} reports` : "reports; the shuffler has not told");
    bar(byId("batch-bar"), heard && heard.accepted / heard.users,
      heard ? `${count(heard.accepted)} of ${count(heard.users)} reports` : "not known yet");
    put("batch-note", heard ? batchNote(heard) : "Not known to the shuffler yet.");
  }
  const place = STATES.indexOf(state);
  for (const step of byId("batch-steps").children) {
    const at = STATES.indexOf(step.dataset.state);
    step.classList.toggle("done", at < place || (status.finished && at === place));
    if (at === place) step.setAttribute("aria-current", "step");
    else step.removeAttribute("aria-current");
  }
}

function batchNote(heard) {
  const parts = [];
  if (heard.state === "open") parts.push(`${duration(heard.seconds_left)} left to fill`);
  if (heard.extensions) parts.push(`extended ${plural(heard.extensions, "time", "times")}`);
  if (heard.attempt) parts.push(`attempt ${heard.attempt + 1}`);
  return parts.length ? `${parts.join(", ")}.` : "It takes no more reports.";
}

const PHASES = { range: "finding the range", search: "searching", check: "checking candidates", commit: "settled" };

function showLearned(now) {
  learned = now;
  const estimate = now.estimate, compared = now.history.some((point) => point.arms?.length);
  put("value-title", now.returns ? "Estimated return of an episode" : "Estimated value of an episode");
  put("value", three(estimate?.value));
  put("interval", estimate ? `between ${three(estimate.low)} and ${three(estimate.high)}` : "not known yet");
  const dots = compared ? " Dots are the policies that were compared in a batch." : "";
  put("value-note", estimate ? `${estimate.description[0].toUpperCase()}${estimate.description.slice(1)}.${dots}`
    : now.batches ? "There is no estimate: too little is known so far, or this learner makes none." : "No batch has been learned from.");
  byId("value-figure").hidden = now.batches > 0 && !estimate;
  byId("chart-box").hidden = now.batches > 0 && now.history.length === 0;
  byId("chart-by").hidden = now.history.length === 0;
  drawChart();
  byId("value-details").hidden = now.history.length === 0;
  const spread = (point) => (point.arms?.length ? [three(Math.min(...point.arms)), three(Math.max(...point.arms))] : ["none", "none"]);
  const head = make("tr");
  head.append(...["After batch", "Users", "Value", "From", "To", ...(compared ? ["Least policy", "Best policy"] : [])]
    .map((name) => make("th", name, { scope: "col" })));
  byId("value-head").replaceChildren(head);
  byId("value-rows").replaceChildren(...now.history.map((point) => {
    const row = make("tr");
    row.append(make("th", point.batch, { scope: "row" }), make("td", count(point.users)),
      ...[point.value, point.low, point.high].map((number) => make("td", three(number))),
      ...(compared ? spread(point).map((text) => make("td", text)) : []));
    return row;
  }));

  const rows = [["Batches learned from", count(now.batches), `at most ${count(now.max_batches)}`]];
  if (now.stages) rows.push(["Stages done", count(now.stages[0]), `of ${count(now.stages[1])}`]);
  if (now.log2_policies != null) rows.push(["Policies left", power(now.log2_policies), `of ${power(now.log2_all_policies)}`]);
  if (now.search.phase) rows.push(["Now", PHASES[now.search.phase] ?? now.search.phase]);
  if (now.search.parameters) rows.push([now.policy.policies > 1 ? "Policies compared" : "Policies played", count(now.policy.policies), `of ${plural(now.search.parameters, "number", "numbers")} each`]);
  if (now.search.reliability != null) rows.push(["Told apart", `${Math.round(100 * Math.max(0, now.search.reliability))}%`, "of how they differ is no noise, by the last batch that compared"]);
  if (now.policy.family === "table") {
    const cells = now.policy.steps * now.policy.states;
    if (now.decided != null) rows.push(["Settled", count(now.decided), `of ${count(cells)}: one action is left`]);
    rows.push(["Policy switches", count(now.switches)]);
    rows.push(["Actions changed", count(now.changed_actions), `of ${count(cells)}, by the last batch`]);
  } else rows.push(["Policy switches", count(now.switches)]);
  facts("learning", rows);
  (now.policy.family === "table" ? showPolicy : showNetwork)(now.policy);
}

const power = (log2) => (log2 < 20 ? count(Math.round(2 ** log2)) : `2^${digits(log2)}`);
const chosen = () => document.querySelector("#chart-by :checked").value;
const drawChart = () => learned && draw(byId("chart"), byId("chart-name"), learned.history, chosen());

function shade(action, actions) {
  const [first, last] = actions > 5 ? [0, 7] : [1, 6];
  return `a${actions < 2 ? 3 : Math.round(first + ((last - first) * action) / (actions - 1))}`;
}

function showPolicy(policy) {
  const shown = policy.action[0].length;
  const given = policy.policies > 1 ? `A mixture of ${count(policy.policies)} policies: the likeliest action, and the share of users who are told to take it.` : "The action that users are told to take.";
  const cut = shown < policy.states ? ` The first ${count(shown)} of ${count(policy.states)} states.` : "";
  put("policy-note", `${given}${cut}`);
  const table = byId("policy");
  const head = make("tr");
  head.append(make("th", "Step", { scope: "col" }), ...policy.action[0].map((_, x) => {
    const cell = make("th", null, { scope: "col" });
    cell.append(make("span", "State ", { class: "hidden" }), String(x));
    return cell;
  }));
  const rows = policy.action.map((actions, h) => {
    const row = make("tr");
    row.append(make("th", h + 1, { scope: "row" }), ...actions.map((action, x) => {
      const share = policy.share[h][x];
      const cell = make("td", action, { class: shade(action, policy.actions), title: `step ${h + 1}, state ${x}: action ${action}, ${Math.round(100 * share)}% of users` });
      if (policy.policies > 1) cell.append(make("small", `${Math.round(100 * share)}%`));
      return cell;
    }));
    return row;
  });
  const body = make("tbody"), top = make("thead");
  top.append(head);
  body.append(...rows);
  const caption = make("caption", "Rows are steps, columns states, entries actions.");
  table.replaceChildren(caption, top, body);
  const legend = Array.from({ length: Math.min(policy.actions, 12) }, (_, action) => {
    const item = make("li", ` action ${action}`);
    item.prepend(make("span", null, { class: `swatch ${shade(action, policy.actions)}`, "aria-hidden": "true" }));
    return item;
  });
  if (policy.actions > 12) legend.push(make("li", `and so on to action ${policy.actions - 1}`));
  byId("legend").replaceChildren(...legend);
}

const RULES = {
  choice: "The action with the largest value is taken; action 0 has value 0.",
  score: "The same network scores what is observed of each action; the largest is taken.",
  box: "Each coordinate of an action is squashed into its range.",
  scores: "The action whose state has the largest score is taken.",
};

/** What a network is made of: a linear one weight by weight, any other by its layers. Scores as they are. */
function showNetwork(policy) {
  const what = { linear: "linear", scores: "scoring" }[policy.family] ?? `${policy.layers.join(" to ")} network`;
  const given = policy.policies > 1 ? `${count(policy.policies)} ${what} policies, drawn around one` : `One ${what} policy`;
  put("policy-note", `${given}: ${count(policy.inputs)} inputs, ${count(policy.actions)} ${policy.head === "box" ? "coordinates" : "actions"}. ${RULES[policy.head]}`);
  const rowed = (cells) => { const row = make("tr"); row.append(...cells); return row; };
  const apart = policy.policies > 1 && policy.family !== "mlp";
  const most = Math.max(1e-9, ...policy.rows.flatMap((row) => row.cells.map(([value]) => Math.abs(value))));
  const cell = ([value, spread]) => {
    const shown = policy.rows.length && spread != null ? `a${Math.round((4 * Math.abs(value)) / most)}` : "a0";
    const made = make("td", Number.isInteger(value) ? count(value) : digits(value), { class: shown });
    if (apart && spread != null) made.append(make("small", `± ${digits(spread)}`));
    return made;
  };
  const head = make("thead"), body = make("tbody");
  const byLayer = policy.rows[0].cells[0][1] == null;
  head.append(rowed([byLayer ? "Layer" : "Value of", ...policy.columns].map((name) => make("th", name, { scope: "col" }))));
  body.append(...policy.rows.map((row) => rowed([make("th", row.name, { scope: "row" }), ...row.cells.map(cell)])));
  const caption = byLayer ? "Size is the root mean square of a layer's numbers, apart that of how the policies differ in them."
    : apart ? "The mean over the policies, and how far they are apart."
    : policy.family === "scores" ? "The score of every state and action." : "A value is the sum of what is observed times these numbers, and the bias.";
  byId("policy").replaceChildren(make("caption", caption), head, body);
  byId("legend").replaceChildren();
}

async function showCertificate() {
  byId("certificate").showModal();
  try {
    const answer = await fetch("v1/certificate");
    if (!answer.ok) throw new Error(`the coordinator answered ${answer.status}`);
    const said = await answer.json();
    put("certificate-claim", `(${atMost(said.epsilon)}, ${said.delta.toExponential()})-differential privacy in the ${said.model} model`);
    put("certificate-mechanism", `By ${said.mechanism}.`);
    facts("certificate-facts", [
      ["Spent so far", atMost(said.spent), `of a budget of ${digits(said.budget_epsilon)}`],
      ["Noise", `standard deviation ${digits(said.noise_sd)}`, said.noise_on],
      ["Sensitivity", plural(said.changed_counters, "counter", "counters"), "changed by one at most when a user is replaced"],
      ["Each user takes part", plural(said.participations, "time", "times")],
    ]);
    put("certificate-neighbours", said.neighbours);
    put("certificate-against", said.against);
    put("certificate-implies", said.implies);
    facts("certificate-assumptions", Object.entries(said.assumptions).map(([name, text]) => [name, text]));
  } catch (reason) {
    put("certificate-claim", `It cannot be had now (${reason.message}). Close this and try again.`);
  }
}

byId("certificate-open").addEventListener("click", showCertificate);
byId("chart-by").addEventListener("change", drawChart);
new ResizeObserver(drawChart).observe(byId("chart-box"));
watch({ status: showStatus, learned: showLearned });
