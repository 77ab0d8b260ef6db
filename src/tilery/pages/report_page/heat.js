"use strict";
// Op × language: the geometric mean ratio to the chosen peer, in words and in colour.

function drawHeat(holder, rows) {
  const kernels = rows.filter((row) => isKernel(row) && ratioOf(row));
  const ops = CHOICES.op.filter((op) => kernels.some((row) => row.op === op));
  const languages = DATA.languages.filter((one) => kernels.some((row) => row.language === one.name));
  if (!ops.length)
    return holder.replaceChildren(html("p", { class: "words" }, "Nothing here was timed beside this peer."));
  const head = html(
    "thead",
    {},
    html(
      "tr",
      {},
      html("th", { scope: "col" }, "op"),
      languages.map((one) => html("th", { scope: "col" }, breakable(one.name))),
    ),
  );
  const body = html(
    "tbody",
    {},
    ops.map((op) =>
      html(
        "tr",
        {},
        html("th", { scope: "row" }, op),
        languages.map((one) => heatCell(kernels, op, one.name)),
      ),
    ),
  );
  const box = html(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Heat map, scrolls sideways" },
    html("table", { class: "heat" }, head, body),
  );
  holder.replaceChildren(box);
  roving(box, "td button");
}

function heatCell(kernels, op, language) {
  const all = kernels.filter((row) => row.op === op);
  const best = ofOneKind(bestPerCell(all.filter((row) => row.language === language)));
  if (!best.length) return html("td", { class: "none" }, html("span", { "aria-label": "not timed" }, "–"));
  const mean = geometricMean(best.map((row) => ratioOf(row)[0]));
  const cases = new Set(all.map((row) => row.cell)).size;
  const strength = Math.round(Math.min(1, Math.abs(Math.log2(mean)) / 2) * 85 + 6);
  const ground = `color-mix(in oklab, var(--${mean >= 1 ? "win" : "loss"}) ${strength}%, var(--surface))`;
  const narrow = () => {
    change({ op, language: [language] });
    byId("reset").focus();
  };
  const words = best.length < cases ? `${best.length} of ${count(cases, "case")}` : count(cases, "case");
  const label = `${op} in ${language}: ${times(mean)} of ${peerName(state.peer)}, ${words}; show only these`;
  return html(
    "td",
    { style: { background: ground } },
    html(
      "button",
      { type: "button", "aria-label": label, onclick: narrow },
      html("b", {}, times(mean)),
      html("small", {}, words),
    ),
  );
}

/** numba_cuda may break after its underscore. */
function breakable(name) {
  return name.split("_").flatMap((part, i) => (i ? ["_", html("wbr"), part] : [part]));
}
