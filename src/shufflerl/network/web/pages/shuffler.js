import { UNKNOWN, bar, byId, count, duration, facts, lead, make, plural, put, watch } from "./common.js";

// What each reason means; those not named here speak for themselves.
const MEANING = {
  duplicate: "the same bytes again; they count once",
  replayed: "a user who had taken part",
  late: "after the batch was full",
  unauthorized: "no token of this shuffler",
  undecryptable: "sealed to another batch",
  malformed: "cannot be read",
  oversized: "longer than is taken",
  "too-many-messages": "longer reports than are taken",
  "unknown-batch": "no such batch",
  "unsupported-version": "another version",
};

function show(now) {
  const open = now.batches.filter((batch) => batch.state === "open");
  const sealed = now.batches.filter((batch) => batch.state === "sealed");
  if (now.trouble) lead("Something is in the way", `${now.trouble} What cannot be stored is not acknowledged, so nothing is lost.`, "trouble");
  else if (sealed.length) lead("Mixing", `${plural(sealed.length, "batch is", "batches are")} full and being put in random order.`, "calm");
  else if (open.length) lead("Taking reports", `${plural(open.length, "batch takes", "batches take")} reports.`, "calm");
  else lead("No batch is open", "It waits for a coordinator to announce one.", "calm");
  document.title = `${byId("headline").textContent} · shufflerl shuffler`;

  put("batches-note", now.batches.length ? "A batch is released when it is full, and never before." : "None: there is nothing to fill or to mix.");
  byId("batches").replaceChildren(...now.batches.map(batchView));

  facts("work", [
    ["Reports accepted", count(now.accepted)],
    ["Uploads that wait", count(now.queued), "for the disk"],
    ["Batches released", count(now.released)],
    ["Dummies", now.dummies ? `about ${count(Math.round(now.dummies))}` : "none", "its own noise, for the batches under way"],
    ["Seal to release", now.release_seconds == null ? UNKNOWN : duration(now.release_seconds), "last batch"],
  ]);

  const reasons = Object.entries(now.refused), total = reasons.reduce((sum, [, number]) => sum + number, 0);
  put("refused-note", total ? `${plural(total, "report was", "reports were")} not taken since it started.` : "None since it started.");
  byId("refused").hidden = reasons.length === 0;
  byId("refused-rows").replaceChildren(...reasons.map(([reason, number]) => {
    const row = make("tr"), name = make("th", reason.replaceAll("-", " "), { scope: "row" });
    if (MEANING[reason]) name.append(make("small", MEANING[reason]));
    row.append(name, make("td", count(number)));
    return row;
  }));
}

function batchView(batch) {
  const box = make("div", null, { class: "batch" });
  const line = make("div", null, { class: "bar", role: "progressbar", "aria-label": `Batch ${batch.batch}`, "aria-valuemin": 0, "aria-valuemax": 100 });
  line.append(make("span"));
  bar(line, batch.accepted / batch.users, `${count(batch.accepted)} of ${count(batch.users)} reports`);
  const title = make("h3", `Batch ${batch.batch} `);
  title.append(make("span", batch.state, { class: "pill" }));
  const more = batch.state === "open" ? `, ${duration(batch.seconds_left)} left to fill` : "";
  const extended = batch.extensions ? `, extended ${plural(batch.extensions, "time", "times")}` : "";
  const attempt = batch.attempt ? `, attempt ${batch.attempt + 1}` : "";
  box.append(title, line, make("p", `${count(batch.accepted)} of ${count(batch.users)} reports${more}${extended}${attempt}.`, { class: "note" }));
  return box;
}

watch({ status: show });
