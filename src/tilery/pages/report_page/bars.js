"use strict";
// Ratios to the chosen peer, case by case: bars from a line at 1, on a log scale, with 95 % whiskers.

const FEW_CASES = 18;
const shownWhole = new Set(); // devices whose every case was asked for

function drawBars(holder, rows, device) {
  const drawn = rows.filter((row) => ratioOf(row) && row.kernel !== state.peer && !row.kernel.startsWith("control:"));
  const cells = grouped(drawn, "cell");
  const without = new Set(rows.filter((row) => row.timed && isKernel(row) && !ratioOf(row)).map((row) => row.cell))
    .size;
  const apart = without
    ? html("p", { class: "words" }, `${count(without, "case")} had no ${peerName(state.peer)} beside the kernels.`)
    : null;
  if (!cells.size)
    return holder.replaceChildren(apart ?? html("p", { class: "words" }, "Nothing here was timed beside a peer."));
  const limits = new Map([...grouped(drawn, "op")].map(([op, members]) => [op, barLimits(members)]));
  const all = [...cells.values()];
  const shown = shownWhole.has(device) ? all : all.slice(0, FEW_CASES);
  const grid = html(
    "div",
    { class: "bar-grid" },
    shown.map((members) => barCard(members, limits.get(members[0].op))),
  );
  holder.replaceChildren(
    ...[apart, grid, all.length > shown.length ? moreCases(holder, rows, device, all.length) : null].filter(Boolean),
  );
  roving(grid, ".bar-row");
}

function grouped(rows, name) {
  const groups = new Map();
  for (const row of rows) groups.set(row[name], [...(groups.get(row[name]) ?? []), row]);
  return groups;
}

function moreCases(holder, rows, device, total) {
  const show = () => {
    shownWhole.add(device);
    drawBars(holder, rows, device);
    holder.querySelectorAll(".bar-card")[FEW_CASES]?.querySelector(".bar-row")?.focus();
  };
  return html("button", { type: "button", class: "more", onclick: show }, `Show all ${total} cases`);
}

/** One scale for an op. A bar fifty times too slow must not squeeze the others: it is cut, and its number stands. */
function barLimits(rows) {
  const values = rows.flatMap((row) => ratioOf(row));
  return [Math.max(0.25, Math.min(0.7, ...values) * 0.94), Math.min(8, Math.max(1.4, ...values) * 1.06)];
}

function barCard(members, limits) {
  const [first] = members;
  const rows = [...members].sort((a, b) => ratioOf(b)[0] - ratioOf(a)[0]);
  const title = html("h4", {}, html("b", {}, first.op), ` ${caseWords(first)}`);
  const run = SEVERAL.run ? html("p", { class: "bar-run" }, DATA.runs[first.run].id) : null;
  return html(
    "div",
    { class: "bar-card" },
    title,
    run,
    html(
      "div",
      { class: "bars" },
      rows.map((row) => bar(row, limits)),
    ),
    barAxis(limits),
  );
}

function bar(row, limits) {
  const place = logScale(...limits, 0, 100);
  const inside = (value) => Math.min(100, Math.max(0, place(value)));
  const [ratio, low, high] = ratioOf(row);
  const [from, to] = [place(1), inside(ratio)].sort((a, b) => a - b);
  const cut = ratio < limits[0] ? " cut" : ratio > limits[1] ? " cut above" : "";
  const track = html(
    "span",
    { class: "track", "aria-hidden": "true" },
    html("span", { class: "one", style: { left: `${place(1)}%` } }),
    html("span", {
      class: `bar${cut}${isKernel(row) ? "" : " peer"}`,
      style: { left: `${from}%`, width: `${to - from}%` },
    }),
    cut
      ? null
      : html("span", { class: "whisker", style: { left: `${inside(low)}%`, width: `${inside(high) - inside(low)}%` } }),
  );
  const verdict = low > 1 ? "win" : high < 1 ? "loss" : "even";
  const made = html(
    "div",
    {
      class: "bar-row",
      role: "button",
      style: { color: colour(row) },
      "aria-label": `${row.kernel}: ${interval([ratio, low, high])} of ${peerName(state.peer)}`,
    },
    html("span", { class: "bar-name" }, kernelName(row.kernel)),
    track,
    html("span", { class: `bar-value ${verdict}` }, times(ratio)),
  );
  return explained(made, () => rowWords(row), row);
}

function barAxis(limits) {
  const place = logScale(...limits, 0, 100);
  const ticks = [0.25, 0.5, 1, 2, 4, 8].filter((value) => value >= limits[0] && value <= limits[1]);
  const words = { 0.25: "¼", 0.5: "½" };
  return html(
    "div",
    { class: "bar-axis", "aria-hidden": "true" },
    html(
      "span",
      { class: "track" },
      ticks.map((value) => html("span", { style: { left: `${place(value)}%` } }, `${words[value] ?? value}×`)),
    ),
  );
}
