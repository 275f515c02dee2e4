// What both pages share: the connection, small ways to write into the page, and numbers as text.

export const UNKNOWN = "–";
export const byId = (id) => document.getElementById(id);

const whole = new Intl.NumberFormat("en");
export const count = (number) => (number == null ? UNKNOWN : whole.format(number));
export const digits = (number) => (number == null ? UNKNOWN : String(Number(number.toPrecision(3))));
/** A bound in three digits, rounded up: what is shown is a bound too. */
export function atMost(number) {
  if (number == null) return UNKNOWN;
  const nearest = Number(number.toPrecision(3));
  const unit = 10 ** (Math.floor(Math.log10(number)) - 2);
  return String(nearest >= number ? nearest : Number((nearest + unit).toPrecision(3)));
}
export const three = (number) => (number == null ? UNKNOWN : Math.abs(number) < 999.5 ? number.toPrecision(3) : count(Math.round(number)));
export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  if (seconds > 0 && seconds < 1) return `${Math.ceil(1000 * seconds)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

/** Write a text, and touch the page only if it is another one. */
export function put(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Facts as a list of [name, text, explanation?]; what is not known is said to readers of the screen too. */
export function facts(id, rows) {
  const list = byId(id);
  const wanted = JSON.stringify(rows);
  if (list.dataset.shown === wanted) return;
  list.dataset.shown = wanted;
  list.replaceChildren(...rows.map(([name, text, more]) => {
    const row = make("div"), term = make("dt", name), value = make("dd", text);
    if (text === UNKNOWN) value.append(make("span", " not known yet", { class: "hidden" }));
    if (more) term.append(make("small", more));
    row.append(term, value);
    return row;
  }));
}

export function bar(element, share, text) {
  const known = share != null;
  element.classList.toggle("unknown", !known);
  element.firstElementChild.style.inlineSize = `${known ? 100 * share : 0}%`;
  if (known) element.setAttribute("aria-valuenow", Math.floor(100 * share));
  else element.removeAttribute("aria-valuenow");
  element.setAttribute("aria-valuetext", text);
}

/** The headline, said aloud when it changes; the sentence under it, which changes often, is not. */
export function lead(headline, why, tone) {
  const spoken = byId("headline").textContent !== headline;
  put("headline", headline);
  put("why", why);
  byId("lead").dataset.tone = tone;
  if (spoken) say(headline);
}

export const say = (text) => put("said", text);

const SILENCE = 15_000; // milliseconds after which a server that says nothing counts as gone

/** Show each part whenever the server tells it; say when it cannot be reached, or cannot tell, and when it is back. */
export function watch(parts) {
  let source, heard = performance.now(), started, lost = false, failed = false;

  const alive = () => {
    heard = performance.now();
    if (failed) return;
    if (lost) say("Connected again.");
    lost = false;
    document.body.classList.remove("stale");
    byId("link").dataset.link = "live";
    put("link-text", "Live");
  };
  const fail = (detail) => {
    heard = performance.now();
    failed = true;
    lost = false;
    document.body.classList.add("stale");
    byId("link").dataset.link = "failed";
    put("link-text", detail);
    say(detail);
  };
  const gone = () => {
    if (!lost) say("The connection is lost. The page comes back by itself.");
    lost = true;
    document.body.classList.add("stale");
    byId("link").dataset.link = "lost";
    put("link-text", `No connection; what you see is ${duration(Math.round((performance.now() - heard) / 1000))} old`);
  };
  const open = () => {
    source?.close();
    source = new EventSource("v1/events");
    source.addEventListener("alive", alive);
    source.addEventListener("failed", (event) => fail(JSON.parse(event.data).detail));
    for (const [name, show] of Object.entries(parts)) {
      source.addEventListener(name, (event) => {
        const part = JSON.parse(event.data);
        if (failed) say("It is fresh again.");
        failed = false;
        alive();
        if (part.started && started && part.started !== started) say("The server was restarted.");
        started = part.started ?? started;
        show(part);
      });
    }
    source.onerror = gone; // the browser tries again by itself, unless it was sent away
  };
  open();
  let tried = performance.now();
  setInterval(() => {
    const now = performance.now();
    if (now - heard > SILENCE) gone();
    if (lost) gone();
    if (lost && now - tried > 3000 && (source.readyState === EventSource.CLOSED || now - heard > SILENCE)) {
      tried = now;
      open();
    }
  }, 1000);
}
