// Run inside a page by tests/network/coordinator/test_dashboard_browser.py.

/** Texts whose contrast with what is behind them is below 4.5. */
function lowContrast() {
  const channels = (color) => color.match(/[\d.]+/g).map(Number);
  const light = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = color[i] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim(), element = walk.currentNode.parentElement;
    if (!text || element.tagName === "title" || !element.checkVisibility()) continue;
    if (element.getBoundingClientRect().width <= 1) continue; // for readers of the screen only
    const style = getComputedStyle(element);
    const own = light(channels(element.closest("svg") ? style.fill : style.color)), other = light(behind(element));
    const ratio = (Math.max(own, other) + 0.05) / (Math.min(own, other) + 0.05);
    if (ratio < 4.5) found.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
}

/** What a reader of the screen would stumble over. */
function stumbles() {
  const wrong = [];
  const all = (selector) => [...document.querySelectorAll(selector)].filter((e) => !e.closest("[hidden], [aria-hidden=true]"));
  const labels = (e) => (e.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "");
  const name = (e) => {
    if (e.matches("img")) return e.hasAttribute("alt");
    return e.getAttribute("aria-label") || labels(e).join("").trim() || (e.matches("a, button, summary") && e.textContent.trim());
  };
  const named = "img, svg, a, button, summary, section, nav, dialog, [role]:not([role=status]), [tabindex='0']";
  for (const e of all(named)) if (!name(e)) wrong.push(`no name: ${e.outerHTML.slice(0, 80)}`);
  for (const e of all("[role=progressbar]:not(.unknown), [role=meter]"))
    if (!e.hasAttribute("aria-valuenow") || !e.hasAttribute("aria-valuetext")) wrong.push(`no value: ${e.id}`);
  for (const e of all("table"))
    if (!e.querySelector("thead th[scope=col]") || !e.querySelector("tbody th[scope=row]")) wrong.push(`no headings: ${e.id}`);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size < ids.length) wrong.push("an id stands twice");
  const levels = all("h1, h2, h3").map((e) => Number(e.tagName[1]));
  if (levels[0] !== 1 || levels.some((level, i) => i && level > levels[i - 1] + 1)) wrong.push(`headings ${levels}`);
  for (const tag of ["header", "main", "footer"]) if (all(tag).length !== 1) wrong.push(`not one ${tag}`);
  if (!document.documentElement.lang) wrong.push("no language");
  return wrong;
}

/** What stands on the page without anything in it, or with a dash in place of what is not known. */
function empty() {
  const inside = "output, span[id], p, dd, dt, td, th, h1, h2, h3, li, dl, table, tbody, figure";
  return [...document.querySelectorAll(`main :is(${inside}), dialog[open] :is(${inside}), footer :is(${inside})`)]
    .filter((e) => !e.closest("[hidden]") && ["", "–", "– not known yet"].includes(e.textContent.trim()))
    .map((e) => `${e.closest("section, dialog, footer")?.getAttribute("aria-labelledby") ?? ""} ${e.outerHTML.slice(0, 80)}`);
}
